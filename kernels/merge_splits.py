"""Merges the partial attention results of the splits of a row's keys (Flash-Decoding, Dao et al. 2023).

    m_i = max over splits of m_s          l_i = sum over splits of l_s * 2^(m_s - m_i)
    out = (sum over splits of acc_s * 2^(m_s - m_i)) / l_i                             0 for a row without keys

Split s covers tokens [s * split, (s + 1) * split). Its results are m_s = max x_t and l_s = sum_t 2^(x_t - m_s), in `stats`, and
acc_s = sum_t 2^(x_t - m_s) v_t, in `parts`. Splits of which the row sees no token have no results and are not read. A sink adds
exp(sink) to the denominator. AT_ONCE splits are merged at a time, in order, so the result does not depend on the number of
splits that the tables have room for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.common.scoring import LOG2_E
from kernels.common.triton_runtime import Variant, jit, runs_on, tl

# (heads, head_dim, split, lengths, window, sink_tokens)
CASES = [
    (2, 32, 4, (3, 0, 40), 0, 0),
    (1, 64, 2, (75, 1), 0, 0),
    (3, 32, 4, (70, 66, 9), 11, 0),
    (2, 32, 1, (40,), 1, 0),
    (3, 32, 4, (170, 66, 9, 0), 11, 1),
    (1, 32, 1, (150, 30), 3, 20),
]

AT_ONCE = 32  # splits that are merged together
NARROW = 32  # elements of a head that a program merges where splits are short, so that few rows fill a GPU, too
SHORT = 128  # tokens of a split
NUM_WARPS = 1


def reference(
    parts: Tensor,
    stats: Tensor,
    lengths: Tensor,
    out: Tensor,
    split: int,
    window: int = 0,
    sinks: Tensor | None = None,
    sink_tokens: int = 0,
) -> None:
    """Like `merge_splits`, in float64."""
    for row, length in enumerate(lengths.tolist()):
        first = max(0, length - window) if window else 0
        begin, end = first // split, -(-length // split)
        sink_splits = min(-(-sink_tokens // split), begin)
        its = [*range(sink_splits), *range(begin, end)]
        out[row] = 0
        if length == 0:
            continue
        m_s, l_s = stats[row, :, its].double().unbind(-1)  # [heads, splits]
        m_i = m_s.amax(1, keepdim=True)
        if sinks is not None:
            sink = sinks.double()[:, None] * LOG2_E
            m_i = torch.maximum(m_i, sink)
        share = torch.exp2(m_s - m_i)
        l_i = (l_s * share).sum(1, keepdim=True)
        if sinks is not None:
            l_i = l_i + torch.exp2(sink - m_i)
        merged = (parts[row, :, its].double() * share[:, :, None]).sum(1) / l_i
        out[row] = merged.to(out.dtype)


def merge_splits(
    parts: Tensor,
    stats: Tensor,
    lengths: Tensor,
    out: Tensor,
    split: int,
    window: int = 0,
    sinks: Tensor | None = None,
    sink_tokens: int = 0,
) -> None:
    """Merges parts float32 [rows, heads, splits, head_dim] by stats float32 [rows, heads, splits, 2].

    The result is written to out [rows, heads, head_dim].

    lengths int32 or int64 [rows]; split in tokens; window 0: none; sinks float32 [heads]; sink_tokens: the first tokens of a row,
    which it sees besides its window, without effect where there is none.
    """
    sink_tokens = sink_tokens if window else 0
    if not runs_on(parts):
        reference(parts, stats, lengths, out, split, window, sinks, sink_tokens)
        return
    rows, heads, splits, head_dim = parts.shape
    width = min(NARROW, head_dim) if split <= SHORT else head_dim
    _merge_kernel[(rows, heads, head_dim // width)](
        parts, stats, lengths, sinks, out, window, splits, HEAD_DIM=head_dim, WIDTH=width,
        SPLIT=split, AT_ONCE=AT_ONCE, SINK_SPLITS=-(-sink_tokens // split), num_warps=NUM_WARPS,
    )  # fmt: skip


@jit
def finished(
    m_i,  # float32 [N]: a head's sums are relative to exp2(m_i)
    l_i,  # float32 [N]
    sinks,  # [heads] float32, or None
    head,  # [N]
    inside,  # [N]
):
    """The factor [N] that turns acc into the result: 1 / l_i with the sink included, 0 for a row without keys."""
    factor = tl.where(l_i > 0, 1.0, 0.0)
    if sinks is not None:
        sink = tl.load(sinks + head, inside, other=0) * 1.4426950408889634
        m_new = tl.maximum(m_i, sink)
        safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        factor = tl.exp2(m_i - safe)
        l_i = l_i * factor + tl.exp2(sink - safe)
    return factor / tl.where(l_i > 0, l_i, 1.0)


@jit(do_not_specialize=["window", "splits"])
def _merge_kernel(
    parts,  # [rows, heads, splits, HEAD_DIM] float32
    stats,  # [rows, heads, splits, 2] float32
    lengths,  # [rows]
    sinks,  # [heads] float32, or None
    out,  # [rows, heads, HEAD_DIM]
    window,
    splits,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,  # it divides HEAD_DIM
    SPLIT: tl.constexpr,
    AT_ONCE: tl.constexpr,  # splits
    SINK_SPLITS: tl.constexpr,  # the first splits, which hold sink tokens
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) + tl.arange(0, 1)
    d = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    length = tl.load(lengths + row).to(tl.int32)
    first = tl.maximum(length - window, 0) * (window > 0).to(tl.int32)
    begin, end = first // SPLIT, tl.cdiv(length, SPLIT)
    place = row * tl.num_programs(1) + head
    m_i = tl.full([1], float("-inf"), tl.float32)
    l_i = tl.zeros([1], tl.float32)
    acc = tl.zeros([WIDTH], tl.float32)
    for start in range(0 if SINK_SPLITS > 0 else begin // AT_ONCE * AT_ONCE, end, AT_ONCE):
        split = start + tl.arange(0, AT_ONCE)
        mine = ((split >= begin) | (split < SINK_SPLITS)) & (split < end)
        part = place * splits + split
        m_s = tl.load(stats + part * 2, mine, other=float("-inf"))
        m_new = tl.maximum(m_i, tl.max(m_s, 0))
        alpha = tl.exp2(m_i - m_new)
        share = tl.exp2(m_s - m_new)
        l_i = l_i * alpha + tl.sum(tl.load(stats + part * 2 + 1, mine, other=0) * share, 0)
        values = tl.load(parts + part[:, None] * HEAD_DIM + d[None, :], mine[:, None], other=0)
        acc = acc * alpha + tl.sum(values * share[:, None], 0)
        m_i = m_new
    factor = finished(m_i, l_i, sinks, head, head >= 0)
    tl.store(out + place * HEAD_DIM + d, (acc * factor).to(out.dtype.element_ty))


def variants() -> dict[str, Variant]:
    types = {"parts": "*fp32", "stats": "*fp32", "lengths": "*i32", "out": "*bf16", "window": "i32", "splits": "i32"}
    constants = {"HEAD_DIM": 128, "WIDTH": 128, "SPLIT": 256, "AT_ONCE": AT_ONCE, "SINK_SPLITS": 0, "sinks": None}
    wide = dict.fromkeys((80, 90, 100), ("LDG.E.128",))
    return {"128": Variant(_merge_kernel, types, constants, NUM_WARPS, instructions=wide)}
