"""Attention of a flat mixed batch over paged KV: context rows (many queries) and generation rows (one) in one call.

A row's queries are its newest positions, so the causal mask is aligned at the bottom right:

    keys      0 .................. length                 query i of n stands at position length - n + i
    queries                [ n ]                          and sees keys in (position - window, position]

    out = softmax(q k^T / sqrt(head_dim) + mask) v        query heads of one kv head share its keys (GQA)

Physical cells are reached only through block tables. Entries that no query sees are never read: neither cells beyond
`length`, nor blocks that have left the window (-1 in the table). Pool layout: kernels/kv_write.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """Where the rows of a flat batch find their queries and keys. Host numbers steer, device tensors index.

    Generation rows come first in the flat batch, one token each; then the context rows.
    """

    generation_tables: Tensor  # [num_generation, max_blocks] int64 block ids, -1 beyond the end
    generation_lengths: Tensor  # [num_generation] int64 keys of each row
    max_generation_length: int
    context_tables: list[Tensor]  # one [num_blocks] int64 for each context row
    context_lengths: list[tuple[int, int]]  # (queries, keys) of each context row

    @property
    def num_generation(self) -> int:
        return self.generation_tables.shape[0]


# (kv_heads, group, head_dim, block_size, window, [(queries, keys), ...])
CASES = [
    (1, 1, 8, 4, None, [(1, 1)]),
    (2, 3, 16, 4, None, [(1, 5), (1, 4), (1, 17)]),
    (2, 2, 8, 2, None, [(1, 3), (4, 4), (3, 9)]),
    (4, 1, 32, 16, None, [(20, 33), (1, 16), (1, 17), (16, 16)]),
    (1, 7, 24, 4, 6, [(1, 20), (1, 3), (5, 21), (9, 9)]),
    (2, 1, 16, 8, 8, [(1, 8), (1, 9), (1, 64), (8, 40)]),
]


def reference(q: Tensor, pool: Tensor, rows: AttentionRows, window: int | None) -> Tensor:
    """q [num_tokens, heads, head_dim], pool [blocks, block_size, 2, kv_heads, head_dim] -> [num_tokens, heads, head_dim]."""
    out = torch.empty_like(q)
    start = rows.num_generation
    if start:
        out[:start] = _generation(q[:start], pool, rows, window)
    for table, (num_queries, num_keys) in zip(rows.context_tables, rows.context_lengths, strict=True):
        out[start : start + num_queries] = _context(q[start : start + num_queries], pool, table, num_keys, window)
        start += num_queries
    return out


def paged_attention(q: Tensor, pool: Tensor, rows: AttentionRows, window: int | None) -> Tensor:
    return reference(q, pool, rows, window)


def _generation(q: Tensor, pool: Tensor, rows: AttentionRows, window: int | None) -> Tensor:
    """One query a row, batched: gather the blocks in reach, mask what is beyond the end or before the window."""
    block_size, kv_heads, head_dim = pool.shape[1], pool.shape[3], pool.shape[4]
    batch = q.shape[0]
    tables, lengths = rows.generation_tables, rows.generation_lengths
    first_key = torch.zeros_like(lengths) if window is None else (lengths - window).clamp_(min=0)
    num_blocks = -(-rows.max_generation_length // block_size)
    if window is None:
        first_block, in_reach = torch.zeros_like(lengths), tables[:, :num_blocks]
    else:
        first_block = first_key // block_size
        columns = first_block[:, None] + torch.arange(min(num_blocks, window // block_size + 2), device=q.device)
        in_reach = tables.gather(1, columns.clamp_(max=tables.shape[1] - 1))
    keys_and_values = pool[in_reach.clamp(min=0)].flatten(1, 2)  # [batch, keys, 2, kv_heads, head_dim]
    positions = first_block[:, None] * block_size + torch.arange(keys_and_values.shape[1], device=q.device)
    visible = (positions < lengths[:, None]) & (positions >= first_key[:, None])  # [batch, keys]
    keys_and_values.masked_fill_(~visible[:, :, None, None, None], 0)  # 0 * NaN of a cell never written would be NaN
    k, v = keys_and_values.transpose(1, 3).unbind(2)  # each [batch, kv_heads, keys, head_dim]
    grouped = q.view(batch, kv_heads, -1, head_dim)  # the query heads of a kv head become rows of one product
    out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=visible[:, None, None])
    return out.reshape(q.shape)


def _context(q: Tensor, pool: Tensor, table: Tensor, num_keys: int, window: int | None) -> Tensor:
    """Many queries of one row over its keys."""
    block_size, kv_heads, head_dim = pool.shape[1], pool.shape[3], pool.shape[4]
    num_queries = q.shape[0]
    first_query = num_keys - num_queries
    first_block = 0 if window is None else max(0, first_query - window + 1) // block_size
    first_key = first_block * block_size
    last_block = -(-num_keys // block_size)
    keys_and_values = pool[table[first_block:last_block]].flatten(0, 1)[: num_keys - first_key]
    k, v = keys_and_values.permute(1, 2, 0, 3).unbind(0)  # each [kv_heads, keys, head_dim]
    if window is not None:  # cells of the first block that no query sees may never have been written
        v = v.clone()
        v[:, : max(0, first_query - window + 1 - first_key)] = 0
    mask = None
    if num_queries < num_keys - first_key or window is not None:
        queries = torch.arange(first_query, num_keys, device=q.device)[:, None]
        keys = torch.arange(first_key, num_keys, device=q.device)
        mask = (keys <= queries) if window is None else (keys <= queries) & (keys > queries - window)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k[None], v[None], attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )
    return out[0].transpose(0, 1)
