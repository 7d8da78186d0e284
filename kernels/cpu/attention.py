"""NativeAttention: one layer's attention over the native KV pool, for models whose other parts are run by other code."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import CDLL, byref, c_void_p

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.common.kv_format import PLAIN, KVFormat
from kernels.cpu.decoder import UnknownCell, default_scale, kv_layout
from kernels.cpu.structs import AttentionStruct, BatchStruct, ScoringStruct


class Scratch:
    """Memory of the kernels, which layers that run one after the other may share."""

    def __init__(self, library: CDLL):
        self._library = library
        self.address = library.everbatch_new_workspace()

    def __del__(self) -> None:
        if getattr(self, "address", None):
            self._library.everbatch_free_workspace(self.address)
            self.address = None


class StepRows:
    """The rows of one step and their block tables, as every layer's attention reads them."""

    def __init__(
        self,
        rows: NDArray[np.int32],  # [num_rows, 4]: slot, computed tokens, tokens to run; the last number is not read
        block_tables: NDArray[np.int32],  # [slots, max_blocks]
        pools: Sequence[Tensor],  # one a layer: [num_blocks, kv_block_bytes] bytes, of any dtype
        threads: int,
    ) -> None:
        rows, block_tables = (np.ascontiguousarray(each, dtype=np.int32) for each in (rows, block_tables))
        self._held = rows, block_tables
        self.tokens = int(rows[:, 2].sum())
        self.pools = pools
        self._batch = BatchStruct(rows=rows.ctypes.data, num_rows=len(rows), threads=threads)
        self._batch.block_tables, self._batch.max_blocks = block_tables.ctypes.data, block_tables.shape[1]
        self._batch.num_blocks = pools[0].shape[0]

    def of_layer(self, index: int) -> BatchStruct:
        """The batch, with the pool of a layer, until the next call."""
        self._batch.pools = (c_void_p * 1)(self.pools[index].data_ptr())
        return self._batch


class NativeAttention:
    """Not thread-safe, nor are two that share their scratch memory."""

    def __init__(
        self,
        library: CDLL,
        scratch: Scratch,
        heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,  # float32 or bfloat16: of queries, keys, values and results
        block_size: int,  # tokens
        kv_format: KVFormat = PLAIN,
        window: int | None = None,  # tokens that one sees, itself included; None = all
        sink_tokens: int = 0,  # the first tokens of a sequence, seen from outside of a window too
        scale: float | None = None,  # factor of the products of queries and keys; None: 1 / sqrt(head_dim)
        softcap: float = 0.0,  # a score s becomes softcap * tanh(s / softcap); 0: it stays
        sinks: Tensor | None = None,  # [heads]: one more score of each head's softmax, whose weight no value gets
    ):
        """Raises ValueError for sizes that the kernels do not take."""
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"the type is {dtype}, the native kernels take torch.float32 and torch.bfloat16")
        if scale is not None and scale <= 0:
            raise ValueError(f"scale is {scale}, the native kernels take numbers above 0")
        if heads % kv_heads:
            raise ValueError(f"{heads} heads cannot share {kv_heads} kv heads evenly")
        self._library, self._scratch, self._dtype = library, scratch, dtype
        self.q_shape, self._kv_shape = (heads, head_dim), (kv_heads, head_dim)
        self._sinks = None if sinks is None else sinks.float().contiguous()
        scoring = ScoringStruct(
            default_scale(head_dim) if scale is None else scale,
            softcap,
            None if self._sinks is None else self._sinks.data_ptr(),
        )
        layout = kv_layout(block_size, kv_heads, head_dim, kv_format, dtype)
        self.struct = AttentionStruct(heads, layout, scoring, window or 0, sink_tokens)
        self.kv_block_bytes = int(library.everbatch_kv_block_bytes(byref(layout)))  # bytes of this layer's block

    @property
    def kv_heads(self) -> int:
        return self._kv_shape[0]

    def __call__(
        self,
        q: Tensor,  # [tokens, heads, head_dim]
        k: Tensor,  # [tokens, kv_heads, head_dim]
        v: Tensor,  # like k
        rows: StepRows,
        layer: int,  # which of the pools is read and written
    ) -> Tensor:
        """Write the keys and values of a flat batch, all rows' tokens one after the other, to the pool, and attend.

        q and k are normed and rotated. Returns what is like q. A token's result depends on its own sequence alone, bit for
        bit. Raises UnknownCell, before anything is written, for a block that does not exist, and ValueError for tensors of
        other shapes or types.
        """
        for name, tensor, shape in (("q", q, self.q_shape), ("k", k, self._kv_shape), ("v", v, self._kv_shape)):
            if tensor.shape != (rows.tokens, *shape) or tensor.dtype != self._dtype:
                raise ValueError(
                    f"{name} is {tensor.dtype} {[*tensor.shape]}, the rows need {self._dtype} {[rows.tokens, *shape]}"
                )
        pool = rows.pools[layer]
        if pool[0].nbytes != self.kv_block_bytes or not pool.is_contiguous():
            raise ValueError(
                f"a block of the pool has {pool[0].nbytes} bytes, it needs {self.kv_block_bytes} side by side"
            )
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out = torch.empty_like(q)
        addresses = (tensor.data_ptr() for tensor in (q, k, v, out))
        batch = rows.of_layer(layer)
        bad = self._library.everbatch_attend(byref(self.struct), byref(batch), *addresses, self._scratch.address)
        if bad >= 0:
            raise UnknownCell(bad)
        return out
