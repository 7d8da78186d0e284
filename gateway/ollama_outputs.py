"""Replies of Ollama's API as the page /openapi.json describes them. They are encoded from dictionaries."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from gateway.outputs import ChatTokenLogProb


class OllamaErrorBody(BaseModel):
    error: str


class OllamaVersion(BaseModel):
    version: str  # the release of Ollama whose API this is
    everbatch: str


class OllamaDetails(BaseModel):
    """Empty: the endpoint does not know the files of a model."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(BaseModel):
    """`expires_at` and `context_length`: in /api/ps."""

    name: str
    model: str
    modified_at: str
    digest: str
    details: OllamaDetails
    expires_at: str = ""
    context_length: int = 0


class OllamaModels(BaseModel):
    models: list[OllamaModel]


class OllamaShowBody(BaseModel):
    modified_at: str
    details: OllamaDetails
    template: str
    parameters: str
    capabilities: list[str]
    model_info: dict[str, Any]


class _Generated(BaseModel):
    """A whole answer, or a line of a stream; times, in nanoseconds, and `done_reason` are in the last line."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load"] = "stop"
    logprobs: list[ChatTokenLogProb] = []
    total_duration: int = 0
    load_duration: int = 0
    prompt_eval_count: int = 0
    prompt_eval_duration: int = 0
    eval_count: int = 0
    eval_duration: int = 0


class OllamaCalledFunction(BaseModel):
    index: int
    name: str
    arguments: dict[str, Any]


class OllamaCall(BaseModel):
    id: str
    function: OllamaCalledFunction


class OllamaAnswer(BaseModel):
    role: Literal["assistant"]
    content: str
    thinking: str = ""
    tool_calls: list[OllamaCall] = []


class OllamaChatBody(_Generated):
    message: OllamaAnswer


class OllamaGenerateBody(_Generated):
    response: str
    thinking: str = ""


class OllamaEmbedBody(BaseModel):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbeddingsBody(BaseModel):
    embedding: list[float]
