"""Model `embedding`: texts or token ids in, a vector each out. All rows of a request are answered together."""

from __future__ import annotations

import numpy as np

from backend.api import InvalidRequest, Result
from backend.serving.intake.batch import Batch
from backend.serving.intake.requests import Parameters, ServingContext
from backend.serving.tensors import ANY, ONE, Input, ModelTensors, Output
from backend.serving.wires.front import TextFront, TextTools
from backend.serving.wires.limits import MAX_TOKEN_BYTES
from backend.serving.wires.vectors import (
    Vector,
    VectorOutput,
    checked_dimensions,
    embedding_of,
    embedding_request,
    given_ids,
    text_ids,
)
from backend.serving.work import Arrays, Work

TENSORS = ModelTensors(
    "embedding",
    inputs=(
        Input("text_input", "STRING", ONE, "request"),
        Input("input_ids", "INT32", ANY, "request"),
        Input("input_lengths", "INT32", ONE, "request"),
        Input("dimensions", "INT32", ONE, "request"),
        Input("normalize", "BOOL", ONE, "request"),
    ),
    outputs=(
        Output("embedding", "FP32", ANY, "always: as many numbers as dimensions says"),
        Output("num_input_tokens", "INT32", ONE, "always"),
    ),
    always="unary",
)


def check(batch: Batch, context: ServingContext) -> None:
    """Raise InvalidRequest for texts that are longer than any prompt of this model."""
    most = MAX_TOKEN_BYTES * context.model.max_seq_len
    for row in range(batch.num_rows):
        batch.check_texts("text_input", row, 1, most, f"{MAX_TOKEN_BYTES} for each token of model.max_seq_len")


def parse(batch: Batch, context: ServingContext, parameters: Parameters, tools: TextTools) -> list[Work]:
    """One Work for each row. Raises InvalidRequest and Unsupported."""
    pooling, rows = tools.pooling.of_model(context.model.reads_whole_texts), range(batch.num_rows)
    prompts = [_prompt(batch, row, context, tools) for row in rows]
    widths = [checked_dimensions(batch.scalar("dimensions", row), pooling, context) for row in rows]
    if len(set(widths)) > 1:
        raise InvalidRequest(f"dimensions differ between the rows ({widths[0]} and others); send a request for each")
    requests = [embedding_request(ids, pooling, parameters) for ids in prompts]
    answer = _Together(prompts)

    def output(row: int) -> VectorOutput:
        normalize = batch.scalar("normalize", row)

        def render(result: Result) -> list[Arrays]:
            return answer.with_row(row, embedding_of(result, pooling, widths[row], normalize))

        return VectorOutput(render)

    return [Work(request, output(row)) for row, request in enumerate(requests)]


class _Together:
    """The vectors of a request, until all are there."""

    def __init__(self, prompts: list[list[int]]) -> None:
        self._lengths = [len(ids) for ids in prompts]
        self._vectors: dict[int, Vector] = {}

    def with_row(self, row: int, vector: Vector) -> list[Arrays]:
        """The response, once the last row has come."""
        self._vectors[row] = vector
        if len(self._vectors) < len(self._lengths):
            return []
        embedding = np.stack([self._vectors[row] for row in range(len(self._lengths))])
        return [[("embedding", embedding), ("num_input_tokens", np.array(self._lengths, np.int32)[:, np.newaxis])]]


def _prompt(batch: Batch, row: int, context: ServingContext, tools: TextTools) -> list[int]:
    text, ids = batch.scalar("text_input", row), batch.vector("input_ids", row)
    if (text is None) == (ids is None):
        raise InvalidRequest("exactly one of text_input and input_ids is expected; send one of them")
    if ids is None:
        return text_ids("text_input", text, tools, context)
    length = batch.scalar("input_lengths", row)
    if length is not None and not 1 <= length <= len(ids):
        raise InvalidRequest(f"input_lengths is {length}, allowed is 1 to {len(ids)}, the width of input_ids")
    return given_ids("input_ids", ids[:length].tolist(), context)


EMBEDDING = TextFront(TENSORS, check, parse)
