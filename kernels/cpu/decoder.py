"""NativeDecoder: runs a whole step of a Llama-shaped model in one native call (native/step.cpp)."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import CDLL, POINTER, byref, c_void_p, cast
from dataclasses import dataclass
from operator import is_
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.cpu.linear import PackedLinear
from kernels.cpu.lora import PackedAdapter
from kernels.cpu.screen import Screen
from kernels.cpu.structs import BatchStruct, KVLayout, LayerStruct, LoraLayerStruct, ModelStruct, ScreenStruct

MAX_HEAD_DIM = 1024
UNIT = 32  # tokens of a panel of the KV pool; block sizes must be multiples of it


class UnknownCell(IndexError):
    """A row names a token or a block that its slot does not have. `row` is its index in the step."""

    def __init__(self, row: int):
        super().__init__(f"row {row} of the step names a token or a block that its slot does not have")
        self.row = row


@dataclass(slots=True)
class NativeLayer:
    """The weights of a layer; those of norms are float32."""

    input_norm: Tensor  # [hidden]
    qkv: PackedLinear  # [(heads + 2 * kv_heads) * head_dim, hidden]
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None
    out: PackedLinear
    post_norm: Tensor  # [hidden]
    gate_up: PackedLinear  # [2 * intermediate, hidden]: gate, then up
    down: PackedLinear
    window: int | None  # tokens


@dataclass(slots=True)
class NativeShape:
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    norm_eps: float
    block_size: int  # tokens, a multiple of UNIT
    kv_bits: int  # bits of a number in the KV pool: 8 or 4; 0: the type of the computation
    sink_tokens: int = 0  # in layers with a window


class Given(NamedTuple):
    """Embeddings and positions of a step's tokens (all rows concatenated) that differ from those of their ids and places."""

    embedded: NDArray[np.uintp] | None  # address of a token's embedding, float32 [hidden]; 0: that of its id
    positions: NDArray[np.int64] | None  # by which queries and keys are rotated
    vectors: Tensor | None = None  # owns the memory that `embedded` points to


class NativeDecoder:
    """A model for native steps. Not thread-safe: steps share the object's scratch memory."""

    def __init__(
        self,
        library: CDLL,
        shape: NativeShape,
        embedding: Tensor,  # [vocab, hidden]; its type, float32 or bfloat16, is the one to compute in
        cos: Tensor,  # [max_seq_len, head_dim / 2] float32
        sin: Tensor,
        layers: Sequence[NativeLayer],
        norm: Tensor,  # [hidden] float32
        lm_head: PackedLinear,
        screen: Screen | None = None,  # int8 copy of lm_head; small greedy steps read it instead of most of lm_head
    ):
        if shape.head_dim > MAX_HEAD_DIM:
            raise ValueError(f"head_dim is {shape.head_dim}, the native kernels take up to {MAX_HEAD_DIM}")
        if shape.block_size % UNIT:
            raise ValueError(f"block_size is {shape.block_size}, the native kernels need a multiple of {UNIT}")
        self._library = library
        self._held = (embedding, cos, sin, list(layers), norm, lm_head, screen)
        self.vocab_size = embedding.shape[0]
        self.layout = KVLayout(
            shape.block_size, shape.kv_heads, shape.head_dim, shape.kv_bits, embedding.dtype.itemsize
        )
        self._layers = (LayerStruct * len(layers))(*map(_layer_struct, layers))
        self._model = ModelStruct(
            embedding.shape[1],
            shape.intermediate,
            len(layers),
            shape.heads,
            self.vocab_size,
            cos.shape[0],
            shape.sink_tokens,
            self.layout,
            shape.norm_eps,
            embedding.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            norm.data_ptr(),
            lm_head.struct,
            ScreenStruct() if screen is None else screen.struct,
            self._layers,
        )
        self._batch = BatchStruct()
        self._placed: tuple[object, ...] = ()
        self._rows = np.empty((0, 4), dtype=np.int32)
        self._greedy = np.empty(0, dtype=np.int64)
        self._workspace = library.everbatch_new_workspace()

    @property
    def kv_block_bytes(self) -> int:
        """Bytes of one layer's block."""
        return int(self._library.everbatch_kv_block_bytes(byref(self.layout)))

    def step(
        self,
        rows: NDArray[
            np.int32
        ],  # [num_rows, 4]: slot, computed tokens, tokens to run, how many of its last tokens yield logits
        token_ids: Tensor,  # [slots, max_seq_len] int64
        block_tables: NDArray[np.int32],  # [slots, max_blocks]
        pools: Sequence[Tensor],  # one a layer: [num_blocks, kv_block_bytes] bytes, of any dtype
        wants_logits: bool,
        adapters: Sequence[PackedAdapter | None] = (),  # one for each row; empty: no row has an adapter
        hidden: Tensor | None = None,  # where hidden states are wanted
        given: Given | None = None,
    ) -> tuple[NDArray[np.int64], Tensor | None]:
        """Run rows one after the other as one flat batch, and write their KV to `pools`.

        Returns, for each token that yields logits, the most likely next token, and if wanted the logits [those tokens, vocab]
        float32. `hidden` [those tokens, hidden size] float32 is filled with what the last norm makes of them. Raises
        UnknownCell, before anything is written, for a token or a block that does not exist.
        """
        num_logits = sum(rows[:, 3].tolist())
        logits = torch.empty(num_logits, self.vocab_size) if wants_logits else None
        batch = self._batch
        self._place(token_ids, block_tables, pools)
        self._make_room(len(rows), num_logits)
        self._rows[: len(rows)] = rows
        batch.num_rows = len(rows)
        batch.logits = None if logits is None else logits.data_ptr()
        batch.hidden = None if hidden is None else hidden.data_ptr()
        batch.threads = torch.get_num_threads()
        held = self._place_adapters(adapters)
        batch.embedded = None if given is None or given.embedded is None else given.embedded.ctypes.data
        batch.positions = None if given is None or given.positions is None else given.positions.ctypes.data
        bad = self._library.everbatch_step(byref(self._model), byref(batch), self._workspace)
        del held
        if bad >= 0:
            raise UnknownCell(bad)
        return self._greedy[:num_logits].copy(), logits

    def _make_room(self, num_rows: int, num_logits: int) -> None:
        """Make the arrays that C reads rows from and writes tokens to. They are kept, because numpy's address lookup is slow."""
        if num_rows > len(self._rows):
            self._rows = np.empty((2 * num_rows, 4), dtype=np.int32)
            self._batch.rows = self._rows.ctypes.data
        if num_logits > len(self._greedy):
            self._greedy = np.empty(2 * num_logits, dtype=np.int64)
            self._batch.greedy = self._greedy.ctypes.data

    def _place_adapters(self, adapters: Sequence[PackedAdapter | None]) -> object:
        """Tell C the rows' adapters; what is returned has to live until the step is over."""
        batch = self._batch
        used = list({id(each): each for each in adapters if each is not None}.values())
        if not used:
            batch.adapter_of = None
            return None
        index = {id(each): at for at, each in enumerate(used)}
        of_rows = np.array([-1 if each is None else index[id(each)] for each in adapters], dtype=np.int32)
        tables = (POINTER(LoraLayerStruct) * len(used))(
            *(cast(each.structs, POINTER(LoraLayerStruct)) for each in used)
        )
        batch.adapters, batch.adapter_of = tables, of_rows.ctypes.data
        batch.max_rank = max(each.max_rank for each in used)
        return of_rows, tables

    def _place(self, token_ids: Tensor, block_tables: NDArray[np.int32], pools: Sequence[Tensor]) -> None:
        """Pass the addresses to C, unless the objects are those of the last step: looking up addresses is slow."""
        placed = (token_ids, block_tables, *pools)
        if len(placed) == len(self._placed) and all(map(is_, placed, self._placed)):
            return
        self._placed = placed
        batch = self._batch
        batch.token_ids = token_ids.data_ptr()
        batch.block_tables, batch.max_blocks = block_tables.ctypes.data, block_tables.shape[1]
        batch.num_blocks = pools[0].shape[0]
        batch.pools = (c_void_p * len(pools))(*(pool.data_ptr() for pool in pools))

    def __del__(self) -> None:
        if getattr(self, "_workspace", None):
            self._library.everbatch_free_workspace(self._workspace)
            self._workspace = None


def _layer_struct(layer: NativeLayer) -> LayerStruct:
    return LayerStruct(
        layer.qkv.struct,
        layer.out.struct,
        layer.gate_up.struct,
        layer.down.struct,
        layer.input_norm.data_ptr(),
        layer.post_norm.data_ptr(),
        None if layer.q_norm is None else layer.q_norm.data_ptr(),
        None if layer.k_norm is None else layer.k_norm.data_ptr(),
        layer.window or 0,
    )
