"""Linear layers of a mixture of experts, all in one launch (grouped products; Gale et al., MegaBlocks, arXiv 2211.15841).

    y[r, n] = sum over k of x[source(r), k] * w[e(r)][n, k] + bias[e(r)][n]

Rows r are the pairs of a token and one of its experts, in the order of their experts e(r) and, within one, of the tokens;
source(r) is the pair's token, or r itself where x has these rows already. Each expert's rows are cut into blocks of
`block` rows; a program multiplies a block with a tile of its expert's features. How many blocks there are depends on the
tokens, so there are programs for as many as there could be, and those beyond the last return at once: no look at the host,
as graphs need it.

Weights stay where they are: a program reads the address of its expert's from a table.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.common.triton_runtime import INTERPRETED, Variant, architecture_of, jit, runs_on, tl

# (tokens, experts of a token, experts, n, k)
CASES = [(1, 2, 4, 48, 64), (5, 1, 3, 40, 72), (17, 3, 8, 130, 96), (70, 4, 5, 64, 128), (3, 2, 9, 33, 40)]


class GroupedTiles(NamedTuple):
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


# Architecture -> rows of a block -> tiles. Not measured yet.
TILES = {
    80: {16: GroupedTiles(64, 64, 4, 4), 64: GroupedTiles(128, 32, 4, 4)},
    90: {16: GroupedTiles(64, 128, 4, 4), 64: GroupedTiles(128, 64, 4, 4)},
    100: {16: GroupedTiles(64, 128, 4, 4), 64: GroupedTiles(128, 64, 4, 4)},
}
FEW_ROWS, MANY_ROWS = 16, 64  # rows of a block


class Plan(NamedTuple):
    """Which rows belong to which expert, on the device."""

    order: Tensor  # int64 [rows]: the pair, token * places + place, of each row
    first: Tensor  # int32 [experts + 1]: the first row of each expert
    expert: Tensor  # int32 [blocks]: the expert of each block, or -1
    row: Tensor  # int32 [blocks]: the first row of each block
    block: int  # rows of a block
    places: int


class Weights(NamedTuple):
    """The weights of all experts."""

    tensors: tuple[Tensor, ...]  # [n, k] for each expert, contiguous
    biases: tuple[Tensor, ...]  # [n] each; empty: there are none
    addresses: Tensor  # int64 [experts], on the device
    bias_addresses: Tensor | None


def weights_of(tensors: tuple[Tensor, ...], biases: tuple[Tensor, ...] = ()) -> Weights:
    def table(parts: tuple[Tensor, ...]) -> Tensor:
        return torch.tensor([part.data_ptr() for part in parts], dtype=torch.int64, device=tensors[0].device)

    return Weights(tensors, biases, table(tensors), table(biases) if biases else None)


def plan(chosen: Tensor, experts: int) -> Plan:
    """chosen int64 [tokens, places]: the experts of each token."""
    tokens, places = chosen.shape
    rows = tokens * places
    block = FEW_ROWS if rows < MANY_ROWS * experts else MANY_ROWS
    flat = chosen.flatten()
    counts = torch.zeros(experts, dtype=torch.int64, device=chosen.device).scatter_add_(0, flat, torch.ones_like(flat))
    first = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    blocks = (counts + block - 1) // block
    ends = blocks.cumsum(0)
    at = torch.arange(min(rows, experts) + rows // block, device=chosen.device)  # as many as there can be
    expert = torch.searchsorted(ends, at, right=True)
    held = expert.clamp(max=experts - 1)
    row = first[held] + (at - ends[held] + blocks[held]) * block
    expert = torch.where(expert < experts, expert, -1)
    order = flat.argsort(stable=True)
    return Plan(order, first.int(), expert.int(), row.int(), block, places)


def reference(x: Tensor, weights: Weights, plan: Plan, gathers: bool) -> Tensor:
    """Like `grouped_linear`, in float32."""
    rows = x[plan.order // plan.places] if gathers else x
    out = x.new_empty(len(rows), weights.tensors[0].shape[0])
    first = plan.first.tolist()
    for expert, (start, end) in enumerate(zip(first, first[1:])):
        y = rows[start:end].float() @ weights.tensors[expert].float().T
        out[start:end] = (y + weights.biases[expert].float() if weights.biases else y).to(x.dtype)
    return out


def grouped_linear(x: Tensor, weights: Weights, plan: Plan, gathers: bool) -> Tensor:
    """x [tokens, k] with `gathers`, else [rows, k] in the plan's order -> [rows, n] in that order, in x's dtype, which is also
    that of the weights.
    """
    if not runs_on(x):
        return reference(x, weights, plan, gathers)
    n, k = weights.tensors[0].shape
    out = x.new_empty(len(plan.order), n)
    if not len(out):
        return out
    tiles = TILES[architecture_of(x, TILES)][plan.block]
    _grouped_kernel[(len(plan.expert), -(-n // tiles.block_n))](
        x.contiguous(),
        plan.order,
        plan.first,
        plan.expert,
        plan.row,
        weights.addresses,
        weights.bias_addresses,
        out,
        n,
        k,
        plan.places,
        GATHERS=gathers,
        EVEN_K=k % tiles.block_k == 0,
        WIDEN=INTERPRETED and x.dtype == torch.bfloat16,
        BLOCK_M=plan.block,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return out


@jit
def _grouped_kernel(
    x,  # [tokens, k] where GATHERS, else [rows, k]
    order,  # [rows] int64
    first,  # [experts + 1] int32
    block_expert,  # [blocks] int32
    block_row,  # [blocks] int32
    weights,  # [experts] int64: addresses of [n, k], like x
    biases,  # [experts] int64: addresses of [n], like x; or None
    out,  # [rows, n], like x
    n,
    k,
    places,
    GATHERS: tl.constexpr,
    EVEN_K: tl.constexpr,  # True if k is a multiple of BLOCK_K
    WIDEN: tl.constexpr,  # True in the interpreter, which does not multiply bfloat16
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    expert = tl.load(block_expert + tl.program_id(0))
    if expert < 0:
        return
    end = tl.load(first + expert + 1)
    rows = tl.load(block_row + tl.program_id(0)) + tl.arange(0, BLOCK_M)
    features = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_K)
    # Rows past the end read the last one again, so loads need no mask; they are not stored.
    source = tl.minimum(rows, end - 1).to(tl.int64)
    if GATHERS:
        source = tl.load(order + source) // places
    w = tl.load(weights + expert).to(tl.pointer_type(x.dtype.element_ty))
    x_rows = x + source[:, None] * k + columns[None, :]
    w_rows = w + tl.minimum(features, n - 1).to(tl.int64)[:, None] * k + columns[None, :]
    # wgmma needs 64 rows in its left operand: with fewer tokens the weights are the left operand.
    SWAP: tl.constexpr = BLOCK_M < 64
    if SWAP:
        total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, k, BLOCK_K):
        if EVEN_K:
            x_tile = tl.load(x_rows + start)
            w_tile = tl.load(w_rows + start)
        else:
            mask = (start + columns < k)[None, :]
            x_tile = tl.load(x_rows + start, mask, other=0)
            w_tile = tl.load(w_rows + start, mask, other=0)
        if WIDEN:
            x_tile = x_tile.to(tl.float32)
            w_tile = w_tile.to(tl.float32)
        if SWAP:
            total = tl.dot(w_tile, tl.trans(x_tile), total, input_precision="ieee")
        else:
            total = tl.dot(x_tile, tl.trans(w_tile), total, input_precision="ieee")
    if SWAP:
        total = tl.trans(total)
    if biases is not None:
        bias = tl.load(biases + expert).to(tl.pointer_type(x.dtype.element_ty))
        total += tl.load(bias + features, features < n, other=0).to(tl.float32)[None, :]
    mask = (rows < end)[:, None] & (features < n)[None, :]
    tl.store(out + rows.to(tl.int64)[:, None] * n + features[None, :], total.to(out.dtype.element_ty), mask)


def variants() -> dict[str, Variant]:
    """A product has one for each architecture, because each has its own tiles."""
    types = {"x": "*bf16", "order": "*i64", "first": "*i32", "block_expert": "*i32", "block_row": "*i32"}
    types |= {"weights": "*i64", "out": "*bf16", "n": "i32", "k": "i32", "places": "i32"}
    made = {}
    for architecture, of_blocks in TILES.items():
        for block, tiles in of_blocks.items():
            constants = {"biases": None, "GATHERS": block == FEW_ROWS, "EVEN_K": True, "WIDEN": False, "BLOCK_M": block}
            constants |= {"BLOCK_N": tiles.block_n, "BLOCK_K": tiles.block_k}
            made[f"bf16-{block}-{architecture}"] = Variant(
                _grouped_kernel, types, constants, tiles.num_warps, tiles.num_stages, ("n", "k"),
                architectures=(architecture,),
            )  # fmt: skip
    return made
