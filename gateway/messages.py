"""Messages of clients: chat completions and completions of OpenAI's API, with the parameters that vLLM adds to them.

A parameter that is known but not served is declared with its neutral value only, so that the page /openapi.json tells
the truth, and is refused by name otherwise (gateway/invalid.py).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, create_model, model_validator
from pydantic_core import PydanticCustomError

from backend.api.sampling import PLAIN

MOST_KEYS = 100  # in one object; twice as many as the largest message has


def _finite(tree: dict[str, Any]) -> dict[str, Any]:
    """Refuse NaN and infinite numbers, of which there are none in JSON: on the way to the model they would become null."""
    waiting: list[Any] = [tree]
    while waiting:
        match waiting.pop():
            case dict() as found:
                waiting += found.values()
            case list() as found:
                waiting += found
            case float() as found if not math.isfinite(found):
                raise PydanticCustomError("finite_numbers", "Input should be an object whose numbers are finite")
    return tree


Tree = Annotated[dict[str, Any], AfterValidator(_finite)]  # an object that is passed on as it is
Text = Annotated[str, Field(max_length=1 << 24)]
Words = Annotated[list[Annotated[str, Field(min_length=1, max_length=10_000)]], Field(fail_fast=True)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Biases = Annotated[
    dict[Annotated[str, Field(pattern="^[0-9]{1,10}$")], Bias],
    Field(fail_fast=True, json_schema_extra={"additionalProperties": False}),
]
Seed = Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)]
Budget = Annotated[int, Field(ge=0, lt=1 << 31)]
NoLimit = Literal[-1]  # clients of LM Studio and llama.cpp send it for as many tokens as fit
Nothing = Annotated[list[Any], Field(max_length=0, fail_fast=True)]
Empty = Annotated[dict[str, Any], Field(max_length=0)]
Metadata = Annotated[dict[str, str], Field(max_length=16, fail_fast=True)]


class Wire(BaseModel):
    """A JSON object that is read strictly: right types, no unknown key. The first wrong entry of a list or map ends its check."""

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _has_few_keys(cls, value: Any) -> Any:
        """Refuse an object with many keys before pydantic makes an error of each unknown one."""
        if isinstance(value, dict) and len(value) > MOST_KEYS:
            raise PydanticCustomError("too_many_keys", "Input should have at most {limit} keys", {"limit": MOST_KEYS})
        return value


class TextFormat(Wire):
    type: Literal["text"]


class JsonObjectFormat(Wire):
    """Any JSON object, or one of the schema, as llama.cpp's clients ask for it."""

    type: Literal["json_object"]
    schema_: Annotated[Tree | None, Field(alias="schema")] = None


class JsonSchema(Wire):
    """`strict` changes nothing: the output has the form in any case."""

    name: Annotated[str, Field(max_length=256)]
    description: str | None = None
    schema_: Annotated[Tree | None, Field(alias="schema")] = None
    strict: bool | None = None


class JsonSchemaFormat(Wire):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, fail_fast=True)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
Verbosity = Literal["low", "medium", "high"]


class StructuredOutputs(Wire):
    """vLLM's: the form of the output. One of the keys is expected."""

    json_: Annotated[Tree | Text | None, Field(alias="json")] = None  # a schema, or its text
    json_object: Literal[True] | None = None
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    structural_tag: Tree | Text | None = None


class StreamOptions(Wire):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: every chunk has the usage so far


class ModelRequest(Wire):
    """A request to one of the models."""

    model: Annotated[str, Field(max_length=256)]


if TYPE_CHECKING:
    _PlainFields = ModelRequest
else:
    _PlainFields = create_model(
        "_PlainFields",
        __base__=ModelRequest,
        **{field.name: (Annotated[float, Field(ge=field.least, le=field.greatest)] | None, None) for field in PLAIN},
    )


class Sampling(_PlainFields):
    """How tokens are chosen: what all that generate share, beside PLAIN of backend/api/sampling.py."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    stream: bool | None = None
    # vLLM's additions.
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    ignore_eos: bool | None = None
    stop: str | Words | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: Words | None = None
    seed: Seed | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Biases | None = None

    # Sent by other servers' clients and routers with every request. Values that would change the answer are refused by name.
    skip_special_tokens: bool | None = None
    no_stop_trim: Literal[False] | None = None  # include_stop_str_in_output is the same
    return_hidden_states: Literal[False] | None = None
    separate_reasoning: bool | None = None  # false: the answer's content is the model's text as it is, marks included
    include_reasoning: bool | None = None  # false: the reasoning is left out of the answer
    service_tier: Literal["auto", "default", "flex", "priority", "scale"] | None = None  # there is one: default


class Completing(Sampling):
    """Fields of both chat completions and completions."""

    n: Annotated[int, Field(ge=1, le=128)] | None = None
    use_beam_search: bool | None = None  # vLLM's, as the two below
    length_penalty: Annotated[float, Field(ge=-50, le=50)] | None = None
    early_stopping: bool | Literal["never"] | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | NoLimit | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | NoLimit | None = None
    min_new_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None  # LMDeploy's name of min_tokens
    kwargs: Empty | None = None  # LMDeploy's client sends it with every request
    stream_options: StreamOptions | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None  # vLLM's: so many at each token of the prompt
    return_token_ids: bool | None = None  # vLLM's: the answer has the ids of its tokens, and of the prompt's
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None  # vLLM's
    guided_json: Tree | Text | None = None  # the same by their older names
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None


class ThinkingSwitch(Wire):
    """Reasoning on or off, as the APIs of DeepSeek, GLM and Kimi have it; `enable_thinking` by another name."""

    type: Literal["enabled", "disabled"]


class Thinking(Wire):
    """The most tokens of reasoning, under the names of Qwen's API, of vLLM, and of others."""

    thinking_budget: Budget | None = None
    thinking_token_budget: Budget | None = None
    max_reasoning_tokens: Budget | None = None


class TextPart(Wire):
    type: Literal["text"]
    text: Text


ImageUrl = Annotated[str, Field(max_length=1 << 27)]  # data: with base64, or https: of an allowed host


class ImageAt(Wire):
    url: ImageUrl


class ImagePart(Wire):
    type: Literal["image_url"]
    image_url: ImageUrl | ImageAt

    @property
    def url(self) -> str:
        return self.image_url if isinstance(self.image_url, str) else self.image_url.url


FunctionName = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]


class Function(Wire):
    """`strict`: refused where the schema cannot be held in full; otherwise arguments satisfy as much of it as can be held."""

    name: FunctionName
    description: str | None = None
    parameters: Tree | None = None
    strict: bool | None = None


class Tool(Wire):
    type: Literal["function"]
    function: Function


class FunctionChoice(Wire):
    name: FunctionName


class ToolChoice(Wire):
    type: Literal["function"]
    function: FunctionChoice


class AllowedTools(Wire):
    """A choice of tools: the model is shown all, and may call these."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolChoice], Field(min_length=1, max_length=128, fail_fast=True)]


class AllowedToolsChoice(Wire):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


TAG = "-block"  # suffix of the tags of a union's members, so that no tag is the name of a field


def kind_of_choice(choice: Any) -> str:
    """The tag of an object in `tool_choice`; what is no object is refused as one that names a function."""
    found = choice.get("type", "function") if isinstance(choice, dict) else getattr(choice, "type", "function")
    return f"{found}{TAG}" if isinstance(found, str) else f"function{TAG}"


def kind_of(part: Any) -> str | None:
    """The tag of a part of a content, a block or a source."""
    found = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    return f"{found}{TAG}" if isinstance(found, str) else None


ContentPart = Annotated[
    Annotated[TextPart, Tag("text" + TAG)] | Annotated[ImagePart, Tag("image_url" + TAG)], Discriminator(kind_of)
]
ChosenTools = Annotated[
    Annotated[ToolChoice, Tag("function" + TAG)] | Annotated[AllowedToolsChoice, Tag("allowed_tools" + TAG)],
    Discriminator(kind_of_choice),
]


class CalledFunction(Wire):
    name: str
    arguments: Text


class ToolCall(Wire):
    """A call of an earlier answer. `index`: as streams have it."""

    id: str
    type: Literal["function"]
    function: CalledFunction
    index: int | None = None


class ChatMessage(Wire):
    """One turn. What an answer's message carries besides its text is taken back when it is empty."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=128, fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: Text | None = None  # an earlier answer's; some templates show it to the model
    reasoning: Text | None = None  # the same by its other name
    annotations: Nothing | None = None


class ChatRequest(Completing, Thinking):
    """POST /v1/chat/completions"""

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTools | None = None
    # Variables of the chat template besides the messages.
    add_generation_prompt: bool | None = None  # vLLM's, as the two below
    continue_final_message: bool | None = None
    chat_template_kwargs: Tree | None = None
    enable_thinking: bool | None = None  # the variable of Qwen's templates, as its API has it
    thinking: ThinkingSwitch | None = None
    reasoning_effort: Effort | None = None
    verbosity: Verbosity | None = None
    # Known and refused, but for their neutral values.
    functions: Nothing | None = None
    function_call: Literal["none", "auto"] | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1, fail_fast=True)] | None = None
    audio: None = None
    prediction: None = None
    web_search_options: None = None
    parallel_tool_calls: bool | None = None


Prompt = (
    Text
    | Annotated[list[Text], Field(min_length=1, fail_fast=True)]
    | Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
    | Annotated[
        list[Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]], Field(min_length=1, fail_fast=True)
    ]
)


class CompletionRequest(Completing):
    """POST /v1/completions"""

    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | NoLimit | None = (
        None  # 0 with echo: only the prompt is scored
    )
    max_completion_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | NoLimit | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None
    suffix: Text | None = None  # the model fills in what stands between prompt and suffix


class LoadAdapter(Wire):
    """`lora_path`: a directory below `lora.allowed_dir`. `model`: the one that it is for, where the server has several."""

    lora_name: Annotated[str, Field(min_length=1, max_length=256)]
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    model: Annotated[str, Field(max_length=256)] | None = None


class UnloadAdapter(Wire):
    lora_name: Annotated[str, Field(min_length=1, max_length=256)]
    model: Annotated[str, Field(max_length=256)] | None = None
