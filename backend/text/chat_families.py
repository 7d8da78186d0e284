"""Chat templates of well-known families, for GGUF files that hold none. A family is known by tokens that only it has.

A row says what stands around the content of each role's messages, as the family's published templates have it. Most of those can
do more (tools, reasoning), which is the reason why they are the first choice.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

from backend.api.checkpoint.gguf import GgufHeader
from backend.text.gguf_vocabulary import is_whole, read_vocabulary

BOS, EOS = "bos_token", "eos_token"


class Family(NamedTuple):
    name: str
    marks: tuple[str, ...]  # its tokens: a file that has all of them is one of the family's
    user: tuple[str, str]  # what stands in front of a message of this role, and behind it
    assistant: tuple[str, str]
    system: tuple[str, str] | None  # None: a system message is put in front of the next user's content
    start: str = BOS
    trims: bool = False  # content is stripped of spaces at its ends


def _same(before: str, after: str, *names: str) -> tuple[tuple[str, str], ...]:
    """`before` with the name of each role: of user, assistant and system."""
    roles = names or ("user", "assistant", "system")
    return tuple((before.format(role), after) for role in roles)


_IM, _PHI3 = ("<|im_start|>", "<|im_end|>"), ("<|user|>", "<|assistant|>", "<|end|>")
_COMMAND_R = ("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>")
_GRANITE, _LLAMA3 = ("<|start_of_role|>", "<|end_of_role|>"), ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_DEEPSEEK = ("<｜User｜>", "<｜Assistant｜>")
# The first row that fits is taken.
FAMILIES = (
    Family("Llama 3", _LLAMA3, *_same("<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>"), trims=True),
    Family(
        "Gemma", ("<start_of_turn>", "<end_of_turn>"),
        *_same("<start_of_turn>{}\n", "<end_of_turn>\n", "user", "model"), system=None, trims=True,
    ),
    Family("Granite", _GRANITE, *_same("<|start_of_role|>{}<|end_of_role|>", "<|end_of_text|>\n"), start=""),
    Family(
        "Command R", _COMMAND_R,
        *_same("<|START_OF_TURN_TOKEN|><|{}_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "USER", "CHATBOT", "SYSTEM"), trims=True,
    ),
    Family("DeepSeek", _DEEPSEEK, ("<｜User｜>", ""), ("<｜Assistant｜>", EOS), ("", "")),
    Family("GLM-4", ("[gMASK]", "<sop>", "<|user|>", "<|assistant|>"), *_same("<|{}|>\n", ""), start="[gMASK]<sop>"),
    Family("Phi-4", (*_IM, "<|im_sep|>"), *_same("<|im_start|>{}<|im_sep|>", "<|im_end|>"), start=""),
    Family("Phi-3", _PHI3, *_same("<|{}|>\n", "<|end|>\n"), start=""),
    # Without spaces, as with byte-level BPE: SentencePiece puts one behind each special token by itself.
    Family(
        "Mistral 7", ("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
        ("[INST]", "[/INST]"), ("", EOS), ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    ),
    Family("Mistral", ("[INST]", "[/INST]"), ("[INST]", "[/INST]"), ("", EOS), None),
    Family("ChatML", _IM, *_same("<|im_start|>{}\n", "<|im_end|>\n"), start=""),
)  # fmt: skip


def family_of(header: GgufHeader) -> Family | None:
    """The family of a GGUF file. Raises ConfigError for a list of tokens that cannot be read."""
    tokens = read_vocabulary(header)
    whole = {text for text, kind in zip(tokens.texts, tokens.kinds) if is_whole(kind)}
    return next((family for family in FAMILIES if whole.issuperset(family.marks)), None)


def template_of(family: Family) -> str:
    """The Jinja source of a family's template."""
    content = "{{ message.content | trim }}" if family.trims else "{{ message.content }}"
    kept = "" if family.system else "{{ kept.system }}"
    system = (
        _around(family.system, content)
        if family.system
        else "{% set kept.system = message.content | trim ~ '\\n\\n' %}"
    )
    parts: Mapping[str, str] = {
        "system": system,
        "user": _around(family.user, kept + content) + ("" if family.system else "{% set kept.system = '' %}"),
        "assistant": _around(family.assistant, content),
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
        f"{{% if add_generation_prompt %}}{_shown(family.assistant[0])}{{% endif %}}"
    )


def _around(ends: tuple[str, str], content: str) -> str:
    return _shown(ends[0]) + content + _shown(ends[1])


def _shown(text: str) -> str:
    """What shows a text, or the token that is called so."""
    return "" if not text else f"{{{{ {text if text in (BOS, EOS) else json.dumps(text, ensure_ascii=False)} }}}}"
