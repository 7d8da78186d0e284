"""Looks up the embeddings of tokens.

    y[t] = table[ids[t] - first] * scale          0 where ids[t] - first is not a row of the table

With tensor parallelism over the vocabulary (Megatron-LM, Shoeybi et al., 2019) a rank's table begins at token `first`, and the
sum over the ranks is the embedding; `first` waits for row 002-37 of docs/features.md. Gemma multiplies by sqrt(hidden), rounded
to the table's type; the product is computed in float32 and rounded once. Without a scale the rows are copied bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.common.triton_runtime import Variant, jit, next_power_of_two, runs_on, tl

# (tokens, vocab, hidden)
CASES = [(1, 5, 64), (9, 31, 96), (17, 8, 40), (3, 11, 1031), (0, 4, 16)]

TILE = 1 << 10


def reference(table: Tensor, ids: Tensor, scale: float | None = None, first: int = 0) -> Tensor:
    """Looks ids int64 [tokens] up in table [vocab, hidden]; returns [tokens, hidden] in table's dtype."""
    row = ids - first
    known = (row >= 0) & (row < len(table))
    y = torch.where(known[:, None], table[torch.where(known, row, 0)], 0)
    return y if scale is None else (y.float() * scale).to(table.dtype)


def embedding(table: Tensor, ids: Tensor, scale: float | None = None, first: int = 0) -> Tensor:
    """Looks ids int64 [tokens] up in table [vocab, hidden]; returns a new tensor [tokens, hidden] in table's dtype."""
    if not runs_on(table):
        return reference(table, ids, scale, first)
    vocab, hidden = table.shape
    out = table.new_empty(len(ids), hidden)
    block = _block(hidden)
    _embedding_kernel[(len(ids), -(-hidden // block))](
        table.contiguous(), ids.contiguous(), out, vocab, hidden, first, scale, BLOCK=block, num_warps=_num_warps(block)
    )
    return out


@jit(do_not_specialize=["first"])
def _embedding_kernel(
    table,  # [vocab, hidden]
    ids,  # [tokens] int64
    out,  # [tokens, hidden], like table
    vocab,
    hidden,
    first,  # the token of table's first row
    scale,  # float32, or None
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < hidden
    row = tl.load(ids + token) - first
    known = (row >= 0) & (row < vocab)
    y = tl.load(table + tl.where(known, row, 0) * hidden + columns, mask & known, other=0)
    if scale is not None:
        y = (y.to(tl.float32) * scale).to(out.dtype.element_ty)
    tl.store(out + token * hidden + columns, y, mask)


def _block(hidden: int) -> int:
    return min(TILE, next_power_of_two(hidden))


def _num_warps(block: int) -> int:
    return max(1, block // 256)


def variants() -> dict[str, Variant]:
    types = {"table": "*bf16", "ids": "*i64", "out": "*bf16", "vocab": "i32", "hidden": "i32", "first": "i32"}
    block = _block(4096)
    common: dict[str, Any] = {
        "divisible": ("vocab", "hidden"),
        "instructions": dict.fromkeys((80, 90, 100), ("LDG.E.128", "STG.E.128")),
    }
    return {
        "copy-4096": Variant(_embedding_kernel, types, {"scale": None, "BLOCK": block}, _num_warps(block), **common),
        "scaled-4096": Variant(
            _embedding_kernel, types | {"scale": "fp32"}, {"BLOCK": block}, _num_warps(block), **common
        ),
    }
