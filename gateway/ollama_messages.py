"""Messages of Ollama's clients: /api/chat, /api/generate, /api/embed, /api/embeddings and /api/show.

`keep_alive` has no effect, for models stay loaded, and neither have the options that say how Ollama runs a model (both stand in
gateway/without_effect.py). An unknown option is refused by name, as every unknown key is here.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gateway.messages import Function, ImageUrl, ModelRequest, Seed, Text, Tree, Wire, Words

MOST_MESSAGES_OF_CALLS = 128  # calls of one message
Penalty = Annotated[float, Field(ge=-2, le=2)]
Effort = Literal["low", "medium", "high"]


class Options(Wire):
    """How tokens are chosen. `num_predict` -1 and -2: as many as fit."""

    num_predict: Annotated[int, Field(ge=-2, lt=1 << 31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repeat_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Seed | None = None
    stop: str | Words | None = None


class OllamaRequest(ModelRequest):
    """`stream` is true where it is left out."""

    stream: bool | None = None
    format: Literal["", "json"] | Tree | None = None  # an object is a schema
    options: Options | None = None
    think: bool | Effort | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def streams(self) -> bool:
        return self.stream is not False


class CalledFunction(Wire):
    """`index`: as answers have it."""

    name: Annotated[str, Field(max_length=256)]
    arguments: Tree
    index: int | None = None
    description: str | None = None


class CalledTool(Wire):
    function: CalledFunction
    id: Annotated[str, Field(max_length=256)] | None = None
    type: Literal["function"] | None = None


class OllamaMessage(Wire):
    """`tool_name` and `tool_call_id` say which call a message of role tool answers; without either it is the next one."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Text | None = None
    thinking: Text | None = None
    images: list[ImageUrl] | None = None  # base64
    tool_calls: Annotated[list[CalledTool], Field(max_length=MOST_MESSAGES_OF_CALLS, fail_fast=True)] | None = None
    tool_name: Annotated[str, Field(max_length=256)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None


class OllamaTool(Wire):
    type: Literal["function"] | None = None
    function: Function


class OllamaChat(OllamaRequest):
    """POST /api/chat. Without messages it only asks whether the model is there."""

    messages: Annotated[list[OllamaMessage], Field(fail_fast=True)] | None = None
    tools: Annotated[list[OllamaTool], Field(max_length=128, fail_fast=True)] | None = None


class OllamaGenerate(OllamaRequest):
    """POST /api/generate. Without a prompt it only asks whether the model is there."""

    prompt: Text | None = None
    suffix: Text | None = None
    system: Text | None = None
    images: list[ImageUrl] | None = None
    raw: bool | None = None
    # Known and refused, but for their neutral values.
    template: Literal[""] | None = None
    context: Annotated[list[int], Field(max_length=0)] | None = None


class OllamaEmbed(ModelRequest):
    """POST /api/embed. A text that is too long is refused rather than cut, whatever `truncate` says."""

    input: Text | Annotated[list[Text], Field(fail_fast=True)]
    dimensions: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    options: Options | None = None


class OllamaEmbeddings(ModelRequest):
    """POST /api/embeddings, the older one."""

    prompt: Text
    options: Options | None = None


class OllamaShow(Wire):
    """POST /api/show. `name` is the older name of `model`."""

    model: Annotated[str, Field(max_length=256)] | None = None
    name: Annotated[str, Field(max_length=256)] | None = None
    verbose: bool | None = None
