"""Chats of GGUF files without a template, against what llama.cpp expects of each family (tests/test-chat-template.cpp)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf import TokenType

from backend.api.errors import InvalidRequest
from backend.text.chat import ChatTemplate
from backend.text.chat_families import FAMILIES, Family
from backend.text.tokenizer import Tokenizer
from tests.text.gguf_tokenizers import write_tokens

CHAT = [
    {"role": "system", "content": "Be kind"},
    {"role": "user", "content": " Hello "},
    {"role": "assistant", "content": "Hi there"},
    {"role": "user", "content": "Who are you"},
]
# With an empty bos, and </s> for eos.
RENDERED = {
    "Llama 3": "<|start_header_id|>system<|end_header_id|>\n\nBe kind<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHello"
    "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nHi there<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
    "Who are you<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "Gemma": "<start_of_turn>user\nBe kind\n\nHello<end_of_turn>\n<start_of_turn>model\nHi there<end_of_turn>\n"
    "<start_of_turn>user\nWho are you<end_of_turn>\n<start_of_turn>model\n",
    "Granite": "<|start_of_role|>system<|end_of_role|>Be kind<|end_of_text|>\n<|start_of_role|>user<|end_of_role|> Hello "
    "<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>Hi there<|end_of_text|>\n<|start_of_role|>user<|end_of_role|>"
    "Who are you<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>",
    "Command R": "<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>Be kind<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|USER_TOKEN|>Hello"
    "<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>Hi there<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|>"
    "<|USER_TOKEN|>Who are you<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    "DeepSeek": "Be kind<｜User｜> Hello <｜Assistant｜>Hi there</s><｜User｜>Who are you<｜Assistant｜>",
    "GLM-4": "[gMASK]<sop><|system|>\nBe kind<|user|>\n Hello <|assistant|>\nHi there<|user|>\nWho are you<|assistant|>\n",
    "Phi-4": "<|im_start|>system<|im_sep|>Be kind<|im_end|><|im_start|>user<|im_sep|> Hello <|im_end|>"
    "<|im_start|>assistant<|im_sep|>Hi there<|im_end|><|im_start|>user<|im_sep|>Who are you<|im_end|>"
    "<|im_start|>assistant<|im_sep|>",
    "Phi-3": "<|system|>\nBe kind<|end|>\n<|user|>\n Hello <|end|>\n<|assistant|>\nHi there<|end|>\n<|user|>\nWho are you"
    "<|end|>\n<|assistant|>\n",
    "Mistral 7": "[SYSTEM_PROMPT]Be kind[/SYSTEM_PROMPT][INST] Hello [/INST]Hi there</s>[INST]Who are you[/INST]",
    "Mistral": "[INST]Be kind\n\n Hello [/INST]Hi there</s>[INST]Who are you[/INST]",
    "ChatML": "<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\n Hello <|im_end|>\n<|im_start|>assistant\nHi there"
    "<|im_end|>\n<|im_start|>user\nWho are you<|im_end|>\n<|im_start|>assistant\n",
}


def template(path: Path, marks: tuple[str, ...], kind: TokenType = TokenType.CONTROL, **settings: Any) -> ChatTemplate:
    tokens = {"a": TokenType.NORMAL, "aa": TokenType.NORMAL, "</s>": TokenType.CONTROL} | dict.fromkeys(marks, kind)
    file = write_tokens(path / "a.gguf", "gpt2", tokens, merges=["a a"], pre="gpt-2", eos_token_id=2, **settings)
    return ChatTemplate.from_directory(file, Tokenizer.from_directory(file))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_file_without_a_template_has_that_of_its_family(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, family: Family
) -> None:
    made = template(tmp_path, family.marks)
    assert made.render(CHAT) == RENDERED[family.name]
    assert RENDERED[family.name].startswith(made.render(CHAT[:3], add_generation_prompt=False))
    assert (
        f"a.gguf has no chat template: chats are written as models of the family {family.name} have them" in caplog.text
    )


def test_a_role_that_a_family_does_not_know_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="the roles of this chat template are system, user and assistant"):
        template(tmp_path, ("[INST]", "[/INST]")).render([{"role": "critic", "content": "no"}])


@pytest.mark.parametrize("marks, kind", [((), TokenType.CONTROL), (("<|im_start|>", "<|im_end|>"), TokenType.NORMAL)])
def test_a_file_of_no_known_family_has_no_template(tmp_path: Path, marks: tuple[str, ...], kind: TokenType) -> None:
    """A text that is no token by itself is no mark of a family."""
    assert not template(tmp_path, marks, kind).exists


def test_templates_of_the_file_come_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """tool_use is for requests with tools; one by another name is for none."""
    own = [
        {"name": "default", "template": "own"},
        {"name": "tool_use", "template": "{{ tools }}"},
        {"name": "rag", "template": "rag"},
    ]
    caplog.set_level("INFO", "everbatch.text")
    made = template(tmp_path, ("<|im_start|>", "<|im_end|>"), chat_template=own)
    assert (made.render(CHAT), made.render(CHAT, tools=[])) == ("own", "[]")
    measured = [record.getMessage() for record in caplog.records if record.name == "everbatch.text"]
    assert measured == ["a.gguf: no request uses the chat template tokenizer.chat_template.rag"]


def test_a_file_with_a_template_for_tools_alone_has_its_family_s_for_the_rest(tmp_path: Path) -> None:
    own = [{"name": "tool_use", "template": "{{ tools }}"}]
    made = template(tmp_path, ("<|im_start|>", "<|im_end|>"), chat_template=own)
    assert (made.render(CHAT), made.render(CHAT, tools=[])) == (RENDERED["ChatML"], "[]")
