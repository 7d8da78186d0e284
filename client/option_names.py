"""Errors of the client in the words of the command line, whose options have names of their own."""

from __future__ import annotations

import re

OPTIONS = {
    "url": "--url",
    "protocol": "--protocol",
    "model": "--model-name",
    "namespace": "--namespace",
    "api_key": "--api-key",
    "ca_file": "--ca-file",
    "timeout_s": "--timeout",
    "max_tokens": "--max-tokens",
    "min_tokens": "--min-tokens",
    "temperature": "--temperature",
    "top_k": "--top-k",
    "top_p": "--top-p",
    "seed": "--seed",
    "stop_words": "--stop",
    "lora_name": "--lora-name",
}
_NAMES = "|".join(OPTIONS)
# The argument that an error is about comes first in it; a remedy holds what to give, as in url=HOST:PORT.
_SUBJECT = re.compile(rf"^({_NAMES})(?:\[\d+\])?(?= (?:is|has|holds|'))")
_REMEDY = re.compile(rf"(?<![\w.-])({_NAMES})=(?=\S)")


def on_the_command_line(error: str) -> str:
    """The text of an error with the client's arguments as options: `url=HOST:PORT` becomes `--url HOST:PORT`."""
    text = _SUBJECT.sub(lambda found: OPTIONS[found[1]], error)
    return _REMEDY.sub(lambda found: f"{OPTIONS[found[1]]} ", text)
