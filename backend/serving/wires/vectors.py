"""Embeddings and relevance scores: the requests that compute them, and what becomes of the engine's results.

A text to embed is a request like any other, with nothing to generate: it waits, shares KV, is chunked, evicted and cancelled as
they are; an encoder's, whose tokens see all of the text, runs whole and shares nothing. What it returns beyond tokens is the
hidden state of its last token, or those of all of them, whose mean or first is taken here.

A relevance score is that of Qwen3-Reranker (its model card): the model is asked whether a document answers a query, and the score
is the probability of `yes` among the two answers, softmax of their logits behind the whole prompt.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from backend.api import (
    ErrorCode,
    EverbatchError,
    FinishReason,
    InvalidRequest,
    OutputConfig,
    Request,
    Result,
    Unsupported,
)
from backend.api.checkpoint.pooling import Pooling
from backend.api.tensor import TensorData
from backend.serving.intake.requests import Parameters, ServingContext
from backend.serving.wires.front import TextTools
from backend.serving.wires.limits import MAX_TOKEN_BYTES, ids_within
from backend.serving.work import Arrays

Vector = NDArray[np.float32]
NOTHING = 1e-12  # the least length by which a vector is divided, as in torch
TASK = "Given a web search query, retrieve relevant passages that answer the query"
_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
_BEGIN = f"<|im_start|>system\n{_SYSTEM}<|im_end|>\n<|im_start|>user\n"
_END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


class Unfinished(EverbatchError):
    """A request ended before its prompt was computed."""

    code = ErrorCode.CANCELLED


class VectorOutput:
    """The output of a row that generates nothing. `render_result` makes the response of its one Result."""

    num_output_tokens = 0

    def __init__(self, render_result: Callable[[Result], list[Arrays]]) -> None:
        self._render_result = render_result
        self._result: Result | None = None
        self.finish: FinishReason | None = None

    def feed(self, result: Result) -> int | None:
        self._result, self.finish = result, result.finish_reasons[0]
        return None

    def render(self) -> list[Arrays]:
        result, self._result = self._result, None
        return [] if result is None else self._render_result(result)


def text_ids(name: str, text: str, tools: TextTools, context: ServingContext) -> list[int]:
    """Token ids of a text to embed. Raises InvalidRequest."""
    if not text:
        raise InvalidRequest(f"{name} is empty; give at least one character")
    most = context.model.max_seq_len
    ids = ids_within(tools.tokenizer, tools.pooling.prompt + text, most, lambda count: _too_long(name, count, most))
    return _fitting(name, ids, context)


def given_ids(name: str, ids: list[int], context: ServingContext) -> list[int]:
    """The token ids of a client. Raises InvalidRequest."""
    ids = _fitting(name, ids, context)  # first, because it costs nothing
    vocab_size = context.model.vocab_size
    wrong = next((token_id for token_id in ids if not 0 <= token_id < vocab_size), None)
    if wrong is not None:
        raise InvalidRequest(
            f"{name} has token {wrong}, which is outside the vocabulary; allowed is 0 to {vocab_size - 1}"
        )
    return ids


def check_text_bytes(name: str, text: str, context: ServingContext) -> None:
    """Raise InvalidRequest, before it is tokenised, for a text of more bytes than any prompt of this model has."""
    most = MAX_TOKEN_BYTES * context.model.max_seq_len
    if len(text) > most:
        raise InvalidRequest(
            f"{name} has {len(text)} characters, the limit is {most}, {MAX_TOKEN_BYTES} for each token of model.max_seq_len; "
            "shorten it"
        )


def _fitting(name: str, ids: list[int], context: ServingContext) -> list[int]:
    if not ids:
        raise InvalidRequest(f"{name} holds no token; give more text")
    if len(ids) > context.model.max_seq_len:
        raise _too_long(name, len(ids), context.model.max_seq_len)
    return ids


def _too_long(name: str, count: int | str, most: int) -> InvalidRequest:
    return InvalidRequest(
        f"{name} has {count} tokens, the limit is {most} (the model's own, or model.max_seq_len); shorten it"
    )


def embedding_request(ids: list[int], pooling: Pooling, parameters: Parameters) -> Request:
    """The request that computes an embedding of a prompt. Raises Unsupported."""
    if pooling.refusal:
        raise Unsupported(f"embeddings cannot be made with this model: {pooling.refusal}")
    rows = OutputConfig(
        prompt_hidden_states="last" if pooling.kind == "last" else "all",
        exclude_input_from_output=True,
        return_perf_metrics=True,
    )
    return Request(ids, 0, output_config=rows, timeout_s=parameters.timeout_s, cache_salt=parameters.namespace)


def checked_dimensions(dimensions: int | None, pooling: Pooling, context: ServingContext) -> int:
    """The length of the vectors. Raises InvalidRequest for one that this model does not have."""
    width = context.model.output_widths.get("hidden_states", 0)
    if dimensions is None or dimensions == width:
        return width
    if not 1 <= dimensions <= width:
        raise InvalidRequest(
            f"dimensions is {dimensions}, allowed is 1 to {width}, the model's own; leave it out for all"
        )
    if pooling.dimensions is not None and dimensions not in pooling.dimensions:
        known = ", ".join(map(str, (*pooling.dimensions, width)))
        raise InvalidRequest(f"dimensions is {dimensions}, and config.json allows {known} only; use one of them")
    return dimensions


def embedding_of(result: Result, pooling: Pooling, dimensions: int, normalize: bool | None) -> Vector:
    """The vector float32 [dimensions]; of length 1 unless `normalize`, or else the checkpoint, says that it is not to be."""
    rows = _array(result.prompt_hidden_states)
    match pooling.kind:
        case "first":
            vector = rows[0]
        case "last":
            vector = rows[-1]
        case "mean":
            vector = rows.mean(axis=0, dtype=np.float64)
    vector = vector[:dimensions].astype(np.float64)
    if pooling.normalize if normalize is None else normalize:
        length = math.sqrt(math.fsum((vector * vector).tolist()))  # exact: in every memory layout the same
        vector = vector / max(length, NOTHING)
    return np.asarray(vector, np.float32)


def relevance_request(
    query: str, document: str, task: str, context: ServingContext, tools: TextTools, parameters: Parameters
) -> Request:
    """The request that asks the model whether a document answers a query. Raises InvalidRequest and Unsupported."""
    yes, no = (tools.tokenizer.token_to_id(word) for word in ("yes", "no"))
    if tools.pooling.is_declared:
        raise Unsupported("this model makes embeddings and ranks no documents; compare its embeddings")
    if yes is None or no is None:
        raise Unsupported("this model cannot rank documents: its vocabulary has no tokens yes and no; use a reranker")
    pair = f"<Instruct>: {task}\n<Query>: {query}\n<Document>: {document}"
    name, most = "documents, with the query,", context.model.max_seq_len
    parts = [
        ids_within(tools.tokenizer, text, most, lambda count: _too_long(name, count, most), add_special_tokens=False)
        for text in (_BEGIN, pair, _END)
    ]
    ids = _fitting(name, [token_id for part in parts for token_id in part], context)
    output = OutputConfig(prompt_logits_of=(yes, no), exclude_input_from_output=True, return_perf_metrics=True)
    return Request(ids, 0, output_config=output, timeout_s=parameters.timeout_s, cache_salt=parameters.namespace)


def relevance_of(result: Result) -> float:
    """The probability of `yes` of the two answers."""
    yes, no = _array(result.prompt_logits)[0].tolist()
    difference = min(max(no - yes, -700.0), 700.0)  # beyond it exp overflows, and the score is 0 or 1 anyway
    return 1.0 / (1.0 + math.exp(difference))


def _array(tensor: TensorData | None) -> Vector:
    if tensor is None:
        raise Unfinished("the request was ended before its text was computed; send it again")
    return np.frombuffer(tensor.data, np.float32).reshape(tensor.shape)
