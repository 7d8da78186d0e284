"""Log-probabilities of chosen tokens and of the n most likely ones, without storing a log-softmax of all tokens.

    log p_t = (x_t - max x) - log(sum over s of exp(x_s - max x))          -inf where x_t is -inf, also when every x is

The logits are read once, in splits. Each split stores its maximum m_s and the sum l_s of its exponentials relative to m_s (the
online softmax of Milakov and Gimelshein, 2018), and the maximum of each of its groups of tokens. A second kernel merges the
splits of a row. The n largest logits lie in the n groups with the largest maxima, so it picks these groups, reads them again,
and picks the tokens.

Picking takes, n times, the largest 64-bit key below the one before:

    key = (the float's bits as an integer of the same order) << 32 | (2^31 - 1 - index)

so among equal logits the lower token id comes first. Splits have a fixed number of tokens, so a row's result does not depend on
its neighbours.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.common.triton_runtime import Variant, jit, next_power_of_two, runs_on, tl

# (rows, vocab, n)
CASES = [(1, 1, 1), (3, 17, 17), (4, 50, 0), (2, 100, 20), (3, 5000, 5), (2, 8192, 20), (1, 12345, 1)]

GROUP = 64  # tokens; about sqrt(vocab / n), which balances the picking of groups and of tokens
SPLIT = 4096  # tokens, a multiple of GROUP
MAX_TOP = 20
TOP_BLOCK = 32  # a power of two, at least MAX_TOP


class LogProbs(NamedTuple):
    chosen: Tensor  # [rows] float32
    top_ids: Tensor  # [rows, n] int64, the most likely first, equal ones in token order
    top: Tensor  # [rows, n] float32


def reference(logits: Tensor, ids: Tensor, n: int) -> LogProbs:
    """Computes in float64 and rounds at the end: logits [rows, vocab] of any float type, ids int64 [rows], n <= vocab."""
    x = logits.double()
    m_i = x.amax(1, keepdim=True)
    shifted = torch.where(x > -torch.inf, x - m_i, -torch.inf)
    l_i = shifted.exp().sum(1, keepdim=True)
    log_p = shifted - torch.where(l_i > 0, l_i, 1).log()
    known = (ids >= 0) & (ids < logits.shape[1])
    chosen = torch.where(known, log_p.gather(1, torch.where(known, ids, 0)[:, None])[:, 0], -torch.inf)
    top_ids = x.sort(dim=1, descending=True, stable=True).indices[:, :n]
    return LogProbs(chosen.float(), top_ids, log_p.gather(1, top_ids).float())


def log_probs(logits: Tensor, ids: Tensor, n: int) -> LogProbs:
    """Log-probabilities by logits [rows, vocab] float32 or 16-bit of ids int64 [rows] and the n <= vocab most likely tokens.

    An id that is no token gets -inf.

    For n > MAX_TOP it computes the reference. Raises ValueError for n > vocab.
    """
    if not runs_on(logits) or n > MAX_TOP:
        return reference(logits, ids, n)
    rows, vocab = logits.shape
    if n > vocab:
        raise ValueError(f"the {n} most likely of {vocab} tokens")
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    splits, groups = -(-vocab // SPLIT), -(-vocab // GROUP)

    def floats(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=logits.device)

    maxima, sums, group_maxima = floats(rows, splits), floats(rows, splits), floats(rows, groups) if n else None
    _scan_kernel[(rows, splits)](
        logits, maxima, sums, group_maxima, vocab, logits.stride(0), groups, GROUP=GROUP, SPLIT=SPLIT, num_warps=8
    )
    result = LogProbs(floats(rows), torch.empty(rows, n, dtype=torch.int64, device=logits.device), floats(rows, n))
    _finish_kernel[(rows,)](
        logits, ids.contiguous(), maxima, sums, group_maxima,
        result.chosen, result.top_ids if n else None, result.top if n else None,
        vocab, logits.stride(0), splits, groups, n, **_finish_constants(vocab), num_warps=_finish_warps(vocab),
    )  # fmt: skip
    return result


@jit
def _scan_kernel(
    logits,  # [rows, vocab], rows `stride` apart
    maxima,  # [rows, splits] float32
    sums,  # [rows, splits] float32, of exp(x - the split's maximum)
    group_maxima,  # [rows, groups] float32, or None
    vocab,
    stride,
    groups,
    GROUP: tl.constexpr,
    SPLIT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * (SPLIT // GROUP) + tl.arange(0, SPLIT // GROUP)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(logits + row * stride + column, column < vocab, other=float("-inf")).to(tl.float32)
    of_groups = tl.max(x, 1)
    if group_maxima is not None:
        tl.store(group_maxima + row * groups + group, of_groups, group < groups)
    m_i = tl.max(of_groups, 0)
    split = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(maxima + split, m_i)
    tl.store(sums + split, tl.sum(tl.exp(x - _finite(m_i))))


@jit(do_not_specialize=["n"])
def _finish_kernel(
    logits,  # [rows, vocab], rows `stride` apart
    ids,  # [rows] int64
    maxima,  # [rows, splits] float32
    sums,  # [rows, splits] float32
    group_maxima,  # [rows, groups] float32, or None
    chosen,  # [rows] float32
    top_ids,  # [rows, n] int64, or None
    top,  # [rows, n] float32, or None
    vocab,
    stride,
    splits,
    groups,
    n,
    GROUP: tl.constexpr,
    SPLITS: tl.constexpr,  # powers of two, at least splits, groups, n
    GROUPS: tl.constexpr,
    TOP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x = logits + row * stride
    split = tl.arange(0, SPLITS)
    m_s = tl.load(maxima + row * splits + split, split < splits, other=float("-inf"))
    l_s = tl.load(sums + row * splits + split, split < splits, other=0)
    m_i = _finite(tl.max(m_s, 0))
    l_i = tl.sum(l_s * tl.exp(m_s - m_i), 0)
    log_l_i = tl.log(tl.where(l_i > 0, l_i, 1.0))

    token = tl.load(ids + row)
    known = (token >= 0) & (token < vocab)
    value = tl.load(x + tl.where(known, token, 0), known, other=float("-inf")).to(tl.float32)
    tl.store(chosen + row, value - m_i - log_l_i)

    if group_maxima is not None:
        group = tl.arange(0, GROUPS)
        best = tl.load(group_maxima + row * groups + group, group < groups, other=float("-inf"))
        # Places beyond `groups` have -inf and the highest indices, so they come last. They, and places beyond n, have columns
        # beyond vocab.
        picked = _index(_largest(_keys(best, group), n, TOP))
        column = picked[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        candidates = tl.load(x + column, column < vocab, other=float("-inf")).to(tl.float32)
        keys = tl.where(column < vocab, _keys(candidates, column), -0x8000000000000000)
        found = _largest(tl.reshape(keys, [TOP * GROUP], can_reorder=True), n, TOP)
        slot = tl.arange(0, TOP)
        tl.store(top_ids + row * n + slot, _index(found), slot < n)
        tl.store(top + row * n + slot, _value(found) - m_i - log_l_i, slot < n)


@jit
def _finite(m_i):
    """The maximum that is subtracted; 0 where all logits are -inf, to avoid inf - inf."""
    return tl.where(m_i > float("-inf"), m_i, 0.0)


@jit
def _keys(x, index):
    """Keys (see above), int64. All are greater than -2^63, which stands for no key."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)  # -0 equals 0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - index.to(tl.int64))


@jit
def _index(key):
    """The index in a key, int64; 2^31 - 1 for the key -2^63."""
    return 0x7FFFFFFF - (key & 0x7FFFFFFF)


@jit
def _value(key):
    ordered = (key >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def _largest(keys, n, TOP: tl.constexpr):
    """The n largest of `keys`, which are all different, in falling order; then -2^63 up to TOP."""
    found = tl.full([TOP], -0x8000000000000000, tl.int64)
    last = tl.max(keys, 0) + 1
    for i in range(n):
        last = tl.max(tl.where(keys < last, keys, -0x8000000000000000), 0)
        found = tl.where(tl.arange(0, TOP) == i, last, found)
    return found


def _finish_constants(vocab: int) -> dict[str, int]:
    splits, groups = (next_power_of_two(-(-vocab // size)) for size in (SPLIT, GROUP))
    return {"GROUP": GROUP, "SPLITS": splits, "GROUPS": groups, "TOP": TOP_BLOCK}


def _finish_warps(vocab: int) -> int:
    return 4 if vocab <= 2048 * GROUP else 8


def variants() -> dict[str, Variant]:
    vocab = 128256
    made = {}
    common = {"maxima": "*fp32", "sums": "*fp32", "vocab": "i32", "stride": "i32", "groups": "i32"}
    constants = {"GROUP": GROUP, "SPLIT": SPLIT}
    options: dict[str, Any] = {
        "divisible": ("vocab", "stride"),
        "instructions": dict.fromkeys((80, 90, 100), ("LDG.E.128",)),
    }
    for kind in ("bf16", "fp32"):
        types = common | {"logits": f"*{kind}", "group_maxima": "*fp32"}
        made[f"scan-{kind}-top"] = Variant(_scan_kernel, types, constants, 8, **options)
    types = common | {"logits": "*fp32"}
    made["scan-fp32"] = Variant(_scan_kernel, types, constants | {"group_maxima": None}, 8, **options)
    common |= {"logits": "*fp32", "ids": "*i64", "chosen": "*fp32", "splits": "i32", "n": "i32"}
    constants = _finish_constants(vocab)
    types = common | {"group_maxima": "*fp32", "top_ids": "*i64", "top": "*fp32"}
    made["finish-top"] = Variant(_finish_kernel, types, constants, _finish_warps(vocab), divisible=("vocab", "stride"))
    absent = dict.fromkeys(("group_maxima", "top_ids", "top"))
    made["finish"] = Variant(
        _finish_kernel, common, constants | absent, _finish_warps(vocab), divisible=("vocab", "stride")
    )
    return made
