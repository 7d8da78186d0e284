"""Messages of clients that only want tokens or text, as vLLM has them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from gateway.messages import ChatMessage, ModelRequest, Text, TokenIds, Tool, Tree


class TokenizeRequest(ModelRequest):
    """POST /tokenize: the tokens of a prompt, or of a conversation as the chat template writes it."""

    prompt: Text | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Tree | None = None
    # Known and refused, but for their neutral values.
    add_special_tokens: bool | None = None  # as the model takes them: true with a prompt, false with messages
    return_token_strs: Literal[False] | None = None


class DetokenizeRequest(ModelRequest):
    """POST /detokenize"""

    tokens: Annotated[TokenIds, Field(min_length=1)]


class TokenizeBody(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: None


class TokenizerInfo(BaseModel):
    """With the tokens that it has names for, such as `eos_token`, and the `chat_template`."""

    model_config = ConfigDict(extra="allow")

    tokenizer_class: str
    model_max_length: int


class DetokenizeBody(BaseModel):
    prompt: str
