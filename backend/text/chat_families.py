"""Chat templates of well-known families, for GGUF files that hold none. A family is known by tokens that only it has.

A row says what stands around the content of each role's messages, as the family's published templates have it. Most of those can
do more (tools, reasoning), which is the reason why they are the first choice.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from backend.api.checkpoint.gguf import GgufHeader
from backend.text.gguf_vocabulary import is_whole, read_vocabulary

BOS, EOS = "bos_token", "eos_token"


class Turns(NamedTuple):
    """For each role the text in front of a message and behind it."""

    user: tuple[str, str]
    assistant: tuple[str, str]
    system: tuple[str, str] | None  # None: a system message is put in front of the next user's content


class Family(NamedTuple):
    name: str
    marks: tuple[str, ...]  # its tokens: a file that has all of them is one of the family's
    turns: Turns
    start: str = BOS
    trims: bool = False  # content is stripped of white space at its ends


def _turns(before: str, after: str, user: str = "user", assistant: str = "assistant", system: str = "system") -> Turns:
    """`before` has a place for the name of the role."""
    return Turns((before.format(user), after), (before.format(assistant), after), (before.format(system), after))


_IM, _PHI3 = ("<|im_start|>", "<|im_end|>"), ("<|user|>", "<|assistant|>", "<|end|>")
_COMMAND_R = ("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>")
_GRANITE, _LLAMA3 = ("<|start_of_role|>", "<|end_of_role|>"), ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_DEEPSEEK, _INST = ("<｜User｜>", "<｜Assistant｜>"), ("[INST]", "[/INST]")
_SYSTEM = ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]")
# The first row that fits is taken.
FAMILIES = (
    Family("Llama 3", _LLAMA3, _turns("<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>"), trims=True),
    Family(
        "Gemma", ("<start_of_turn>", "<end_of_turn>"),
        _turns("<start_of_turn>{}\n", "<end_of_turn>\n", "user", "model")._replace(system=None), trims=True,
    ),
    Family("Granite", _GRANITE, _turns("<|start_of_role|>{}<|end_of_role|>", "<|end_of_text|>\n"), start=""),
    Family(
        "Command R", _COMMAND_R,
        _turns("<|START_OF_TURN_TOKEN|><|{}_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "USER", "CHATBOT", "SYSTEM"), trims=True,
    ),
    Family("DeepSeek", _DEEPSEEK, Turns(("<｜User｜>", ""), ("<｜Assistant｜>", EOS), ("", ""))),
    Family("GLM-4", ("[gMASK]", "<sop>", "<|user|>", "<|assistant|>"), _turns("<|{}|>\n", ""), start="[gMASK]<sop>"),
    Family("Phi-4", (*_IM, "<|im_sep|>"), _turns("<|im_start|>{}<|im_sep|>", "<|im_end|>"), start=""),
    Family("Phi-3", _PHI3, _turns("<|{}|>\n", "<|end|>\n"), start=""),
    # Without spaces, as with byte-level BPE: SentencePiece puts one behind each special token by itself.
    Family("Mistral 7", (*_INST, *_SYSTEM), Turns(_INST, ("", EOS), _SYSTEM)),
    Family("Mistral", _INST, Turns(_INST, ("", EOS), None)),
    Family("ChatML", _IM, _turns("<|im_start|>{}\n", "<|im_end|>\n"), start=""),
)  # fmt: skip


def family_of(header: GgufHeader) -> Family | None:
    """The family of a GGUF file. Raises ConfigError for a list of tokens that cannot be read."""
    tokens = read_vocabulary(header)
    whole = {text for text, kind in zip(tokens.texts, tokens.kinds) if is_whole(kind)}
    return next((family for family in FAMILIES if whole.issuperset(family.marks)), None)


def template_of(family: Family) -> str:
    """The Jinja source of a family's template."""
    content = "{{ message.content | trim }}" if family.trims else "{{ message.content }}"
    user, assistant, system = family.turns
    keeps, shows, forgets = (
        "{% set kept.system = message.content | trim ~ '\\n\\n' %}",
        "{{ kept.system }}",
        "{% set kept.system = '' %}",
    )
    parts = {
        "system": keeps if system is None else _around(system, content),
        "user": _around(user, shows + content) + forgets if system is None else _around(user, content),
        "assistant": _around(assistant, content),
    }
    turns = "".join(
        f"{{% {'if' if role == 'system' else 'elif'} message.role == '{role}' %}}{part}" for role, part in parts.items()
    )
    wrong = (
        "{% else %}{{ raise_exception('the roles of this chat template are system, user and assistant') }}{% endif %}"
    )
    return (
        f"{_shown(family.start)}{{% set kept = namespace(system='') %}}"
        f"{{% for message in messages %}}{turns}{wrong}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{_shown(assistant[0])}{{% endif %}}"
    )


def _around(ends: tuple[str, str], content: str) -> str:
    return _shown(ends[0]) + content + _shown(ends[1])


def _shown(text: str) -> str:
    """A Jinja expression that shows a text, or the token with this name."""
    return "" if not text else f"{{{{ {text if text in (BOS, EOS) else json.dumps(text, ensure_ascii=False)} }}}}"
