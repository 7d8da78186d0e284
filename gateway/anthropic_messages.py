"""Messages of clients to /v1/messages: Anthropic's Messages API, text and images in and text out.

Its client sends back what it got, with the keys of newer versions of the API, which are null; these are passed over.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from gateway.messages import TAG, ImageUrl, ModelRequest, Nothing, Text, Tree, Wire, Words, kind_of
from gateway.response_messages import Item

MOST_TOOLS = 512  # agents with several tool servers send hundreds
BlockId = Annotated[str, Field(min_length=1, max_length=256)]


class CacheControl(Wire):
    """Every prompt is cached, so it changes nothing but how the usage divides the prompt's tokens."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class _Block(Item):
    cache_control: CacheControl | None = None


class TextBlock(_Block):
    type: Literal["text"]
    text: Text
    citations: list[Any] | None = None  # an earlier answer's, which are not shown to the model


class SearchResultBlock(_Block):
    """A text with its title and source, which are shown to the model in front of it."""

    type: Literal["search_result"]
    title: Text
    source: Text
    content: Annotated[list[TextBlock], Field(fail_fast=True)]
    citations: dict[str, Any] | None = None


class ThinkingBlock(_Block):
    """Reasoning of an earlier answer. Its signature is not checked: a client may write any reasoning into its prompt."""

    type: Literal["thinking"]
    thinking: Text
    signature: Text = ""


class RedactedThinkingBlock(_Block):
    """Reasoning that another server has encrypted. It is left out, because this server cannot read it."""

    type: Literal["redacted_thinking"]
    data: Text


class ToolUseBlock(_Block):
    """A call of an earlier answer."""

    type: Literal["tool_use"]
    id: BlockId
    name: Annotated[str, Field(max_length=256)]
    input: Tree
    caller: dict[str, Any] | None = None


class Base64Source(Item):
    """`media_type`: not looked at, for the bytes say what they are."""

    type: Literal["base64"]
    data: ImageUrl
    media_type: Annotated[str, Field(max_length=256)]


class UrlSource(Item):
    type: Literal["url"]
    url: ImageUrl


class ImageBlock(_Block):
    type: Literal["image"]
    source: Annotated[
        Annotated[Base64Source, Tag("base64" + TAG)] | Annotated[UrlSource, Tag("url" + TAG)], Discriminator(kind_of)
    ]


ResultBlock = Annotated[
    Annotated[TextBlock, Tag("text" + TAG)]
    | Annotated[SearchResultBlock, Tag("search_result" + TAG)]
    | Annotated[ImageBlock, Tag("image" + TAG)],
    Discriminator(kind_of),
]


class ToolResultBlock(_Block):
    """The result of a tool. A missing content is an empty text."""

    type: Literal["tool_result"]
    tool_use_id: BlockId
    content: Text | Annotated[list[ResultBlock], Field(fail_fast=True)] | None = None
    is_error: bool | None = None


AnyBlock = (
    TextBlock | SearchResultBlock | ImageBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock
)
Block = Annotated[
    Annotated[TextBlock, Tag("text" + TAG)]
    | Annotated[SearchResultBlock, Tag("search_result" + TAG)]
    | Annotated[ImageBlock, Tag("image" + TAG)]
    | Annotated[ThinkingBlock, Tag("thinking" + TAG)]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking" + TAG)]
    | Annotated[ToolUseBlock, Tag("tool_use" + TAG)]
    | Annotated[ToolResultBlock, Tag("tool_result" + TAG)],
    Discriminator(kind_of),
]


class InputTurn(Wire):
    role: Literal["user", "assistant", "system"]
    content: Text | Annotated[list[Block], Field(fail_fast=True)]


class CustomTool(Wire):
    """A tool that the client runs. `strict`: as of a function in chat completions."""

    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,128}$")]
    input_schema: Tree
    description: Text | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None  # the input of a call is sent when it is complete
    # Known and refused, but for their neutral values.
    defer_loading: Literal[False] | None = None
    allowed_callers: Annotated[list[Literal["direct"]], Field(max_length=1, fail_fast=True)] | None = None
    input_examples: Nothing | None = None


class ChosenTool(Wire):
    """`name`: with the type tool only."""

    type: Literal["auto", "any", "tool", "none"]
    name: Annotated[str, Field(max_length=256)] | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Wire):
    """The model's reasoning: on, off, or as the model decides. `budget_tokens` goes with `enabled`; `display` `omitted` leaves
    the text of the reasoning out.
    """

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Wire):
    type: Literal["json_schema"]
    schema_: Annotated[Tree, Field(alias="schema")]


class OutputConfig(Wire):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class ClearThinking(Wire):
    """Which reasoning of earlier turns the model sees is the chat template's business."""

    type: Literal["clear_thinking_20251015"]
    keep: dict[str, Any] | Literal["all"] | None = None


class ContextManagement(Wire):
    edits: Annotated[list[ClearThinking], Field(fail_fast=True)] | None = None


class CountTokensRequest(ModelRequest):
    """POST /v1/messages/count_tokens"""

    messages: Annotated[list[InputTurn], Field(min_length=1, fail_fast=True)]
    system: Text | Annotated[list[TextBlock], Field(fail_fast=True)] | None = None
    tools: Annotated[list[CustomTool], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = None
    tool_choice: ChosenTool | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    context_management: ContextManagement | None = None
    chat_template_kwargs: Tree | None = None  # vLLM's
    # Known and refused, but for their neutral values.
    speed: Literal["standard"] | None = None
    mcp_servers: Nothing | None = None


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages"""

    max_tokens: Annotated[int, Field(ge=0, lt=1 << 31)]  # 0: the prompt is computed, so that it is cached
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    stop_sequences: Words | None = None
    stream: bool | None = None
    # Known and refused, but for its neutral value.
    container: None = None
