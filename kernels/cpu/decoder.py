"""NativeDecoder: runs a whole step of a model in one native call (native/step.cpp)."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import CDLL, POINTER, byref, c_void_p, cast, pointer
from dataclasses import dataclass
from operator import is_
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.common.kv_format import KV_FORMATS, KVFormat
from kernels.cpu.given import Given, Passing
from kernels.cpu.latent import NativeLatent, latent_struct
from kernels.cpu.linear import PackedLinear
from kernels.cpu.lora import PackedAdapter
from kernels.cpu.mixture import NativeExperts, mixture_struct
from kernels.cpu.ranks import LostRank, RanksMemory
from kernels.cpu.recurrence import NativeRecurrence, NativeStates, StatePlaces, recurrence_struct
from kernels.cpu.screen import Screen
from kernels.cpu.structs import (
    ACTIVATIONS,
    NORMS,
    BatchStruct,
    FormStruct,
    KVLayout,
    LatentStruct,
    LayerStruct,
    LinearStruct,
    LoraLayerStruct,
    MixtureStruct,
    ModelStruct,
    NormStruct,
    RecurrenceStruct,
    ScreenStruct,
)

MAX_HEAD_DIM = 1024
UNIT = 32  # tokens of a panel of the KV pool; block sizes must be multiples of it


class UnknownCell(IndexError):
    """A row names a token, a block or a state that its slot does not have. `row` is its index in the step."""

    def __init__(self, row: int):
        super().__init__(f"row {row} of the step names a token, a block or a state that its slot does not have")
        self.row = row


class NativeNorm(NamedTuple):
    """The weights of a norm, float32."""

    weight: Tensor  # [size]
    bias: Tensor | None = None  # [size]


@dataclass(slots=True)
class NativeLayer:
    """The weights of a layer. Where it has no norm for the input of a half, that half reads the hidden states themselves."""

    # [(heads + 2 * kv_heads) * head_dim, hidden], or NativeLatent's; None: the layer has no attention
    qkv: PackedLinear | None
    out: PackedLinear | None  # None: it has no recurrence either
    gate_up: PackedLinear | None  # [2 * intermediate, hidden]: gate, then up; without a gate [intermediate, hidden]
    down: PackedLinear | None  # None, like gate_up: the layer has experts, or no MLP
    attention_norm: NativeNorm | None  # [hidden]
    mlp_norm: NativeNorm | None
    attention_out_norm: NativeNorm | None = (
        None  # norm of the output of attention, before it is added to the hidden states
    )
    mlp_out_norm: NativeNorm | None = None
    q_norm: NativeNorm | None = None  # [head_dim]; with NativeForm.norms_rows [heads * head_dim]
    k_norm: NativeNorm | None = None
    rotary: tuple[Tensor, Tensor] | None = None  # cos and sin, float32 [max_seq_len, rotary_dim / 2]
    sinks: Tensor | None = None  # float32 [heads]
    key_shift: Tensor | None = None  # float32 [kv_heads, head_dim]: kernels/common/kv_rotation.py
    window: int | None = None  # tokens
    experts: NativeExperts | None = None
    recurrence: NativeRecurrence | None = None  # in the place of attention; `out` reads what it yields
    latent: NativeLatent | None = None


@dataclass(slots=True)
class NativeShape:
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    block_size: int  # tokens, a multiple of UNIT
    kv_format: KVFormat
    max_seq_len: int
    sink_tokens: int = 0  # in layers with a window
    widest_window: int = 0  # tokens that some layer of the whole model sees besides; 0: all


@dataclass(slots=True)
class NativeForm:
    """Settings that all layers share; backend/architectures/description.py says how a model computes with them."""

    norm_eps: float
    norm: str = "rms"  # an entry of NORMS
    norms_rows: bool = False  # q_norm and k_norm are of all heads of a token together
    activation: str = "silu"  # an entry of ACTIVATIONS
    is_gated: bool = True
    is_parallel: bool = False
    is_interleaved: bool = False  # rotary dimensions 2i and 2i + 1 belong together
    attention_scale: float | None = None  # None: 1 / sqrt(head_dim)
    attention_softcap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    query_scales: Tensor | None = None  # float32 [max_seq_len]
    gates_attention: bool = False  # qkv has gates [heads * head_dim] behind; attention is multiplied with their sigmoid


class NativeDecoder:
    """A model for native steps. Not thread-safe: steps share the object's scratch memory."""

    def __init__(
        self,
        library: CDLL,
        shape: NativeShape,
        form: NativeForm,
        embedding: Tensor
        | PackedLinear,  # [vocab, hidden], of `dtype` or in super-blocks; no rows where none is embedded
        layers: Sequence[NativeLayer],
        norm: NativeNorm,  # [hidden]
        lm_head: PackedLinear | None,  # None where no step has logits
        screen: Screen | None = None,  # int8 copy of lm_head; small greedy steps read it instead of most of lm_head
        ranks: RanksMemory
        | None = None,  # where several ranks run the model; the other arguments are of this one's part
        vocab_size: int | None = None,  # None: the embedding's rows
        dtype: torch.dtype | None = None,  # float32 or bfloat16, to compute in; None: the embedding's
    ):
        if dtype is None:
            assert isinstance(embedding, Tensor), (
                "an embedding in super-blocks is none of the types that are computed in"
            )
            dtype = embedding.dtype
        layout = kv_layout(shape.block_size, shape.kv_heads, shape.head_dim, shape.kv_format, dtype)
        for name in ("logit_scale", "attention_scale"):
            if (scale := getattr(form, name)) is not None and scale <= 0:
                raise ValueError(f"{name} is {scale}, the native kernels take numbers above 0")
        self._library = library
        self._held = (form, embedding, list(layers), norm, lm_head, screen)
        self._ranks = ranks
        self.vocab_size, self.layout = vocab_size or embedding.shape[0], layout
        mixtures = [
            None
            if layer.experts is None
            else mixture_struct(layer.experts, ACTIVATIONS[form.activation], form.is_gated)
            for layer in layers
        ]
        self._mixtures = mixtures
        recurrences = [layer.recurrence for layer in layers]
        self._recurrences = [None if each is None else recurrence_struct(each) for each in recurrences]
        self._latents = [None if layer.latent is None else latent_struct(layer.latent) for layer in layers]
        parts = mixtures, self._recurrences, self._latents
        self._layers = (LayerStruct * len(layers))(*map(_layer_struct, layers, *parts))
        if form.is_parallel and any(recurrences):
            raise ValueError("the native kernels have no recurrent layers whose halves are parallel")
        if len(sizes := {layer.out.shape for layer in layers if layer.recurrence and layer.out}) > 1:
            raise ValueError(f"the recurrent layers of a model differ: their results have the sizes {sorted(sizes)}")
        self._states = StatePlaces([0 if each is None else each.state_floats for each in recurrences])
        self._model = ModelStruct(
            embedding.shape[1],
            shape.intermediate,
            len(layers),
            shape.heads,
            self.vocab_size,
            shape.max_seq_len,
            shape.sink_tokens,
            shape.widest_window,
            layout,
            _form_struct(form, shape.head_dim),
            None if isinstance(embedding, PackedLinear) else embedding.data_ptr(),
            embedding.struct if isinstance(embedding, PackedLinear) else LinearStruct(),
            _norm_struct(norm),
            LinearStruct() if lm_head is None else lm_head.struct,
            ScreenStruct() if screen is None else screen.struct,
            self._layers,
            None if ranks is None else ranks.struct,
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
        pools: Sequence[
            Tensor | None
        ],  # one a layer: [num_blocks, kv_block_bytes] bytes, of any dtype; None: without attention
        wants_logits: bool,
        adapters: Sequence[PackedAdapter | None] = (),  # one for each row; empty: no row has an adapter
        hidden: Tensor | None = None,  # where hidden states are wanted
        given: Given | None = None,
        passing: Passing = Passing(),  # noqa: B008 (immutable)
        states: NativeStates | None = None,  # where layers are recurrent
    ) -> tuple[NDArray[np.int64], Tensor | None]:
        """Run rows one after the other as one flat batch, and write their KV to `pools`.

        Returns, for each token that yields logits, the most likely next token, and if wanted the logits [those tokens, vocab]
        float32. `hidden` [those tokens, hidden size] float32 is filled with what the last norm makes of them. Raises
        UnknownCell, before anything is written, for a token, block or state that does not exist, and LostRank when another
        rank did not come along; then the pools hold wrong numbers. Of several ranks rank 0 alone gets tokens and logits. Where
        hidden states leave, there are none.
        """
        ranks, num_tokens = self._ranks, sum(rows[:, 2].tolist())
        num_logits = 0 if passing.leaving is not None else sum(rows[:, 3].tolist())
        if ranks is not None and num_tokens > ranks.shape.max_tokens:
            raise ValueError(f"the step has {num_tokens} tokens, the ranks share room for {ranks.shape.max_tokens}")
        samples = ranks is None or ranks.samples
        logits = torch.empty(num_logits, self.vocab_size) if wants_logits and samples else None
        batch = self._batch
        self._place(token_ids, block_tables, pools)
        self._place_rows(rows, num_logits, given)
        of_states = self._states.place(batch, states)
        batch.logits = None if logits is None else logits.data_ptr()
        if wants_logits and ranks is not None and not samples:
            batch.logits = ranks.address  # says that they are wanted; they go to their place in the shared memory
        batch.hidden = None if hidden is None else hidden.data_ptr()
        batch.entering, batch.leaving = map(_address, passing)
        batch.threads = torch.get_num_threads()
        held = self._place_adapters(adapters)
        bad = self._library.everbatch_step(byref(self._model), byref(batch), self._workspace)
        del held, of_states
        if bad >= 0:
            raise UnknownCell(bad)
        if bad < -1:
            raise LostRank(-2 - bad)
        return self._greedy[:num_logits].copy(), logits

    def check(
        self,
        rows: NDArray[np.int32],
        token_ids: Tensor,
        block_tables: NDArray[np.int32],
        pools: Sequence[Tensor | None],
        given: Given | None = None,
        states: NativeStates | None = None,
    ) -> None:
        """Raise UnknownCell where `step` would for these arguments. Nothing is run."""
        self._place(token_ids, block_tables, pools)
        self._place_rows(rows, 0, given)
        held = self._states.place(self._batch, states)
        bad = self._library.everbatch_check(byref(self._model), byref(self._batch))
        del held
        if bad >= 0:
            raise UnknownCell(bad)

    def _place_rows(self, rows: NDArray[np.int32], num_logits: int, given: Given | None) -> None:
        """Tell C the rows, and what they bring. The caller keeps `given` until the step is over."""
        batch = self._batch
        self._make_room(len(rows), num_logits)
        self._rows[: len(rows)] = rows
        batch.num_rows = len(rows)
        batch.embedded = None if given is None or given.embedded is None else given.embedded.ctypes.data
        batch.positions = None if given is None or given.positions is None else given.positions.ctypes.data
        added = None if given is None else given.added
        batch.added, batch.added_layers = (None, 0) if added is None else (added.ctypes.data, len(added))
        batch.cos, batch.sin = (None, None) if given is None or given.tables is None else map(_address, given.tables)
        batch.ends = None if given is None or given.ends is None else given.ends.ctypes.data

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

    def _place(self, token_ids: Tensor, block_tables: NDArray[np.int32], pools: Sequence[Tensor | None]) -> None:
        """Pass the addresses to C, unless the objects are those of the last step: looking up addresses is slow."""
        placed = (token_ids, block_tables, *pools)
        if len(placed) == len(self._placed) and all(map(is_, placed, self._placed)):
            return
        self._placed = placed
        batch = self._batch
        batch.token_ids = token_ids.data_ptr()
        batch.block_tables, batch.max_blocks = block_tables.ctypes.data, block_tables.shape[1]
        batch.num_blocks = next((pool.shape[0] for pool in pools if pool is not None), 0)
        batch.pools = (c_void_p * len(pools))(*map(_address, pools))

    def __del__(self) -> None:
        if getattr(self, "_workspace", None):
            self._library.everbatch_free_workspace(self._workspace)
            self._workspace = None


def kv_layout(block_size: int, kv_heads: int, head_dim: int, format: KVFormat, dtype: torch.dtype) -> KVLayout:
    """The layout of a KV pool for a computation in `dtype`, float32 or bfloat16. Raises ValueError for one that there is not."""
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim is {head_dim}, the native kernels take up to {MAX_HEAD_DIM}")
    if block_size % UNIT:
        raise ValueError(f"block_size is {block_size}, the native kernels need a multiple of {UNIT}")
    if format not in KV_FORMATS.values():
        raise ValueError(
            f"the native kernels have no KV of {format.key_bits} bits a key and {format.value_bits} a value"
        )
    return KVLayout(block_size, kv_heads, head_dim, format.key_bits, dtype.itemsize, format.value_bits)


def default_scale(head_dim: int) -> float:
    """1 / sqrt(head_dim), each operation rounded to float32."""
    return float(np.float32(1) / np.sqrt(np.float32(head_dim)))


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _norm_struct(norm: NativeNorm | None) -> NormStruct:
    return NormStruct() if norm is None else NormStruct(*map(_address, norm))


def _form_struct(form: NativeForm, head_dim: int) -> FormStruct:
    return FormStruct(
        NORMS[form.norm],
        ACTIVATIONS[form.activation],
        form.is_gated,
        form.is_parallel,
        form.norms_rows,
        form.is_interleaved,
        form.norm_eps,
        default_scale(head_dim) if form.attention_scale is None else form.attention_scale,
        form.attention_softcap,
        form.embedding_scale,
        form.residual_scale,
        form.logit_scale,
        form.logit_softcap,
        _address(form.query_scales),
        form.gates_attention,
    )


def _layer_struct(
    layer: NativeLayer,
    mixture: MixtureStruct | None,
    recurrence: RecurrenceStruct | None,
    latent: LatentStruct | None,
) -> LayerStruct:
    cos, sin = (None, None) if layer.rotary is None else layer.rotary
    return LayerStruct(
        LinearStruct() if layer.qkv is None else layer.qkv.struct,
        LinearStruct() if layer.out is None else layer.out.struct,
        LinearStruct() if layer.gate_up is None else layer.gate_up.struct,
        LinearStruct() if layer.down is None else layer.down.struct,
        _norm_struct(layer.attention_norm),
        _norm_struct(layer.mlp_norm),
        _norm_struct(layer.attention_out_norm),
        _norm_struct(layer.mlp_out_norm),
        _norm_struct(layer.q_norm),
        _norm_struct(layer.k_norm),
        _address(cos),
        _address(sin),
        0 if cos is None else 2 * cos.shape[1],
        _address(layer.sinks),
        _address(layer.key_shift),
        layer.window or 0,
        None if mixture is None else pointer(mixture),
        None if recurrence is None else pointer(recurrence),
        None if latent is None else pointer(latent),
    )
