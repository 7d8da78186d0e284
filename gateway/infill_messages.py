"""Messages of llama-server's /infill: the text between two others, as editors ask for it at each key stroke."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from gateway.messages import Sampling, Text, Wire

MOST_FILES = 1024


class InputFile(Wire):
    """A piece of another file of the project. `time`: llama.vim's, when it was taken."""

    text: Text
    filename: Annotated[str, Field(max_length=4096)] | None = None
    time: Any = None


class InfillRequest(Sampling):
    """POST /infill. `prompt` follows `input_prefix`; of `input_extra` the last entries matter most. With `n_predict` 0 the prompt
    is computed and nothing else, so that the next request finds it; -1: as many tokens as fit. The answer ends when it has a line
    break and `t_max_predict_ms` have passed since its first token.
    """

    model: Annotated[str, Field(max_length=256)] = ""  # empty: the first one that the key may use
    input_prefix: Text = ""
    input_suffix: Text = ""
    input_extra: Annotated[list[InputFile], Field(max_length=MOST_FILES, fail_fast=True)] | None = None
    prompt: Text | None = None
    n_predict: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    t_max_predict_ms: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    return_tokens: bool | None = None
    response_fields: Annotated[list[Annotated[str, Field(max_length=256)]], Field(max_length=100)] | None = None


class Timings(BaseModel):
    """Milliseconds as the endpoint sees them: the wait in the queue counts as a part of the prompt's."""

    cache_n: int  # tokens of the prompt whose KV was there before
    prompt_n: int  # the others
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class InfillBody(BaseModel):
    """In a stream the events ahead of the last have `stop` false and neither `timings` nor what follows `stop`."""

    index: Literal[0]
    content: str
    tokens: list[int]  # where return_tokens asks for them
    tokens_predicted: int
    tokens_evaluated: int
    stop: bool
    model: str
    stop_type: Literal["eos", "word", "limit"]
    stopping_word: str
    has_new_line: bool
    truncated: bool  # entries of input_extra were left out
    tokens_cached: int  # tokens of prompt and answer, which are all cached now
    generation_settings: dict[str, Any]
    timings: Timings
