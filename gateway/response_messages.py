"""What clients send to /v1/responses: OpenAI's Responses API, text in and text out."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from gateway.messages import (
    JsonObjectFormat,
    JsonSchema,
    Nothing,
    Sampling,
    StreamOptions,
    Text,
    TextFormat,
    Wire,
)

ResponseId = Annotated[str, Field(max_length=64)]


class SchemaFormat(JsonSchema):
    """A schema, as this API writes it."""

    type: Literal["json_schema"]


class TextConfig(Wire):
    format: Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["medium"] | None = None


class InputText(Wire):
    """Text of a message; an answer's own parts are taken back with what they carried."""

    type: Literal["input_text", "output_text", "text"]
    text: Text
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputMessage(Wire):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[InputText], Field(fail_fast=True)]
    type: Literal["message"] = "message"
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class ResponseRequest(Sampling):
    """POST /v1/responses"""

    input: Text | Annotated[list[InputMessage], Field(min_length=1, fail_fast=True)]
    instructions: Text | None = None
    previous_response_id: ResponseId | None = None
    store: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    stream_options: StreamOptions | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    text: TextConfig | None = None
    # Known and refused, but for their neutral values.
    tools: Nothing | None = None
    tool_choice: Literal["none", "auto"] | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    conversation: None = None
    reasoning: None = None
    prompt: None = None
    # Accepted; they change nothing here.
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
