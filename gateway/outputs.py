"""Replies as the page /openapi.json describes them. They are encoded from dictionaries, not from these classes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from gateway.messages import JsonObjectFormat, TextFormat
from gateway.response_messages import SchemaFormat


class ErrorValues(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorValues


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    type: Literal["model"]  # this and the next three: what Anthropic's client reads
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_model_len: int | None = None  # tokens of prompt and answer together; absent while the model cannot be asked
    max_input_tokens: int | None = None  # the same by Anthropic's names
    max_tokens: int | None = None
    input_modalities: list[Literal["text", "image"]] | None = None  # absent while the model cannot be asked
    capabilities: list[str] | None = None  # completion, chat, tools, vision, fim, embedding, reasoning; absent as these
    parent: str | None = None  # the model that a LoRA adapter belongs to; None for a model


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]
    has_more: Literal[False]
    first_id: str | None
    last_id: str | None


class Health(BaseModel):
    status: Literal["ready"]


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    reasoning_tokens: int  # 0 where the reasoning is not told apart


class UsageBody(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TopLogProb(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogProb(TopLogProb):
    top_logprobs: list[TopLogProb]


class ChatLogProbs(BaseModel):
    content: list[ChatTokenLogProb]
    refusal: None


class FunctionCall(BaseModel):
    name: str
    arguments: str


class ToolCallBody(BaseModel):
    id: str
    type: Literal["function"]
    function: FunctionCall


class AssistantMessage(BaseModel):
    """`content` is null beside calls and nothing else; without calls there are no `tool_calls`."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCallBody] = []
    reasoning_content: str = ""  # absent where there is none, under either name
    reasoning: str = ""


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogProbs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    token_ids: list[int] = []  # where return_token_ids asks for it, as prompt_token_ids below


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    service_tier: Literal["default"] = "default"  # told where one was asked for
    prompt_token_ids: list[int] = []
    prompt_logprobs: list[dict[str, PromptToken] | None] = []  # where it is asked for
    choices: list[ChatChoice]
    usage: UsageBody


class CompletionLogProbs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]  # null for the first token of a prompt, which follows nothing
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptToken(BaseModel):
    logprob: float
    rank: int | None  # among the likeliest, from 1; null for a token that is none of them
    decoded_token: str


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogProbs | None
    finish_reason: Literal["stop", "length"]
    token_ids: list[int] = []  # where return_token_ids asks for it, as the next
    prompt_token_ids: list[int] = []
    prompt_logprobs: list[dict[str, PromptToken] | None] = []  # where it is asked for


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    service_tier: Literal["default"] = "default"  # told where one was asked for
    choices: list[CompletionChoice]
    usage: UsageBody


class OutputText(BaseModel):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ChatTokenLogProb]


class OutputMessage(BaseModel):
    id: str
    type: Literal["message"]
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningText(BaseModel):
    type: Literal["reasoning_text"]
    text: str


class ReasoningOutput(BaseModel):
    id: str
    type: Literal["reasoning"]
    status: Literal["in_progress", "completed", "incomplete"]
    summary: list[Any]  # empty
    content: list[ReasoningText]


class FunctionCallOutput(BaseModel):
    id: str
    type: Literal["function_call"]
    status: Literal["in_progress", "completed"]
    call_id: str
    name: str
    arguments: str


class InputTokens(BaseModel):
    object: Literal["response.input_tokens"]
    input_tokens: int


class ItemList(BaseModel):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class EmbeddingBody(BaseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str  # text: base64 of little-endian float32


class VectorUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(BaseModel):
    object: Literal["list"]
    data: list[EmbeddingBody]
    model: str
    usage: VectorUsage


class RankedText(BaseModel):
    text: str


class RankedDocument(BaseModel):
    index: int
    relevance_score: float
    document: RankedText | None = None  # told where return_documents is true


class Ranking(BaseModel):
    id: str
    model: str
    results: list[RankedDocument]
    usage: VectorUsage


class ItemBody(BaseModel):
    id: str
    type: Literal["message", "function_call", "function_call_output", "reasoning"]
    status: str


class ConversationBody(BaseModel):
    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]


class DeletedConversation(BaseModel):
    id: str
    object: Literal["conversation.deleted"]
    deleted: Literal[True]


class TextSettings(BaseModel):
    format: TextFormat | JsonObjectFormat | SchemaFormat


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseBody(BaseModel):
    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["completed", "incomplete", "in_progress", "failed"]
    error: dict[str, str] | None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage | ReasoningOutput | FunctionCallOutput]
    parallel_tool_calls: bool
    previous_response_id: str | None
    service_tier: Literal["default"] | None
    store: bool
    temperature: float | None
    text: TextSettings
    tool_choice: str | dict[str, Any]
    tools: list[Any]
    top_p: float | None
    truncation: str
    usage: ResponseUsage | None


class DeletedResponse(BaseModel):
    id: str
    object: Literal["response"]
    deleted: Literal[True]
