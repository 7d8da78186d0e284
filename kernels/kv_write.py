"""Write the keys and values of a flat batch into the paged KV pool.

    pool[cell // block_size, cell % block_size, 0] = key         cell = physical position of the token
    pool[cell // block_size, cell % block_size, 1] = value

The pool of one layer is [num_blocks, block_size, 2, kv_heads, head_dim]: a token's key and value lie together, so that
a block is one contiguous piece to copy, and a gather by block table yields tokens in order. This is decided here.
"""

from __future__ import annotations

import torch
from torch import Tensor

# (num_tokens, block_size, kv_heads, head_dim, num_blocks)
CASES = [(1, 4, 2, 8, 3), (5, 16, 1, 32, 4), (40, 2, 4, 16, 64)]


def reference(pool: Tensor, key: Tensor, value: Tensor, cells: Tensor) -> None:
    """key, value [num_tokens, kv_heads, head_dim]; cells [num_tokens] int64, all different. Writes `pool`."""
    pool.view(-1, *pool.shape[2:]).index_copy_(0, cells, torch.stack((key, value), dim=1))


def kv_write(pool: Tensor, key: Tensor, value: Tensor, cells: Tensor) -> None:
    reference(pool, key, value, cells)
