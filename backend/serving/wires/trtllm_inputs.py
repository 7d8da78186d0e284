"""Reads the less common inputs of the TensorRT-LLM wire: KV retention, lookahead, guides, adapters, embeddings, and what a client
has had of a stream whose server has ended.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from backend.api import InvalidRequest
from backend.api.draft_limits import drafts_of_lookahead
from backend.api.guide import A_CHOICE, Guide, GuideType
from backend.api.lora import LoraConfig
from backend.api.prompt_limits import FLOAT_BYTES
from backend.api.request import DEFAULT_RETENTION_PRIORITY, RetentionConfig, TokenRangeRetention
from backend.api.tensor import TensorData
from backend.core.messages import Delivered
from backend.serving.intake.batch import Batch
from backend.serving.intake.requests import ServingContext
from backend.serving.wires.named_adapters import named_adapter

_RANGES = "retention_token_range_"
_LOOKAHEAD = ("lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size")
_FOR_EVER = -1
_TO_THE_END = -1


def read_retention(batch: Batch, row: int) -> RetentionConfig | None:
    """How long the row's KV is kept; None without the inputs.

    An end of -1 is the end of the prompt; a duration of -1, or none, has no limit. Raises InvalidRequest when the tensors of the
    ranges do not fit each other.
    """
    priority, duration_ms = (batch.scalar(f"retention_decode_{name}", row) for name in ("priority", "duration_ms"))
    ranges = _read_ranges(batch, row)
    if not ranges and priority is None and duration_ms is None:
        return None
    return RetentionConfig(
        tuple(sorted(ranges, key=lambda each: each.token_start)),
        DEFAULT_RETENTION_PRIORITY if priority is None else priority,
        _seconds(duration_ms),
    )


def read_lookahead(batch: Batch, row: int) -> int | None:
    """Draft tokens of a step, from the sizes of lookahead decoding; None without sizes, or if all are 0.

    Raises InvalidRequest when some of the sizes are missing, or impossible.
    """
    sizes = [batch.scalar(name, row) for name in _LOOKAHEAD]
    if not any(sizes):
        return None
    if None in sizes:
        raise InvalidRequest(f"of {', '.join(_LOOKAHEAD)} some are missing; give all three, or none")
    return drafts_of_lookahead(*sizes)


def _read_ranges(batch: Batch, row: int) -> list[TokenRangeRetention]:
    starts, ends, priorities, durations = (
        [] if values is None else values.tolist()
        for values in (batch.vector(_RANGES + name, row) for name in ("starts", "ends", "priorities", "durations_ms"))
    )
    if not len(starts) == len(ends) == len(priorities) or len(durations) not in (0, len(starts)):
        raise InvalidRequest(
            f"{_RANGES}starts has {len(starts)} entries, ends {len(ends)}, priorities {len(priorities)} and durations_ms "
            f"{len(durations)}; send as many of each, durations_ms may be left out"
        )
    return [
        TokenRangeRetention(start, None if end == _TO_THE_END else end, priority, _seconds(duration))
        for start, end, priority, duration in zip(starts, ends, priorities, durations or [_FOR_EVER] * len(starts))
    ]


def _seconds(milliseconds: int | None) -> float | None:
    return None if milliseconds in (None, _FOR_EVER) else milliseconds / 1000


def check_guides(batch: Batch, max_bytes: int) -> None:
    """Raise InvalidRequest for a guide with more bytes than allowed, without decoding it."""
    for row in range(batch.num_rows):
        batch.check_texts("guided_decoding_guide", row, 1, max_bytes, "guided.max_bytes")


def read_guide(batch: Batch, row: int) -> Guide | None:
    """The row's guide; None without one, or where both inputs are empty. Raises InvalidRequest for an unknown type."""
    kind = batch.scalar("guided_decoding_guide_type", row) or ""
    text = batch.scalar("guided_decoding_guide", row) or ""
    if not kind:
        if text:
            raise InvalidRequest("guided_decoding_guide is given without guided_decoding_guide_type; send both")
        return None
    try:
        return Guide(GuideType(kind), text)
    except ValueError:
        known = ", ".join(each.value for each in GuideType)
        hint = f"; {A_CHOICE}" if kind == "choice" else ""
        raise InvalidRequest(f"guided_decoding_guide_type is {kind[:80]!r}, allowed are {known}{hint}") from None


def read_lora(batch: Batch, row: int, context: ServingContext) -> LoraConfig | None:
    """The row's adapter; None without one. Raises InvalidRequest for weights without an id, and for both an id and a name."""
    task_id = batch.scalar("lora_task_id", row)
    weights, config = (batch.matrix(name, row) for name in ("lora_weights", "lora_config"))
    name = batch.scalar("lora_name", row)
    if name:
        if task_id or weights is not None or config is not None:
            raise InvalidRequest("lora_name and lora_task_id both say which adapter is meant; send one of them")
        return named_adapter(name, context.adapters, context.config.lora.enabled)
    if weights is None and config is None:
        return LoraConfig(task_id) if task_id else None
    if task_id is None:
        raise InvalidRequest("lora_weights and lora_config need the lora_task_id that they are known by")
    return LoraConfig(
        task_id,
        None if weights is None else TensorData("float16", weights.shape, weights.astype("<f2").tobytes()),
        () if config is None else tuple(map(tuple, config.tolist())),
    )


def read_embeddings(batch: Batch, row: int, max_bytes: int) -> TensorData | None:
    """The row's prompt_embedding_table in float32; None without one. Raises InvalidRequest for a table that takes more than
    `max_bytes` so, or has numbers that are not finite.
    """
    table = batch.matrix("prompt_embedding_table", row)
    if table is None:
        return None
    if FLOAT_BYTES * table.size > max_bytes:
        raise InvalidRequest(
            f"prompt_embedding_table takes {FLOAT_BYTES * table.size} bytes in float32, the limit is {max_bytes} "
            f"(limits.max_extra_bytes); send fewer rows"
        )
    if not np.isfinite(table).all():
        raise InvalidRequest("prompt_embedding_table holds a value that is not a finite number; send finite numbers")
    return TensorData("float32", table.shape, table.astype("<f4").tobytes())


PADDING = -1


class Come(NamedTuple):
    """The output so far of each sequence; both lists are empty for a new request.

    `log_probs`: one for each token; empty if the request returns none.
    """

    delivered: list[Delivered]
    log_probs: list[NDArray[np.float32]]


def read_delivered(batch: Batch, row: int, with_log_probs: bool) -> Come:
    """Raises InvalidRequest when the tensors do not fit each other. The sums of log-probabilities are made as the engine makes
    them, token by token, so that they go on with the same bits.
    """
    rows, ended = batch.matrix("resume_output_ids", row), batch.vector("resume_ended", row)
    probs = batch.matrix("resume_log_probs", row)
    if rows is None:
        if ended is not None or probs is not None:
            raise InvalidRequest(
                "resume_ended and resume_log_probs say of what has come; send resume_output_ids with them"
            )
        return Come([], [])
    if ended is not None and ended.size != len(rows):
        raise InvalidRequest(f"resume_ended has {ended.size} values, resume_output_ids {len(rows)} rows; send as many")
    if with_log_probs and (probs is None or probs.shape != rows.shape):
        found = "none" if probs is None else list(probs.shape)
        raise InvalidRequest(
            f"resume_log_probs has the shape {found}, expected is {list(rows.shape)}, that of resume_output_ids: the request "
            f"returns log-probabilities; send those that have come"
        )
    if probs is not None and not np.isfinite(probs).all():
        raise InvalidRequest("resume_log_probs holds a value that is not a finite number; send those that have come")
    counts = [_count(ids) for ids in rows]
    log_probs = [each[:count] for each, count in zip(probs, counts)] if with_log_probs and probs is not None else []
    sums = [float(sum(each.tolist())) for each in log_probs] or [0.0] * len(rows)
    ends = [False] * len(rows) if ended is None else ended.tolist()
    each_row = zip(rows, counts, sums, ends, strict=True)
    return Come([Delivered(ids[:count].tolist(), total, end) for ids, count, total, end in each_row], log_probs)


def _count(ids: NDArray[np.int32]) -> int:
    """How many there are ahead of the padding."""
    kept = np.flatnonzero(ids != PADDING)
    return int(kept[-1]) + 1 if kept.size else 0
