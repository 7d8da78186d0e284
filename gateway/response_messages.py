"""Messages of clients to /v1/responses: OpenAI's Responses API, text and images in and text out."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from gateway.messages import (
    MOST_KEYS,
    TAG,
    Effort,
    Function,
    FunctionChoice,
    ImageUrl,
    JsonObjectFormat,
    JsonSchema,
    Metadata,
    ModelRequest,
    NoLimit,
    Sampling,
    StreamOptions,
    Text,
    TextFormat,
    Thinking,
    Verbosity,
    Wire,
    kind_of,
    kind_of_choice,
)

ResponseId = Annotated[str, Field(max_length=64)]
CallId = Annotated[str, Field(min_length=1, max_length=256)]
MOST_ITEMS = 100  # the most that one request adds to a conversation
LOGPROBS = "message.output_text.logprobs"
Included = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]  # none is encrypted


class SchemaFormat(JsonSchema):
    """A schema, as this API writes it."""

    type: Literal["json_schema"]


class TextConfig(Wire):
    format: Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Verbosity | None = None


class Reasoning(Wire):
    """`effort` is a variable of the chat template. The reasoning itself is returned, not a summary of it."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class Item(Wire):
    """An item that may come from an earlier answer. OpenAI's package adds keys of newer versions of the API, which are null."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict) or len(value) > MOST_KEYS:
            return value
        return {key: held for key, held in value.items() if held is not None or key in cls.model_fields}


class InputText(Item):
    """Text of a message; an answer's own parts are taken back with what they carried."""

    type: Literal["input_text", "output_text", "text"]
    text: Text
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputImage(Item):
    """`file_id` names a file of OpenAI's own, which this server has not."""

    type: Literal["input_image"]
    file_id: None = None  # ahead of the URL, which is missing where this one stands
    image_url: ImageUrl


InputPart = Annotated[
    Annotated[InputText, Tag("input_text" + TAG)]
    | Annotated[InputText, Tag("output_text" + TAG)]
    | Annotated[InputText, Tag("text" + TAG)]
    | Annotated[InputImage, Tag("input_image" + TAG)],
    Discriminator(kind_of),
]
InputParts = Annotated[list[InputPart], Field(fail_fast=True)]


class InputMessage(Item):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | InputParts
    type: Literal["message"] = "message"
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class FunctionCallItem(Item):
    """A call of an earlier answer."""

    type: Literal["function_call"]
    call_id: CallId
    name: Annotated[str, Field(max_length=64)]
    arguments: Text
    id: str | None = None
    status: str | None = None


class FunctionOutputItem(Item):
    """The result of a function call."""

    type: Literal["function_call_output"]
    call_id: CallId
    output: Text | InputParts
    id: str | None = None
    status: str | None = None


class ReasoningText(Item):
    type: Literal["reasoning_text"]
    text: Text


class ReasoningItem(Item):
    """The reasoning of an earlier answer; some chat templates show it to the model. A summary is not looked at."""

    type: Literal["reasoning"]
    summary: Annotated[list[Any], Field(max_length=MOST_ITEMS)] | None = None
    content: Annotated[list[ReasoningText], Field(max_length=MOST_ITEMS, fail_fast=True)] | None = None
    id: str | None = None
    status: str | None = None


def _kind_of_item(item: Any) -> str:
    """A message needs no type."""
    found = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", "message")
    return found if isinstance(found, str) else "message"


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind_of_item),
]


class ResponseFunction(Function):
    """A tool as this API writes it. `strict`: as of a function in chat completions."""

    type: Literal["function"]


class ResponseToolChoice(FunctionChoice):
    type: Literal["function"]


class ResponseAllowedTools(Wire):
    """A choice of tools: the model is shown all, and may call these."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ResponseToolChoice], Field(min_length=1, max_length=128, fail_fast=True)]


ResponseChosenTools = Annotated[
    Annotated[ResponseToolChoice, Tag("function" + TAG)] | Annotated[ResponseAllowedTools, Tag("allowed_tools" + TAG)],
    Discriminator(kind_of_choice),
]


class ConversationRef(Wire):
    id: ResponseId


class NewConversation(Wire):
    """POST /v1/conversations"""

    items: Annotated[list[InputItem], Field(max_length=MOST_ITEMS, fail_fast=True)] | None = None
    metadata: Metadata | None = None


class ConversationMetadata(Wire):
    """POST /v1/conversations/{id}"""

    metadata: Metadata


class ConversationItems(Wire):
    """POST /v1/conversations/{id}/items"""

    items: Annotated[list[InputItem], Field(min_length=1, max_length=MOST_ITEMS, fail_fast=True)]


class Asking(ModelRequest):
    """The input of a response."""

    input: Text | Annotated[list[InputItem], Field(min_length=1, fail_fast=True)]
    instructions: Text | None = None
    previous_response_id: ResponseId | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    tools: Annotated[list[ResponseFunction], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseChosenTools | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["disabled"] | None = None  # any other value is known, and refused
    conversation: ResponseId | ConversationRef | None = None


class InputTokensRequest(Asking):
    """POST /v1/responses/input_tokens"""


class ResponseRequest(Asking, Thinking, Sampling):
    """POST /v1/responses"""

    store: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | NoLimit | None = None
    stream_options: StreamOptions | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: Annotated[list[Included], Field(fail_fast=True)] | None = None
    # Known and refused, but for their neutral values.
    background: Literal[False] | None = None
    prompt: None = None
    # They come back with the answer.
    user: str | None = None
    metadata: Metadata | None = None
