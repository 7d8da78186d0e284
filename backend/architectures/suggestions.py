"""Names of architectures that look like one that is not known."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_ENDING = re.compile(r"(ForCausalLM|ForConditionalGeneration|ForMaskedLM|Model|LMHeadModel)$")


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """At most three of `known`, the most alike first. Endings that most names have, as ForCausalLM, do not count."""
    stems: dict[str, list[str]] = {}
    for each in dict.fromkeys(known):
        stems.setdefault(_ENDING.sub("", each), []).append(each)
    found = difflib.get_close_matches(_ENDING.sub("", name[:100]), stems, n=3, cutoff=0.6)
    return [each for stem in found for each in stems[stem]][:3]


def refusal(place: str, name: str, shown: str, known: Iterable[str], remedy: str) -> str:
    """The sentence for an architecture that is not known. `place`: where it was read; `shown`: the name, made fit to print."""
    names = list(dict.fromkeys(known))
    if not name:
        return f"{place}: architectures names none; use the config.json that came with the model"
    near = nearest(name, names)
    advice = f"near it are {', '.join(near)}, and " if near else ""
    return f"{place}: {shown} is not supported; {advice}docs/models.md lists the {len(names)} that are: {remedy}"
