"""7 and 12. From logits to tokens, and to log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.case import Case, Check, Peer, Random, near, same, worst
from benchmarks.gpu.goals import Goal, at_most_us, than_peer, times_floor
from kernels import choose_tokens, log_probs

ROWS = {1: 1, 64: 2, 256: 3}  # rows on a GPU: rows in the interpreter
TOP_K, TOP_P, TEMPERATURE = 50, 0.9, 0.8
TOP_LOG_PROBS = 20
SORT = "torch sort"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Logits(NamedTuple):
    logits: Tensor
    rows: choose_tokens.SamplingRows


def _make(random: Random, count: int, vocab: int, dtype: torch.dtype, greedy: bool) -> Logits:
    def full(value: float, kind: torch.dtype) -> Tensor:
        return torch.full((count,), value, dtype=kind, device=random.device)

    rows = choose_tokens.SamplingRows(
        temperature=full(0 if greedy else TEMPERATURE, torch.float32),
        top_k=full(0 if greedy else min(TOP_K, vocab), torch.int64),
        top_p=full(1 if greedy else TOP_P, torch.float64),
        min_p=full(0, torch.float64),
        seed=random.integers(0, 1 << 62, count, dtype=torch.int64),
        counter=random.integers(0, 4096, count, dtype=torch.int64),
    )
    return Logits(random.normal(count, vocab, dtype=dtype, scale=3.0), rows)


def _choose(x: Logits) -> Tensor:
    return choose_tokens.choose_tokens(x.logits, x.rows)


def _check_choice(x: Logits, ids: Tensor) -> Check:
    return same(ids, choose_tokens.reference(x.logits, x.rows))


def _sort(x: Logits) -> Tensor:
    p, ids = (x.logits.float() / x.rows.temperature[:, None]).softmax(1).sort(1, descending=True)
    p = torch.where(torch.arange(p.shape[1], device=p.device) < x.rows.top_k[:, None], p, 0)
    p = torch.where(p.cumsum(1) - p < x.rows.top_p[:, None], p, 0)
    return ids.gather(1, p.multinomial(1))


def _log_probs(x: Logits) -> log_probs.LogProbs:
    return log_probs.log_probs(x.logits, x.rows.counter, TOP_LOG_PROBS)


def _check_log_probs(x: Logits, found: log_probs.LogProbs) -> Check:
    expected = log_probs.reference(x.logits, x.rows.counter, TOP_LOG_PROBS)
    return worst(
        near(found.chosen, expected.chosen), near(found.top, expected.top), same(found.top_ids, expected.top_ids)
    )


def _log_softmax(x: Logits) -> tuple:
    log_p = x.logits.float().log_softmax(1)
    return log_p.gather(1, x.rows.counter[:, None]), log_p.topk(TOP_LOG_PROBS)


def cases(small: bool) -> list[Case]:
    vocab = 5000 if small else 128256

    def case(name: str, number: int, rows: int, kind: str, greedy: bool, run: Callable, check: Callable,
             goals: tuple[Goal, ...], peer: Peer) -> Case:  # fmt: skip
        count = ROWS[rows] if small else rows
        return Case(
            name=f"{name} B{rows} {kind}",
            number=number,
            make=partial(_make, count=count, vocab=vocab, dtype=DTYPES[kind], greedy=greedy),
            run=run,
            check=check,
            bytes=count * vocab * DTYPES[kind].itemsize,
            goals=goals if rows == 256 else (),
            peers=(peer,),
        )

    made = []
    for rows, kind in ((1, "bf16"), (64, "bf16"), (256, "bf16"), (256, "fp32")):
        argmax = Peer("argmax", lambda x: x.logits.argmax(1))
        made.append(case("greedy", 7, rows, kind, True, _choose, _check_choice, (times_floor(1.5),), argmax))
        most = at_most_us(80) if kind == "bf16" else times_floor(5)
        goals = (most, than_peer(SORT, 5))
        made.append(case("top-k, top-p", 7, rows, kind, False, _choose, _check_choice, goals, Peer(SORT, _sort)))
        gather = Peer("log_softmax, gather", _log_softmax)
        made.append(
            case("log-probs, top 20", 12, rows, kind, False, _log_probs, _check_log_probs, (times_floor(1.3),), gather)
        )
    return made
