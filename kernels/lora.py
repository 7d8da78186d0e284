"""LoRA, with an adapter of its own for each token, or none.

The method is that of Hu et al. 2021. Batching several adapters follows S-LoRA (Sheng et al. 2023), Punica (Chen et al. 2023) and
the kernels of vLLM.

    h[slice, t, r] = sum over k of x[t, k] * a[slice, adapter(t), r, k]                        (shrink)
    y[t, n]       += scale[adapter(t)] * sum over r of h[slice(n), t, r] * b[adapter(t), n, r]   (expand)

The slices of a fused projection (query, key, value; gate, up) are columns offsets[slice] .. offsets[slice + 1] of y, and share x.
Stacks are padded to `max_rank`; rows beyond an adapter's rank are never used. Tokens of one adapter are gathered into tiles
(kernels/group_rows.py, once a step for all layers), so that each tile is a matrix product. Tokens without an adapter are
in no tile: nothing is computed for them, and their y stays unchanged.

With few tokens, shrink divides k over several programs, each of which writes a part of h; expand adds the parts in order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.common.triton_runtime import INTERPRETED, Variant, jit, next_power_of_two, runs_on, tl
from kernels.group_rows import Groups, group_rows

# (tokens, ranks of the adapters, max_rank, k, widths of the slices)
CASES = [
    (1, (16,), 16, 64, (48,)),
    (9, (8, 16, 3), 16, 96, (136, 16, 140)),
    (40, (64, 0, 16, 40), 64, 136, (150, 72)),
    (21, (5, 8, 1, 2, 8), 8, 2100, (40,)),
]
FEW_TOKENS = 256


class LoraTiles(NamedTuple):
    n_bytes: int  # columns of a tile of expand, in bytes
    k_bytes: int  # columns of a step of shrink, in bytes
    max_splits: int
    num_warps: int
    num_stages: int


TILES = {16: LoraTiles(256, 256, 8, 4, 4), 64: LoraTiles(256, 128, 1, 4, 4)}  # block_m -> the other sizes
SPLIT_K = 1024  # the smallest number of columns of a split; a multiple of every block of k


def group_tokens(adapters: Tensor, num_adapters: int) -> Groups:
    """The groups of a step's tokens, for `shrink` and `expand`. adapters int32 [tokens]; -1 = none."""
    return group_rows(adapters, num_adapters, 16 if len(adapters) <= FEW_TOKENS else 64)


def reference_shrink(x: Tensor, a: Tensor, ranks: Tensor, adapters: Tensor) -> Tensor:
    """Returns h float64 [1, slices, tokens, max_rank] of x [tokens, k] and a [slices, adapters, max_rank, k]."""
    slices, _, max_rank, _ = a.shape
    h = torch.zeros(1, slices, len(x), max_rank, dtype=torch.float64, device=x.device)
    for adapter, rank in enumerate(ranks.tolist()):
        tokens = (adapters == adapter).nonzero()[:, 0]
        for slice_ in range(slices):
            h[0, slice_, tokens, :rank] = x[tokens].double() @ a[slice_, adapter, :rank].double().T
    return h


def reference_expand(
    y: Tensor, h: Tensor, b: Tensor, ranks: Tensor, scales: Tensor, offsets: tuple[int, ...], adapters: Tensor
) -> Tensor:
    """Returns y [tokens, n] with h [parts, slices, tokens, max_rank] times b [adapters, n, max_rank] added, in float64."""
    total = y.double()
    for adapter, rank in enumerate(ranks.tolist()):
        tokens = (adapters == adapter).nonzero()[:, 0]
        for slice_, (start, stop) in enumerate(zip(offsets, offsets[1:])):
            hidden = h[:, slice_, tokens, :rank].double().sum(0)
            total[tokens, start:stop] += scales[adapter].double() * (hidden @ b[adapter, start:stop, :rank].double().T)
    return total


def lora(
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    ranks: Tensor,
    scales: Tensor,
    offsets: tuple[int, ...],
    groups: Groups,
) -> None:
    """Adds the adapters' product with x [tokens, k] to y [tokens, n]. Other arguments are those of `shrink` and `expand`."""
    expand(y, shrink(x, a, ranks, groups), b, ranks, scales, offsets, groups)


def shrink(x: Tensor, a: Tensor, ranks: Tensor, groups: Groups) -> Tensor:
    """Multiplies x [tokens, k] by a [slices, adapters, max_rank, k]; ranks int32 [adapters], groups from `group_tokens`.

    Returns h float32 [parts, slices, tokens, max_rank], whose parts `expand` adds. Tokens without an adapter, or with one of
    rank 0, are undefined.
    """
    if not runs_on(x):
        return reference_shrink(x, a, ranks, groups.ids).float()
    x, a = x.contiguous(), a.contiguous()
    slices, adapters, max_rank, k = a.shape
    tiles = TILES[groups.block_m]
    block_k = tiles.k_bytes // x.element_size()
    parts = min(tiles.max_splits, max(1, k // SPLIT_K))
    split_k = _cdiv(_cdiv(k, parts), block_k) * block_k
    h = torch.empty(parts, slices, len(x), max_rank, dtype=torch.float32, device=x.device)
    _shrink_kernel[(slices * parts, len(groups.tile_group))](
        x,
        a,
        h,
        ranks,
        groups.rows,
        groups.tile_group,
        len(x),
        adapters,
        k,
        split_k,
        SLICES=slices,
        MAX_RANK=max_rank,
        RANK_PADDED=_padded(max_rank),
        BLOCK_M=groups.block_m,
        BLOCK_K=block_k,
        EVEN_K=k == split_k * parts,
        WIDEN=INTERPRETED,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return h


def expand(
    y: Tensor, h: Tensor, b: Tensor, ranks: Tensor, scales: Tensor, offsets: tuple[int, ...], groups: Groups
) -> None:
    """Adds to y [tokens, n], contiguous. h comes from `shrink`; b [adapters, n, max_rank], scales float32 [adapters]."""
    if not runs_on(y):
        chosen = groups.ids >= 0
        y[chosen] = reference_expand(y, h, b, ranks, scales, offsets, groups.ids)[chosen].to(y.dtype)
        return
    if not y.is_contiguous():
        raise ValueError("y is written in place and has to be contiguous")
    parts, slices, tokens, max_rank = h.shape
    tiles = TILES[groups.block_m]
    block_n = tiles.n_bytes // y.element_size()
    columns = sum(_cdiv(stop - start, block_n) for start, stop in zip(offsets, offsets[1:]))
    _expand_kernel[(columns, len(groups.tile_group))](
        y,
        h,
        b.contiguous(),
        ranks,
        scales,
        groups.rows,
        groups.tile_group,
        tokens,
        y.shape[1],
        OFFSETS=tuple(offsets),
        SLICES=slices,
        PARTS=parts,
        MAX_RANK=max_rank,
        RANK_PADDED=_padded(max_rank),
        BLOCK_M=groups.block_m,
        BLOCK_N=block_n,
        WIDEN=INTERPRETED,
        num_warps=tiles.num_warps,
    )


@jit(do_not_specialize=["tokens", "adapters"])
def _shrink_kernel(
    x,  # [tokens, k]
    a,  # [SLICES, adapters, MAX_RANK, k]
    h,  # [parts, SLICES, tokens, MAX_RANK] float32
    ranks,  # [adapters] int32
    rows,  # [tiles * BLOCK_M] int32
    tile_group,  # [tiles] int32
    tokens,
    adapters,
    k,
    split_k,  # columns of a part; a multiple of BLOCK_K
    SLICES: tl.constexpr,
    MAX_RANK: tl.constexpr,
    RANK_PADDED: tl.constexpr,  # a power of two, at least 16
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,  # True if parts * split_k is k
    WIDEN: tl.constexpr,  # multiply float32: the interpreter cannot multiply bfloat16
):
    part = tl.program_id(0) // SLICES
    which = tl.program_id(0) % SLICES
    adapter = tl.load(tile_group + tl.program_id(1))
    if adapter < 0:
        return
    rank = tl.load(ranks + adapter)
    if rank == 0:
        return
    row = tl.load(rows + tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M))
    valid = row >= 0
    row = tl.where(valid, row, 0).to(tl.int64)
    r = tl.arange(0, RANK_PADDED)
    first = part * split_k
    inner = tl.arange(0, BLOCK_K)
    x_at = x + row[:, None] * k + first + inner[None, :]
    a_at = a + ((which * adapters + adapter).to(tl.int64) * MAX_RANK + r)[:, None] * k + first + inner[None, :]
    x_mask = valid[:, None]
    a_mask = (r < rank)[:, None]
    total = tl.zeros([BLOCK_M, RANK_PADDED], tl.float32)
    for start in range(0, split_k, BLOCK_K):
        if EVEN_K:
            x_tile = tl.load(x_at, x_mask, other=0)
            a_tile = tl.load(a_at, a_mask, other=0)
        else:
            inside = (first + start + inner < k)[None, :]
            x_tile = tl.load(x_at, x_mask & inside, other=0)
            a_tile = tl.load(a_at, a_mask & inside, other=0)
        if WIDEN:
            x_tile = x_tile.to(tl.float32)
            a_tile = a_tile.to(tl.float32)
        total = tl.dot(x_tile, tl.trans(a_tile), total, input_precision="ieee")
        x_at += BLOCK_K
        a_at += BLOCK_K
    at = ((part * SLICES + which).to(tl.int64) * tokens + row)[:, None] * MAX_RANK + r[None, :]
    tl.store(h + at, total, valid[:, None] & (r < MAX_RANK)[None, :])


@jit(do_not_specialize=["tokens"])
def _expand_kernel(
    y,  # [tokens, n]
    h,  # [PARTS, SLICES, tokens, MAX_RANK] float32
    b,  # [adapters, n, MAX_RANK]
    ranks,  # [adapters] int32
    scales,  # [adapters] float32
    rows,  # [tiles * BLOCK_M] int32
    tile_group,  # [tiles] int32
    tokens,
    n,
    OFFSETS: tl.constexpr,  # tuple of SLICES + 1
    SLICES: tl.constexpr,
    PARTS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    RANK_PADDED: tl.constexpr,  # a power of two, at least 16
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDEN: tl.constexpr,  # multiply float32: the interpreter cannot multiply bfloat16
):
    adapter = tl.load(tile_group + tl.program_id(1))
    if adapter < 0:
        return
    rank = tl.load(ranks + adapter)
    if rank == 0:
        return
    # A block of columns lies within one slice.
    block = tl.program_id(0)
    which = 0 * block
    start = OFFSETS[0] + block * BLOCK_N
    stop = OFFSETS[1] + 0 * block
    before = 0
    for i in tl.static_range(1, SLICES):
        before += (OFFSETS[i] - OFFSETS[i - 1] + BLOCK_N - 1) // BLOCK_N
        here = block >= before
        which = tl.where(here, i, which)
        start = tl.where(here, OFFSETS[i] + (block - before) * BLOCK_N, start)
        stop = tl.where(here, OFFSETS[i + 1], stop)

    row = tl.load(rows + tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M))
    valid = row >= 0
    row = tl.where(valid, row, 0).to(tl.int64)
    column = start + tl.arange(0, BLOCK_N)
    r = tl.arange(0, RANK_PADDED)
    mask = (column < stop)[:, None] & (r < MAX_RANK)[None, :]
    mask = mask & (r < (rank + 7) // 8 * 8)[None, :]  # eight at a time, for 16-byte loads
    b_tile = tl.load(b + (adapter.to(tl.int64) * n + column)[:, None] * MAX_RANK + r[None, :], mask, other=0)
    hidden = tl.zeros([BLOCK_M, RANK_PADDED], tl.float32)
    for part in tl.static_range(PARTS):
        at = ((part * SLICES + which).to(tl.int64) * tokens + row)[:, None] * MAX_RANK + r[None, :]
        hidden += tl.load(h + at, valid[:, None] & (r < MAX_RANK)[None, :], other=0)
    if WIDEN:
        b_tile = b_tile.to(tl.float32)
    b_tile = tl.where((r < rank)[None, :], b_tile, 0.0)
    added = tl.dot(hidden.to(b_tile.dtype), tl.trans(b_tile), input_precision="ieee") * tl.load(scales + adapter)
    y_at = y + row[:, None] * n + column[None, :]
    mask = valid[:, None] & (column < stop)[None, :]
    total = tl.load(y_at, mask, other=0).to(tl.float32) + added
    tl.store(y_at, total.to(y.dtype.element_ty), mask)


def _padded(max_rank: int) -> int:
    return max(16, next_power_of_two(max_rank))


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def variants() -> dict[str, Variant]:
    """Llama-3-8B's query, key and value; block_m 16 serves generation steps, 64 context steps."""
    made = {}
    for block_m, rank in ((16, 16), (16, 64), (64, 64)):
        tiles = TILES[block_m]
        wide = block_m >= 64
        tensor_core = {80: ("HMMA",), 90: ("HGMMA" if wide else "HMMA",), 100: ("UTCHMMA" if wide else "HMMA",)}
        shared = {"SLICES": 3, "MAX_RANK": rank, "RANK_PADDED": rank, "BLOCK_M": block_m, "WIDEN": False}
        tables = dict.fromkeys(("ranks", "rows", "tile_group"), "*i32")
        types = tables | {"x": "*bf16", "a": "*bf16", "h": "*fp32"}
        made[f"shrink-{block_m}-rank-{rank}"] = Variant(
            _shrink_kernel,
            types | dict.fromkeys(("tokens", "adapters", "k", "split_k"), "i32"),
            shared | {"BLOCK_K": tiles.k_bytes // 2, "EVEN_K": True},
            tiles.num_warps,
            tiles.num_stages,
            divisible=("k", "split_k"),
            instructions={code: (*names, "LDGSTS") for code, names in tensor_core.items()},
        )
        types = tables | {"y": "*bf16", "h": "*fp32", "b": "*bf16", "scales": "*fp32"}
        parts = min(tiles.max_splits, 4096 // SPLIT_K)
        made[f"expand-{block_m}-rank-{rank}"] = Variant(
            _expand_kernel,
            types | dict.fromkeys(("tokens", "n"), "i32"),
            shared | {"OFFSETS": (0, 4096, 5120, 6144), "PARTS": parts, "BLOCK_N": tiles.n_bytes // 2},
            tiles.num_warps,
            divisible=("n",),
            instructions=tensor_core,
        )
    return made
