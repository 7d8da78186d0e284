"""Reads what a client of tensorrt_llm has had of a stream whose server has ended (serving/intake/resuming.py)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from backend.api import InvalidRequest
from backend.core.messages import Delivered
from backend.serving.intake.batch import Batch

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
