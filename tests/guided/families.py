"""The added tokens of published tokenizers, with their flags, on the default model's small byte-level vocabulary.

The flags are those of the families' tokenizer.json files, written down here from memory of them and not compared with the files.
What matters is that they differ: the marks of calls and of reasoning are special in some families and not in others.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import tokenizers

from backend.guided.vocabulary import TokenizerInfo, Vocabulary
from backend.text.tokenizer import Tokenizer
from tests.guided.tools import MODEL

_CALL, _RESPONSE, _THINK = (
    ["<tool_call>", "</tool_call>"],
    ["<tool_response>", "</tool_response>"],
    ["<think>", "</think>"],
)
_CHATML = ["<|im_start|>", "<|im_end|>"]
_FIM = ["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"]


class Family(NamedTuple):
    special: list[str]
    plain: list[str]  # added tokens with "special": false
    end: str


FAMILIES: dict[str, Family] = {
    "qwen 2.5": Family([*_CHATML, "<|vision_start|>", "<|image_pad|>"], [*_CALL, *_FIM], "<|im_end|>"),
    "qwen 3": Family([*_CHATML, "<|vision_start|>"], [*_CALL, *_RESPONSE, *_THINK, *_FIM], "<|im_end|>"),
    "hermes 3": Family(
        ["<|begin_of_text|>", *_CHATML], [*_CALL, *_RESPONSE, "<tools>", "</tools>", "<scratch_pad>"], "<|im_end|>"
    ),
    "llama 3": Family(["<|begin_of_text|>", "<|eom_id|>", "<|python_tag|>", "<|eot_id|>"], [], "<|eot_id|>"),
    "mistral": Family(
        ["<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", "</s>"], [], "</s>"
    ),
    "deepseek": Family(
        ["<｜begin▁of▁sentence｜>", "<｜▁pad▁｜>", "<｜end▁of▁sentence｜>"],
        [
            *(
                "<｜User｜>",
                "<｜Assistant｜>",
                "<｜fim▁hole｜>",
                *_THINK,
                "<｜tool▁calls▁begin｜>",
                "<｜tool▁calls▁end｜>",
            ),
            *("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        ],
        "<｜end▁of▁sentence｜>",
    ),
    "glm 4.5": Family(
        ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"],
        [*_CALL, *_RESPONSE, *_THINK, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
        "<|user|>",
    ),
    "gpt-oss": Family(
        ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>"],
        [],
        "<|return|>",
    ),
    "phi 4": Family(
        [*_CHATML, "<|im_sep|>", "<|end|>"], ["<|tool|>", "<|/tool|>", "<|tool_call|>", "<|/tool_call|>"], "<|im_end|>"
    ),
    "smollm 3": Family(
        [*_CHATML, "<|begin_of_text|>"], [*_CALL, *_RESPONSE, *_THINK, "<code>", "</code>"], "<|im_end|>"
    ),
    "granite 3": Family(
        ["<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>", "<|end_of_text|>"], [], "<|end_of_text|>"
    ),
    "kimi k2": Family(
        [
            *("[BOS]", "[EOS]", "<|im_end|>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        ],
        [],
        "<|im_end|>",
    ),
}


class Made(NamedTuple):
    family: Family
    tokenizer: Tokenizer
    plain: tokenizers.Tokenizer  # without any added token
    vocabulary: Vocabulary

    def id_of(self, text: str) -> int:
        found = self.tokenizer.token_to_id(text)
        assert found is not None
        return found

    def spelled(self, text: str) -> list[int]:
        """The ids of a text in ordinary tokens only."""
        ids: list[int] = self.plain.encode(text, add_special_tokens=False).ids
        return ids

    def written(self, text: str, plain: bool) -> list[int]:
        """The ids of a text that a model may write: special tokens as such, other added tokens too unless `plain`."""
        if not plain:
            return self.tokenizer.encode(text, add_special_tokens=False)
        marks = [mark for mark in self.family.special if mark != self.family.end and mark in text]
        if not marks:
            return self.spelled(text)
        place, mark = min((text.index(mark), mark) for mark in marks)
        rest = self.written(text[place + len(mark) :], plain)
        return [*self.spelled(text[:place]), self.id_of(mark), *rest]


@cache
def made(name: str) -> Made:
    family = FAMILIES[name]
    raw, plain = (tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json")) for _ in range(2))
    plain.encode_special_tokens = True  # as letters
    raw.add_tokens([tokenizers.AddedToken(text, special=False, normalized=False) for text in family.plain])
    raw.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in family.special])
    tokenizer = Tokenizer(raw, {"eos_token": family.end})
    return Made(family, tokenizer, plain, Vocabulary.of(TokenizerInfo.of_tokenizer(tokenizer), tokenizer.num_ids + 7))
