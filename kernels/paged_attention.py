"""Attention of a flat mixed batch over paged KV: context rows (many queries) and generation rows (one), in any order.

A row's queries are its newest positions, so the causal mask is aligned at the bottom right:

    keys      0 .................. length                 query i of n stands at position length - n + i
    queries                [ n ]                          and sees keys in (position - window, position]
                                                          and those before min(sink_tokens, position + 1)

    out = softmax(softcap(scale * q k^T) + mask) v        query heads of one kv head share its keys (GQA)

softcap(x) = cap * tanh(x / cap), or x. With sinks, the softmax of a head has one more score, whose weight no value gets.

Where rows say `ends`, a query sees keys up to one of them in the place of its own position: images whose tokens see all of each
other. The plans of gathers do so, those of the Triton kernels do not.

Sink tokens are the first ones of a sequence, which every query sees also where there is a window (StreamingLLM, Xiao et al. 2023;
unlike there, keys keep their absolute rotary positions, so that KV that is computed again has the same bits).

Physical cells are reached only through block tables. Cells beyond `length` or outside of the window never affect the result,
whatever they hold (even NaN in memory that was never written). Table entries of blocks that have left the window (-1), or beyond
the end, are never used as an index. kernels/common/kv_format.py describes the pools.

`plan_attention` runs once a step on the host and prepares what all layers share; `paged_attention` runs once a layer. The
reference gathers the blocks of a row and dequantises them: rows with one query are batched in groups of similar length, the
others run one by one. On a GPU the kernels of decode_attention.py and context_attention.py read the pool through the tables.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from kernels.common.kv_format import KVPool, unpack
from kernels.common.scoring import PLAIN, Scoring, attend
from kernels.common.transfer import place
from kernels.common.triton_runtime import runs_at
from kernels.context_attention import context_attention
from kernels.decode_attention import SPLIT_TOKENS, decode_attention

KERNEL_BLOCK_SIZES = (16, 32, 64, 128)  # tokens
DECODE_HEAD_DIMS = (
    32,
    64,
    128,
    256,
)  # decode_attention.py takes these; rows of other dimensions go to context_attention.py
# Queries of a context row that share a mask. It bounds the mask's memory, and skips keys that none of the queries sees.
QUERIES_AT_ONCE = 256


class AttentionRows(NamedTuple):
    """Where the rows of a flat batch have their queries and keys, as arrays on the host."""

    starts: NDArray[np.int64]  # [num_rows + 1]: row r's queries are flat tokens [starts[r], starts[r + 1])
    lengths: NDArray[np.int64]  # [num_rows]: keys of each row, those of this step included
    tables: NDArray[np.int32]  # [num_rows, max_blocks]: block ids
    ends: NDArray[np.int32] | None = (
        None  # [num_tokens]: one past the last key that a query sees; None: one past its own
    )


class GenerationGroup(NamedTuple):
    """Rows with one query. Each gathers `cells` = blocks * block_size cells."""

    tokens: Tensor | None  # [rows] int64: their place in the flat batch; None if they are the whole batch
    blocks: Tensor  # [rows * blocks] int64
    mask: Tensor  # [rows, 1, 1, cells] in the query's dtype: 0, or -inf where a cell is not to be seen
    unseen: Tensor  # [rows, cells, 1, 1] bool
    seen_by_all: slice  # cells that every row sees; unseen ones among the others are set to 0, because 0 * NaN is NaN


class QuerySlice(NamedTuple):
    """Consecutive queries of one context row, and the cells of its gather that they see."""

    tokens: slice  # where the queries are in the flat batch
    cells: slice | Tensor
    mask: Tensor | None  # [queries, cells] in the query's dtype; None = plain causal, as many queries as keys


class ContextRow(NamedTuple):
    blocks: Tensor  # [blocks] int64
    slices: list[QuerySlice]


class AttentionPlan(NamedTuple):
    generation: list[GenerationGroup]
    context: list[ContextRow]


class DeviceRows(NamedTuple):
    """Consecutive rows as the Triton kernels read them, on the device."""

    starts: Tensor | None  # int32 [num_rows + 1], counted from the first query of these rows; None: one query each
    lengths: Tensor  # int32 [num_rows]
    tables: Tensor  # int32 [num_rows, max_blocks]


class DevicePlan(NamedTuple):
    """The leading rows of one query each, and the rows after them. Either may be missing."""

    generation: DeviceRows | None
    context: DeviceRows | None
    window: int | None
    split: int = SPLIT_TOKENS  # tokens; the same for all batches of a model, so that results do not depend on the batch
    sink_tokens: int = 0  # without effect where there is no window


Plan = AttentionPlan | DevicePlan


class PagedCase(NamedTuple):
    rows: list[tuple[int, int]]  # (queries, keys)
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 16
    block_size: int = 4
    window: int | None = None
    dtype: torch.dtype = torch.float32
    sink_tokens: int = 0


CASES = [
    PagedCase([(1, 1)], kv_heads=1, group=1, head_dim=8),
    PagedCase([(9, 9)]),
    PagedCase([(1, 5), (1, 4), (1, 17)], group=3),
    PagedCase([(1, 3), (4, 4), (3, 9), (1, 40)], block_size=2, head_dim=8),
    PagedCase([(20, 33), (1, 16), (1, 17), (16, 16)], kv_heads=4, group=1, head_dim=32, block_size=16),
    PagedCase([(5, 15), (1, 31)], kv_heads=1, group=7, head_dim=40, block_size=1),
    PagedCase([(7, 13), (1, 3), (17, 17)], kv_heads=3, group=3, head_dim=20, block_size=8),
    PagedCase([(1, 20), (1, 3), (5, 21), (9, 9)], kv_heads=1, group=7, head_dim=24, window=6),
    PagedCase([(1, 8), (1, 9), (1, 64), (8, 40)], group=1, block_size=8, window=8),
    PagedCase([(1, 32), (1, 30)], window=12),
    PagedCase([(1, 10), (6, 19), (11, 11)], window=1),
    PagedCase([(300, 600), (1, 514), (270, 270)], block_size=32),
    PagedCase([(300, 600), (1, 514), (270, 270)], block_size=32, window=100),
    PagedCase([(1, 20), (1, 3), (5, 21), (9, 9)], kv_heads=1, group=7, head_dim=24, window=6, sink_tokens=3),
    PagedCase([(1, 30), (1, 9), (1, 7), (8, 40), (2, 70)], group=1, block_size=8, window=8, sink_tokens=8),
    PagedCase([(1, 40), (13, 13), (4, 40)], window=1, sink_tokens=1),
    PagedCase([(300, 600), (1, 514), (270, 270)], block_size=32, window=100, sink_tokens=37),
    PagedCase([(5, 12), (1, 11), (1, 6)], window=3, sink_tokens=1000),
    PagedCase([(5, 5), (1, 13), (3, 7), (1, 2)], dtype=torch.bfloat16),
    PagedCase([(5, 5), (1, 13), (3, 7), (1, 2)], dtype=torch.float16),
]


def plan_attention(
    rows: AttentionRows,
    block_size: int,
    windows: Iterable[int | None],
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    split: int = SPLIT_TOKENS,
    sink_tokens: int = 0,
) -> dict[int | None, Plan]:
    """The plan of each window (tokens; None: all). `dtype` is that of the queries; `split` is as in DevicePlan.

    `sink_tokens`: the first tokens of each row, which all queries see.
    """
    num_queries = np.diff(rows.starts)
    if runs_at(device) and block_size in KERNEL_BLOCK_SIZES:
        generation, context = _place_rows(rows, num_queries, head_dim, device)
        return {window: DevicePlan(generation, context, window, split, sink_tokens) for window in set(windows)}
    return {
        window: _plan_gathers(rows, num_queries, block_size, window, dtype, device, sink_tokens if window else 0)
        for window in set(windows)
    }


def _plan_gathers(
    rows: AttentionRows,
    num_queries: NDArray[np.int64],
    block_size: int,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
    sink_tokens: int,
) -> AttentionPlan:
    single = np.flatnonzero(num_queries == 1)
    generation = _plan_generation(rows, single, block_size, window, dtype, device, sink_tokens) if len(single) else []
    context = [
        _plan_context(
            int(rows.starts[row]),
            int(num_queries[row]),
            int(rows.lengths[row]),
            rows.tables[row],
            block_size,
            window,
            dtype,
            device,
            sink_tokens,
            None if rows.ends is None else rows.ends[rows.starts[row] : rows.starts[row + 1]],
        )
        for row in np.flatnonzero(num_queries > 1)
    ]
    return AttentionPlan(generation, context)


def num_leading_single(num_queries: NDArray[np.int64], head_dim: int) -> int:
    """The number of leading rows that decode_attention.py takes."""
    if head_dim not in DECODE_HEAD_DIMS:
        return 0
    return int((num_queries != 1).argmax()) if (num_queries != 1).any() else len(num_queries)


def reference(q: Tensor, pool: KVPool, plan: AttentionPlan, scoring: Scoring = PLAIN) -> Tensor:
    """Attends with q [num_tokens, heads, head_dim]; returns a new tensor like q."""
    if len(plan.generation) == 1 and plan.generation[0].tokens is None:
        return _attend_generation(q, pool, plan.generation[0], scoring)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for group in plan.generation:
        assert group.tokens is not None  # it is None only where the group is the whole batch
        out.index_copy_(0, group.tokens, _attend_generation(q.index_select(0, group.tokens), pool, group, scoring))
    for row in plan.context:
        _attend_context(q, out, pool, row, scoring)
    return out


def paged_attention(q: Tensor, pool: KVPool, plan: Plan, scoring: Scoring = PLAIN) -> Tensor:
    """Attends with q [num_tokens, heads, head_dim]; returns a new tensor like q.

    The KV of this step's tokens must be in the pool already.
    """
    if isinstance(plan, AttentionPlan):
        return reference(q, pool, plan, scoring)
    scale = q.shape[-1] ** -0.5 if scoring.scale is None else scoring.scale
    window, sink = plan.window, plan.sink_tokens
    sinks, cap = scoring.sinks, scoring.softcap
    first = 0 if plan.generation is None else len(plan.generation.lengths)
    parts = []
    if plan.generation is not None:
        _, lengths, tables = plan.generation
        parts.append(decode_attention(q[:first], pool, lengths, tables, scale, window, sinks, plan.split, sink, cap))
    if plan.context is not None:
        starts, lengths, tables = plan.context
        assert starts is not None  # it is None only for generation rows
        parts.append(context_attention(q[first:], pool, starts, lengths, tables, scale, window, sinks, sink, cap))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _place_rows(
    rows: AttentionRows, num_queries: NDArray[np.int64], head_dim: int, device: torch.device
) -> tuple[DeviceRows | None, DeviceRows | None]:
    """Returns the leading rows of one query, and the rows after them. Arrays are separate, because kernels need alignment."""

    def put(array: NDArray[Any]) -> Tensor:
        return place(np.ascontiguousarray(array, dtype=np.int32), device)

    first = num_leading_single(num_queries, head_dim)
    generation = context = None
    if first:
        generation = DeviceRows(None, put(rows.lengths[:first]), put(rows.tables[:first]))
    if first < len(num_queries):
        starts = rows.starts[first:] - rows.starts[first]
        context = DeviceRows(put(starts), put(rows.lengths[first:]), put(rows.tables[first:]))
    return generation, context


def _plan_generation(
    rows: AttentionRows,
    single: NDArray[np.int64],
    block_size: int,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
    sink_tokens: int,
) -> list[GenerationGroup]:
    """Groups rows by their number of blocks, rounded up to a power of two: less than half of a gather is padding.

    Gathered are the blocks of the sink tokens, and behind them those of the window.
    """
    ends = rows.lengths[single]
    first_keys = np.zeros_like(ends) if window is None else np.maximum(ends - window, 0)
    sink_blocks = -(-min(sink_tokens, int(ends.max())) // block_size)
    gaps = np.maximum(first_keys // block_size - sink_blocks, 0)  # blocks between the two, which are not gathered
    num_blocks = -(-ends // block_size) - gaps
    sizes = np.frexp(num_blocks - 1)[1]
    groups = []
    for size in np.unique(sizes):
        chosen = np.flatnonzero(sizes == size)
        columns = np.arange(num_blocks[chosen].max())
        columns = columns + gaps[chosen, None] * (columns >= sink_blocks if sink_blocks else 1)
        cells = (columns[:, :, None] * block_size + np.arange(block_size)).reshape(len(chosen), -1)
        unseen = cells < first_keys[chosen, None]
        if sink_tokens:
            unseen &= cells >= sink_tokens
        unseen = torch.from_numpy(unseen | (cells >= ends[chosen, None]))
        is_used = columns * block_size < ends[chosen, None]
        blocks = rows.tables[single[chosen, None], np.where(is_used, columns, 0)]
        blocks = torch.from_numpy(np.where(is_used, blocks, 0).astype(np.int64).ravel())
        tokens = None if len(chosen) == rows.starts[-1] else torch.from_numpy(rows.starts[single[chosen]]).to(device)
        mask = torch.zeros(unseen.shape, dtype=dtype).masked_fill_(unseen, -torch.inf)
        head = int((first_keys[chosen] - gaps[chosen] * block_size).max())
        tail = max(head, int((ends[chosen] - gaps[chosen] * block_size).min()))
        groups.append(
            GenerationGroup(
                tokens,
                blocks.to(device),
                mask.to(device)[:, None, None],
                unseen.to(device)[:, :, None, None],
                slice(head, tail),
            )
        )
    return groups


def _plan_context(
    first: int,
    num_queries: int,
    length: int,
    table: NDArray[np.int32],
    block_size: int,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
    sink_tokens: int,
    ends: NDArray[np.int32] | None = None,
) -> ContextRow:
    """The plan of one row, whose first token in the flat batch is `first`. Each slice reads only keys that it sees."""
    reach = length if window is None else window
    computed = length - num_queries
    first_block = max(0, computed - reach + 1) // block_size
    sink_blocks = min(-(-sink_tokens // block_size), first_block)  # gathered before the window's
    is_plain = computed == 0 and reach >= length and ends is None
    lasts = torch.arange(computed + 1, length + 1) if ends is None else torch.from_numpy(ends.astype(np.int64))
    slices = []
    for start in range(0, num_queries, num_queries if is_plain else QUERIES_AT_ONCE):
        stop = min(num_queries, start + (num_queries if is_plain else QUERIES_AT_ONCE))
        first_key = max(0, computed + start - reach + 1)
        mask, stop_key = None, int(lasts[stop - 1])
        if not is_plain:
            queries = torch.arange(computed + start, computed + stop)[:, None]
            sinks = torch.arange(min(sink_tokens, first_key))
            keys = torch.cat((sinks, torch.arange(first_key, stop_key)))
            hidden = (keys >= lasts[start:stop, None]) | ((keys <= queries - reach) & (keys >= sink_tokens))
            mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf).to(device)
        gap = (first_block - sink_blocks) * block_size
        cells: slice | Tensor = slice(first_key - gap, stop_key - gap)
        if sink_tokens and first_key:
            cells = torch.where(keys < first_key, keys, keys - gap).to(device)
        slices.append(QuerySlice(slice(first + start, first + stop), cells, mask))
    chosen = np.concatenate((table[:sink_blocks], table[first_block : -(-length // block_size)]))
    return ContextRow(torch.from_numpy(chosen.astype(np.int64)).to(device), slices)


def gather_blocks(pool: KVPool, blocks: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Gathers keys and values of blocks int64 [n] in dtype: two new tensors [n, block_size, kv_heads, head_dim]."""
    sides = [data.index_select(0, blocks) for data, _ in pool.sides]
    if pool.params is None:
        return sides
    params = pool.params.index_select(0, blocks).float()  # [n, block_size, 2, kv_heads, 2]
    for side, (_, bits) in enumerate(pool.sides):
        scale, least = params[:, :, side].unbind(-1)
        sides[side] = (unpack(sides[side], bits).float() * scale[..., None] + least[..., None]).to(dtype)
    return sides


def _attend_generation(q: Tensor, pool: KVPool, group: GenerationGroup, scoring: Scoring) -> Tensor:
    """Attends with q [rows, heads, head_dim]. The query heads of a kv head become the queries of one product."""
    sides = gather_blocks(pool, group.blocks, q.dtype)
    sides = [each.view(q.shape[0], -1, *each.shape[2:]) for each in sides]  # [rows, cells, kv_heads, head_dim]
    head, tail = group.seen_by_all.start, group.seen_by_all.stop
    for ragged in (slice(0, head), slice(tail, sides[0].shape[1])):
        if ragged.start < ragged.stop:
            for each in sides:
                each[:, ragged].masked_fill_(group.unseen[:, ragged], 0)
    k, v = (each.transpose(1, 2) for each in sides)  # each [rows, kv_heads, cells, head_dim]
    grouped = q.unflatten(1, (k.shape[1], -1))  # [rows, kv_heads, group, head_dim]
    if not scoring.is_plain:
        return attend(grouped[:, :, :, None], k, v, group.mask[:, :, None], scoring).flatten(1, 3)
    scale = scoring.scale
    return F.scaled_dot_product_attention(grouped, k, v, attn_mask=group.mask, scale=scale).flatten(1, 2)


def _attend_context(q: Tensor, out: Tensor, pool: KVPool, row: ContextRow, scoring: Scoring) -> None:
    """Fill the row's part of `out` [num_tokens, heads, head_dim]."""
    sides = [each.flatten(0, 1) for each in gather_blocks(pool, row.blocks, q.dtype)]  # [cells, kv_heads, head_dim]
    for part in row.slices:
        k, v = (each[part.cells].transpose(0, 1) for each in sides)  # each [kv_heads, keys, head_dim]
        queries = q[part.tokens].transpose(0, 1)[None]  # [1, heads, queries, head_dim]
        mask = part.mask
        if scoring.is_plain:
            attended = F.scaled_dot_product_attention(
                queries, k[None], v[None], attn_mask=mask, is_causal=mask is None, scale=scoring.scale, enable_gqa=True
            )
        else:
            mask = queries.new_full((k.shape[1],) * 2, -torch.inf).triu(1) if mask is None else mask
            attended = attend(queries.unflatten(1, (len(k), -1)), k[None], v[None], mask, scoring).flatten(1, 2)
        out[part.tokens] = attended[0].transpose(0, 1)
