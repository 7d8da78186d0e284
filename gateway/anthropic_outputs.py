"""Replies of /v1/messages as the page /openapi.json describes them. They are encoded from dictionaries."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


class AnthropicErrorValues(BaseModel):
    type: str
    message: str


class AnthropicErrorBody(BaseModel):
    type: Literal["error"]
    error: AnthropicErrorValues
    request_id: str


class TextOutput(BaseModel):
    type: Literal["text"]
    text: str


class ThinkingOutput(BaseModel):
    type: Literal["thinking"]
    thinking: str
    signature: Literal[""]


class ToolUseOutput(BaseModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: Any


class OutputTokensDetails(BaseModel):
    thinking_tokens: int


class MessageUsage(BaseModel):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int  # text, calls and reasoning together
    output_tokens_details: OutputTokensDetails
    service_tier: Literal["standard"]


class MessageBody(BaseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextOutput | ThinkingOutput | ToolUseOutput]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
    stop_sequence: str | None
    usage: MessageUsage


class InputTokensCount(BaseModel):
    input_tokens: int
