"""The table of tool formats. A new one is a file and a row."""

from __future__ import annotations

from typing import NamedTuple

from gateway.tool_formats.deepseek import DeepSeekV3, DeepSeekV31
from gateway.tool_formats.format import ToolFormat
from gateway.tool_formats.granite import Granite
from gateway.tool_formats.harmony import Harmony
from gateway.tool_formats.hermes import Hermes
from gateway.tool_formats.kimi import Kimi
from gateway.tool_formats.llama import LlamaJson
from gateway.tool_formats.mistral import Mistral, MistralNamed
from gateway.tool_formats.pythonic import Pythonic
from gateway.tool_formats.tagged import GlmTags, QwenTags


class Row(NamedTuple):
    format: ToolFormat
    marks: tuple[str, ...]  # a chat template that holds all of them belongs to a model of this format


TOOL_FORMATS: dict[str, Row] = {
    "harmony": Row(Harmony(), ("<|channel|>", "<|message|>")),
    "kimi": Row(Kimi(), ("<|tool_calls_section_begin|>",)),
    "deepseek_v3": Row(DeepSeekV3(), ("<｜tool▁calls▁begin｜>", "```json")),
    "deepseek_v31": Row(DeepSeekV31(), ("<｜tool▁calls▁begin｜>",)),
    "mistral_named": Row(MistralNamed(), ("[TOOL_CALLS]", "[ARGS]")),
    "mistral": Row(Mistral(), ("[TOOL_CALLS]",)),
    "glm": Row(GlmTags(), ("<arg_key>",)),
    "qwen_tags": Row(QwenTags(), ("<function=", "<parameter=")),
    "granite": Row(Granite(), ("<|tool_call|>",)),
    "hermes": Row(Hermes(), ("<tool_call>",)),
    "pythonic": Row(Pythonic(), ("func_name1(params_name1=",)),
    "llama": Row(LlamaJson(), ('"parameters": ', "ipython")),
}
DEFAULT = "hermes"


def found_in(template: str) -> str:
    """The name of the format that a chat template shows: the first one in the table that fits; DEFAULT if none does."""
    return next((name for name, row in TOOL_FORMATS.items() if all(mark in template for mark in row.marks)), DEFAULT)
