"""The keyword arguments that every way of asking takes, for the type checker and for a person who mistypes one."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from client.guide import Guide
from client.messages import GenerateRequest, Message, Session


class GenerateOptions(TypedDict, total=False):
    """How to generate. What is left out, or None, is the server's default."""

    max_tokens: int  # at most; 64 unless given
    temperature: float | None  # 0 is greedy
    top_k: int | None  # sample among the k likeliest; 1 is greedy
    top_p: float | None  # nucleus sampling, 0 to 1
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    seed: int | None  # same seed, same text (exactly so in float32)
    min_tokens: int | None
    end_id: int | None  # token id that ends the output in place of the model's own
    n: int | None  # outputs of one prompt, each sampled for itself; of beams the n best
    beam_width: int | None  # beam search in place of sampling
    length_penalty: float | None  # beam search prefers long beams above 0
    stop_words: Sequence[str]  # texts that end the output, and are left out of it
    bad_words: Sequence[str]  # texts that are never generated
    exclude_input: bool  # False: the output begins with the prompt
    return_log_probs: bool | None
    stream: bool  # one response per token, or one in all
    lora_name: str | None  # an adapter of the server (lora.adapters)
    guide: Guide | None  # the form of the output
    session: Session | None
    namespace: str | None  # None: the client's own


def make_request(
    prompt: str | None, messages: Sequence[Message] | None, options: Mapping[str, Any], **defaults: Any
) -> GenerateRequest:
    """The request of these arguments, checked. Raises TypeError and ValueError that name the argument."""
    check_names(options)
    request = GenerateRequest(prompt=prompt, messages=messages, **{**defaults, **options})
    request.check()
    return request


def check_names(options: Mapping[str, Any]) -> None:
    """Raise TypeError for an option that there is not, with the one that may be meant."""
    known = GenerateOptions.__annotations__
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise TypeError(f"{name!r} is no option; {hint}")
