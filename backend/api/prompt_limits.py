"""Checks inputs that accompany a prompt's tokens: embeddings for ids beyond the vocabulary, and positions."""

from __future__ import annotations

from math import prod

from backend.api.errors import InvalidRequest, Unsupported
from backend.api.request import Request

FLOAT_BYTES = 4
UINT64 = 1 << 64


def check_prompt_inputs(request: Request, width: int, max_seq_len: int, max_bytes: int) -> None:
    """Raise for embeddings or positions that cannot be taken. `width`: the model's hidden size, 0 if it takes neither."""
    _check_extra_ids(request)
    if request.prompt_embeddings is None and request.position_ids is None:
        return
    if not width:
        name = "position_ids" if request.prompt_embeddings is None else "prompt_embeddings"
        raise Unsupported(f"the model takes tokens only, the request holds {name}; leave them out")
    if request.session is not None:
        raise Unsupported(
            "a session takes tokens only in this version; send prompt_embeddings or position_ids without one"
        )
    _check_embeddings(request, width, max_bytes)
    _check_positions(request, max_seq_len)


def num_virtual_ids(request: Request) -> int:
    """How many token ids beyond the vocabulary a prompt may hold."""
    table = request.prompt_embeddings
    return 0 if table is None or not table.shape else table.shape[0]


def _check_embeddings(request: Request, width: int, max_bytes: int) -> None:
    table = request.prompt_embeddings
    if table is None:
        return
    if table.dtype != "float32" or len(table.shape) != 2 or table.shape[0] < 1 or table.shape[1] != width:
        raise InvalidRequest(
            f"prompt_embeddings are {table.dtype[:20]} {list(table.shape[:4])}, expected is float32 [1 or more, {width}]"
        )
    if len(table.data) != FLOAT_BYTES * prod(table.shape):
        raise InvalidRequest(
            f"prompt_embeddings have {len(table.data)} bytes, {FLOAT_BYTES * prod(table.shape)} are needed for their shape"
        )
    if len(table.data) > max_bytes:
        raise InvalidRequest(
            f"prompt_embeddings have {len(table.data)} bytes, the limit is {max_bytes} (limits.max_extra_bytes); "
            f"send fewer rows"
        )
    sampling = request.sampling_config
    if sampling.has_penalties or sampling.no_repeat_ngram_size:
        raise Unsupported(
            "prompt_embeddings do not go with penalties or no_repeat_ngram_size in this version; leave one of them out"
        )


def _check_extra_ids(request: Request) -> None:
    ids = request.extra_ids
    if not ids:
        return
    if len(ids) != len(request.input_token_ids):
        raise InvalidRequest(
            f"there are {len(ids)} extra_ids for {len(request.input_token_ids)} input tokens; give one for each"
        )
    if min(ids) < 0 or max(ids) >= UINT64:
        raise InvalidRequest(f"extra_ids run from {min(ids)} to {max(ids)}, allowed is 0 to {UINT64 - 1}")
    if request.session is not None:
        raise Unsupported("a session takes tokens only in this version; send extra_ids without one")


def _check_positions(request: Request, max_seq_len: int) -> None:
    ids = request.position_ids
    if ids is None:
        return
    if len(ids) != len(request.input_token_ids):
        raise InvalidRequest(
            f"there are {len(ids)} position_ids for {len(request.input_token_ids)} input tokens; give one for each"
        )
    last = max(max(ids), ids[-1] + max(0, request.max_tokens - 1))
    if min(ids) < 0 or last >= max_seq_len:
        raise InvalidRequest(
            f"position_ids and the output behind them run from {min(ids)} to {last}, allowed is 0 to {max_seq_len - 1}; "
            f"lower them or max_tokens"
        )
