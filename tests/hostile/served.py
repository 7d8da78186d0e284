"""What a good request to each front is: the tensors that it needs, how it is streamed, and which outputs are its answer."""

from __future__ import annotations

import json
from typing import NamedTuple

from backend.serving.tensors import Input
from backend.serving.wires.roles import MODELS
from deploy.repository import DEFAULT_REPOSITORY

Values = list[int] | list[float] | list[bool] | list[str]
GATEWAY = "gateway"
FRONTS = tuple(MODELS)
TARGETS = (*FRONTS, GATEWAY)
ADDED = set(FRONTS) - {path.parent.name for path in DEFAULT_REPOSITORY.glob("*/config.pbtxt")}


class Tensor(NamedTuple):
    """Values of one input of one row, in the shape `dims`."""

    name: str
    dims: tuple[int, ...]
    values: Values


_IDS = [5, 6, 7]
_TEXT = "a = "


def good(model: str, max_tokens: int = 3, prompt: str = _TEXT) -> list[Tensor]:
    """A row that is served, greedily, with `max_tokens` tokens where the front generates any."""
    one = (1,)
    by_role: dict[str, list[Tensor]] = {
        "tensorrt_llm": [
            Tensor("input_ids", (3,), _IDS),
            Tensor("input_lengths", one, [3]),
            Tensor("request_output_len", one, [max_tokens]),
        ],
        "turbomind": [
            Tensor("input_ids", (3,), _IDS),
            Tensor("input_lengths", one, [3]),
            Tensor("request_output_len", one, [max_tokens]),
        ],
        "preprocessing": [Tensor("QUERY", one, [prompt]), Tensor("REQUEST_OUTPUT_LEN", one, [max_tokens])],
        "postprocessing": [Tensor("TOKENS_BATCH", (1, 3), _IDS), Tensor("SEQUENCE_LENGTH", one, [3])],
        "turbomind_preprocessing": [Tensor("QUERY", one, [prompt])],
        "turbomind_postprocessing": [Tensor("TOKENS_BATCH", (1, 3), _IDS), Tensor("sequence_length", one, [1])],
        "llmapi": [Tensor("text_input", one, [prompt]), Tensor("sampling_param_max_tokens", one, [max_tokens])],
        "lmdeploy": [
            Tensor("prompt", one, [prompt]),
            Tensor("max_tokens", one, [max_tokens]),
            Tensor("ignore_eos", one, [False]),
            Tensor("stream", one, [False]),
            Tensor("top_k", one, [1]),
        ],
        "vllm": [
            Tensor("text_input", one, [prompt]),
            Tensor("sampling_parameters", one, [json.dumps({"max_tokens": max_tokens, "temperature": 0})]),
        ],
        "embedding": [Tensor("text_input", one, [prompt])],
        "everbatch": [
            Tensor("request", one, [json.dumps({"prompt": prompt, "max_tokens": max_tokens, "temperature": 0})])
        ],
    }
    return by_role.get(model) or [Tensor("text_input", one, [prompt]), Tensor("max_tokens", one, [max_tokens])]


def stream_flag(model: str) -> str | None:
    """The input that asks for an answer token by token; None: the front has none."""
    names = MODELS[model].by_name()
    return next((name for name in ("stream", "streaming") if name in names), None)


def streamed(model: str, max_tokens: int) -> list[Tensor]:
    """The same row, answered token by token where the front does that."""
    row = good(model, max_tokens)
    if model == "everbatch":
        asked = {"prompt": _TEXT, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        return [Tensor("request", (1,), [json.dumps(asked)])]
    flag = stream_flag(model)
    return row if flag is None else [*(part for part in row if part.name != flag), Tensor(flag, (1,), [True])]


def is_unary(model: str) -> bool:
    return MODELS[model].always == "unary"


def with_inputs(*names: str) -> tuple[str, ...]:
    """The fronts that have all of these inputs."""
    return tuple(role for role, tensors in MODELS.items() if set(names) <= set(tensors.by_name()))


def texts_of(model: str) -> list[Input]:
    return [spec for spec in MODELS[model].inputs if spec.dtype == "STRING"]


GENERATING = tuple(role for role in FRONTS if not is_unary(role))
WITH_TEXT = tuple(role for role in FRONTS if texts_of(role))
WITH_SESSIONS = with_inputs("CORRID")
WITH_STOP = with_inputs("stop")
WITH_ROWS = tuple(role for role, tensors in MODELS.items() if tensors.max_batch_size > 1)
WITH_JSON = {"everbatch": "request", "vllm": "sampling_parameters"}  # front -> its input of JSON
