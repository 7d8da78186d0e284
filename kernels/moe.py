"""A mixture of experts (Shazeer et al. 2017; Mixtral, Jiang et al. 2024): routing, and matrix products grouped by expert.

No caller in the product yet. Its grouping of rows serves kernels/lora.py, which waits for rows 000-19, 001-48 and 002-45 of
docs/features.md; models with experts have no row there.

    p       = softmax(logits)                                 of a token, over the experts, in float32
    ids     = the top_k experts of largest p                  ties: the lower expert first
    weights = p[ids], or p[ids] / sum(p[ids])                 (renormalise)
    out     = x[pair // top_k] @ w[ids[pair]].T               pair = token * top_k + choice            (grouped_matmul)
    y       = sum over choices of weights * out               in float32, in the order of choices      (grouped_matmul_sum)

Rows of one group (here: pairs of one expert) are gathered into tiles of `block_m` rows, as in vLLM's moe_align_block_size and
SGLang: `rows` lists them by group, in their order, with -1 where the last tile of a group is not full. The number of tiles
depends on shapes alone, so nothing waits for the device and a CUDA graph can hold the launches; unused tiles belong to group -1.
A row whose id is -1 (an expert of another rank) is in no tile: its row of `out` is not written, and the sum leaves it out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.common.triton_runtime import INTERPRETED, Variant, jit, next_power_of_two, runs_on, tl

# (tokens, experts, top_k, k, n, ids): "any", "one" expert for all tokens, "few" (most experts empty), "absent" (some ids are -1)
CASES = [
    (1, 8, 2, 64, 48, "any"),
    (9, 4, 2, 72, 40, "any"),
    (37, 3, 1, 40, 136, "one"),
    (20, 16, 4, 144, 24, "few"),
    (11, 6, 3, 33, 70, "absent"),
    (40, 11, 2, 32, 150, "any"),
]


class Groups(NamedTuple):
    """Rows sorted into tiles by group, made once for all products with the same ids."""

    ids: Tensor  # int32 [rows]: a row's group; -1 = none
    rows: Tensor  # int32 [tiles * block_m]: indices into ids; -1: padding; undefined in tiles of group -1
    tile_group: Tensor  # int32 [tiles]
    block_m: int


class Tiles(NamedTuple):
    n_bytes: int
    k_bytes: int
    num_warps: int
    num_stages: int


# block_m -> the other sizes of a tile, in bytes so that float32 has smaller tiles. With few rows the weights are the left operand
# of the product, which is then wide enough for wgmma.
TILES = {16: Tiles(128, 256, 4, 4), 64: Tiles(256, 128, 4, 3), 128: Tiles(256, 128, 8, 3)}


def block_m_for(rows: int, groups: int) -> int:
    """The key of TILES for this number of rows and groups."""
    mean = rows / groups
    return 16 if mean <= 32 else 64 if mean <= 64 else 128


def reference_route(logits: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """logits [tokens, experts] -> (weights float32 [tokens, top_k], ids int32 [tokens, top_k])."""
    ids = logits.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    weights = logits.double().softmax(1).gather(1, ids)
    if renormalise:
        weights /= weights.sum(1, keepdim=True)
    return weights.float(), ids.int()


def reference_groups(ids: Tensor, groups: int, block_m: int) -> Groups:
    """ids int32 [rows]."""
    rows: list[int] = []
    tile_group: list[int] = []
    of_rows = ids.tolist()
    for group in range(groups):
        own = [row for row, id_ in enumerate(of_rows) if id_ == group]
        own += [-1] * (-len(own) % block_m)
        rows += own
        tile_group += [group] * (len(own) // block_m)
    unused = _max_tiles(len(of_rows), groups, block_m) - len(tile_group)
    rows += [-1] * (unused * block_m)
    tile_group += [-1] * unused
    return Groups(ids, _int32(rows, ids), _int32(tile_group, ids), block_m)


def reference(x: Tensor, w: Tensor, ids: Tensor, top_k: int) -> Tensor:
    """x [rows / top_k, k], w [experts, n, k], ids int32 [rows] -> float64 [rows, n], zeros where the id is -1."""
    out = torch.zeros(len(ids), w.shape[1], dtype=torch.float64, device=x.device)
    for expert in range(len(w)):
        pairs = (ids == expert).nonzero()[:, 0]
        out[pairs] = x[pairs // top_k].double() @ w[expert].double().T
    return out


def reference_sum(out: Tensor, weights: Tensor) -> Tensor:
    """out [tokens * top_k, n], weights [tokens, top_k] -> float64 [tokens, n]."""
    tokens, top_k = weights.shape
    total = torch.zeros(tokens, out.shape[1], dtype=torch.float64, device=out.device)
    for choice in range(top_k):
        total += weights[:, choice, None].double() * out[choice::top_k].double()
    return total


def route(logits: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """logits float32 [tokens, experts] -> (weights float32 [tokens, top_k], ids int32 [tokens, top_k])."""
    if not runs_on(logits):
        return reference_route(logits, top_k, renormalise)
    tokens, experts = logits.shape
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device)
    padded = next_power_of_two(experts)
    block = max(1, 512 // padded)
    _route_kernel[(_cdiv(tokens, block),)](
        logits.contiguous(),
        weights,
        ids,
        tokens,
        experts,
        TOP_K=top_k,
        TOP_K_PADDED=next_power_of_two(top_k),
        RENORMALISE=renormalise,
        EXPERTS_PADDED=padded,
        BLOCK=block,
    )
    return weights, ids


def group_rows(ids: Tensor, groups: int, block_m: int) -> Groups:
    """ids int32 [rows] (or [tokens, top_k]), each below `groups`, -1: none."""
    ids = ids.reshape(-1)
    if not runs_on(ids):
        return reference_groups(ids, groups, block_m)
    tiles = _max_tiles(len(ids), groups, block_m)
    rows = torch.empty(tiles * block_m, dtype=torch.int32, device=ids.device)
    tile_group = torch.empty(tiles, dtype=torch.int32, device=ids.device)
    block = min(1024, max(32, next_power_of_two(len(ids))))
    padded = max(16, next_power_of_two(groups))
    _group_kernel[(groups,)](
        ids, rows, tile_group, len(ids), groups, tiles, GROUPS_PADDED=padded, BLOCK_M=block_m, BLOCK=block
    )
    return Groups(ids, rows, tile_group, block_m)


def grouped_matmul(x: Tensor, w: Tensor, groups: Groups, top_k: int) -> Tensor:
    """x [rows / top_k, k], w [experts, n, k] -> [rows, n] in x's dtype; a row whose id is -1 is undefined."""
    if not runs_on(x):
        return reference(x, w, groups.ids, top_k).to(x.dtype)
    x, w = x.contiguous(), w.contiguous()
    _, n, k = w.shape
    out = torch.empty(len(groups.ids), n, dtype=x.dtype, device=x.device)
    tiles = TILES[groups.block_m]
    block_n, block_k = tiles.n_bytes // x.element_size(), tiles.k_bytes // x.element_size()
    max_tiles = len(groups.tile_group)
    _matmul_kernel[(max_tiles * _cdiv(n, block_n),)](
        x,
        w,
        out,
        groups.rows,
        groups.tile_group,
        max_tiles,
        n,
        k,
        TOP_K=top_k,
        BLOCK_M=groups.block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        EVEN_K=k % block_k == 0,
        WIDEN=INTERPRETED,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return out


def grouped_matmul_sum(x: Tensor, w: Tensor, groups: Groups, weights: Tensor) -> Tensor:
    """x [tokens * top_k, k], w [experts, n, k], weights float32 [tokens, top_k] -> [tokens, n] in x's dtype."""
    out = grouped_matmul(x, w, groups, 1)
    if not runs_on(x):
        return reference_sum(out, weights).to(x.dtype)
    tokens, top_k = weights.shape
    n = out.shape[1]
    total = torch.empty(tokens, n, dtype=x.dtype, device=x.device)
    block = min(1024, next_power_of_two(n))
    _sum_kernel[(tokens, _cdiv(n, block))](out, weights.contiguous(), groups.ids, total, n, TOP_K=top_k, BLOCK=block)
    return total


@jit(do_not_specialize=["tokens"])
def _route_kernel(
    logits,  # [tokens, experts] float32
    weights,  # [tokens, TOP_K] float32
    ids,  # [tokens, TOP_K] int32
    tokens,
    experts,
    TOP_K: tl.constexpr,
    TOP_K_PADDED: tl.constexpr,  # powers of two
    RENORMALISE: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,  # tokens
):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.arange(0, EXPERTS_PADDED)
    choice = tl.arange(0, TOP_K_PADDED)
    mask = (token < tokens)[:, None] & (expert < experts)[None, :]
    logit = tl.load(logits + token.to(tl.int64)[:, None] * experts + expert[None, :], mask, other=float("-inf"))
    m_i = tl.max(logit, 1)
    m_i = tl.where(m_i > float("-inf"), m_i, 0.0)
    l_i = tl.sum(tl.exp(logit - m_i[:, None]), 1)
    left = tl.broadcast_to((expert < experts)[None, :], [BLOCK, EXPERTS_PADDED])
    taken = tl.zeros([BLOCK, TOP_K_PADDED], tl.int32)
    weight = tl.zeros([BLOCK, TOP_K_PADDED], tl.float32)
    for i in tl.static_range(TOP_K):
        best = tl.max(tl.where(left, logit, float("-inf")), 1)
        lowest = tl.min(tl.where(left & (logit == best[:, None]), expert[None, :], EXPERTS_PADDED), 1)
        lowest = tl.minimum(lowest, experts - 1)  # no expert is found where `best` is NaN
        left = left & (expert[None, :] != lowest[:, None])
        taken = tl.where(choice[None, :] == i, lowest[:, None], taken)
        weight = tl.where(choice[None, :] == i, tl.exp(best - m_i)[:, None], weight)
    if RENORMALISE:
        l_i = tl.sum(weight, 1)
    weight = weight / tl.where(l_i > 0, l_i, 1.0)[:, None]
    at = token.to(tl.int64)[:, None] * TOP_K + choice[None, :]
    mask = (token < tokens)[:, None] & (choice < TOP_K)[None, :]
    tl.store(weights + at, weight, mask)
    tl.store(ids + at, taken, mask)


@jit(do_not_specialize=["count", "tiles"])
def _group_kernel(
    ids,  # [count] int32
    rows,  # [tiles * BLOCK_M] int32
    tile_group,  # [tiles] int32
    count,
    groups,
    tiles,
    GROUPS_PADDED: tl.constexpr,  # a power of two
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Each group has a program, which counts the rows of all groups: that needs no second launch and no atomics, and the order is
    # always the same.
    group = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    every = tl.arange(0, GROUPS_PADDED)
    sizes = tl.zeros([GROUPS_PADDED], tl.int32)
    for start in range(0, count, BLOCK):
        row = start + lane
        id_ = tl.load(ids + row, row < count, other=-1)
        sizes += tl.histogram(id_, GROUPS_PADDED, (id_ >= 0) & (id_ < groups))
    needed = (sizes + (BLOCK_M - 1)) // BLOCK_M
    size = tl.sum(tl.where(every == group, sizes, 0), 0)
    first = tl.sum(tl.where(every < group, needed, 0), 0)
    end = first + tl.sum(tl.where(every == group, needed, 0), 0)

    own = rows + first * BLOCK_M
    written = 0
    for start in range(0, count, BLOCK):
        row = start + lane
        same = tl.load(ids + row, row < count, other=-1) == group
        tl.store(own + written + tl.cumsum(same.to(tl.int32), 0) - 1, row, same)
        written += tl.sum(same.to(tl.int32), 0)
    padding = size + tl.arange(0, BLOCK_M)
    tl.store(own + padding, tl.full([BLOCK_M], -1, tl.int32), padding < (end - first) * BLOCK_M)

    for start in range(0, tiles, BLOCK):
        tile = start + lane
        mask = (tile >= first) & (tile < tiles)
        if group < groups - 1:
            mask = mask & (tile < end)
        tl.store(tile_group + tile, tl.where(tile < end, group, -1), mask)


@jit(do_not_specialize=["tiles"])
def _matmul_kernel(
    x,  # [rows / TOP_K, k]
    w,  # [experts, n, k]
    out,  # [rows, n]
    rows,  # [tiles * BLOCK_M] int32
    tile_group,  # [tiles] int32
    tiles,
    n,
    k,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,  # whether BLOCK_K divides k
    WIDEN: tl.constexpr,  # multiply float32: the interpreter cannot multiply bfloat16
):
    # Neighbouring programs take eight tiles of rows for a column of weights, while the cache has it.
    width = 8 * tl.cdiv(n, BLOCK_N)
    first = tl.program_id(0) // width * 8
    height = tl.minimum(tiles - first, 8)
    place = tl.program_id(0) % width
    tile = first + place % height
    expert = tl.load(tile_group + tile)
    if expert < 0:
        return
    row = tl.load(rows + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    valid = row >= 0
    row = tl.where(valid, row, 0)
    column = place // height * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    x_at = x + (row // TOP_K).to(tl.int64)[:, None] * k + inner[None, :]
    w_at = w + expert.to(tl.int64) * n * k + column[:, None] * k + inner[None, :]
    x_mask = valid[:, None]
    w_mask = (column < n)[:, None]
    swapped: tl.constexpr = BLOCK_M < 64
    if swapped:
        total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, k, BLOCK_K):
        if EVEN_K:
            x_tile = tl.load(x_at, x_mask, other=0)
            w_tile = tl.load(w_at, w_mask, other=0)
        else:
            inside = (start + inner < k)[None, :]
            x_tile = tl.load(x_at, x_mask & inside, other=0)
            w_tile = tl.load(w_at, w_mask & inside, other=0)
        if WIDEN:
            x_tile = x_tile.to(tl.float32)
            w_tile = w_tile.to(tl.float32)
        if swapped:
            total = tl.dot(w_tile, tl.trans(x_tile), total, input_precision="ieee")
        else:
            total = tl.dot(x_tile, tl.trans(w_tile), total, input_precision="ieee")
        x_at += BLOCK_K
        w_at += BLOCK_K
    if swapped:
        total = tl.trans(total)
    out_at = out + row.to(tl.int64)[:, None] * n + column[None, :]
    tl.store(out_at, total.to(out.dtype.element_ty), valid[:, None] & (column < n)[None, :])


@jit
def _sum_kernel(
    out,  # [tokens * TOP_K, n]
    weights,  # [tokens, TOP_K] float32
    ids,  # [tokens * TOP_K] int32
    total,  # [tokens, n]
    n,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    summed = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(TOP_K):
        pair = token * TOP_K + choice
        mask = (column < n) & (tl.load(ids + pair) >= 0)
        summed += tl.load(weights + pair) * tl.load(out + pair * n + column, mask, other=0).to(tl.float32)
    tl.store(total + token * n + column, summed.to(total.dtype.element_ty), column < n)


def _max_tiles(rows: int, groups: int, block_m: int) -> int:
    return (rows + min(groups, rows) * (block_m - 1)) // block_m


def _int32(values: list[int], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=like.device)


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def variants() -> dict[str, Variant]:
    """The variants for Mixtral 8x7B: hidden 4096, intermediate 14336, 8 experts, 2 of them for each token."""
    instructions = {80: ("HMMA", "LDGSTS"), 90: ("HGMMA", "LDGSTS"), 100: ("UTCHMMA", "LDGSTS")}
    types = dict.fromkeys(("x", "w", "out"), "*bf16") | dict.fromkeys(("rows", "tile_group"), "*i32")
    types |= dict.fromkeys(("tiles", "n", "k"), "i32")
    made = {}
    for block_m, top_k in ((16, 2), (64, 2), (128, 1)):
        tiles = TILES[block_m]
        constants = {"TOP_K": top_k, "BLOCK_M": block_m, "BLOCK_N": tiles.n_bytes // 2, "BLOCK_K": tiles.k_bytes // 2}
        made[f"matmul-{block_m}"] = Variant(
            _matmul_kernel,
            types,
            constants | {"EVEN_K": True, "WIDEN": False},
            tiles.num_warps,
            tiles.num_stages,
            divisible=("n", "k"),
            instructions=instructions,
        )
    types = {"logits": "*fp32", "weights": "*fp32", "ids": "*i32", "tokens": "i32", "experts": "i32"}
    constants = {"TOP_K": 2, "TOP_K_PADDED": 2, "RENORMALISE": True, "EXPERTS_PADDED": 8, "BLOCK": 64}
    made["route-8"] = Variant(_route_kernel, types, constants)
    types = dict.fromkeys(("ids", "rows", "tile_group"), "*i32") | dict.fromkeys(("count", "groups", "tiles"), "i32")
    made["group-8"] = Variant(_group_kernel, types, {"GROUPS_PADDED": 16, "BLOCK_M": 16, "BLOCK": 1024})
    types = {"out": "*bf16", "weights": "*fp32", "ids": "*i32", "total": "*bf16", "n": "i32"}
    made["sum-4096"] = Variant(_sum_kernel, types, {"TOP_K": 2, "BLOCK": 1024}, divisible=("n",))
    return made
