"""NativeTier: the model's whole step as one call of the native CPU kernels."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from ctypes import CDLL
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backend.api.errors import ConfigError
from backend.architectures.description import Block
from backend.core.step import Row
from backend.layers.attention import AttentionWeights
from backend.layers.experts import ExpertsWeights
from backend.layers.linear import Linear, QuantizedWeight, Weight
from backend.layers.norm import NormWeights
from backend.layers.rotary import RotaryTables
from backend.models.decoder import Decoder
from backend.models.layer_weights import LayerWeights
from backend.worker.adapters import DeviceAdapters
from backend.worker.input_batch import InputBatch
from backend.worker.micro_batches import MicroBatch, micro_batches
from backend.worker.prompt_inputs import Embedded
from backend.worker.state_storage import StateStorage
from backend.worker.tier import KVBlock
from backend.worker.token_adapters import packed_adapter
from kernels import w4a16
from kernels.common.kv_format import PLAIN, KVFormat
from kernels.common.rounding import ROUNDED, Rounded, in_blocks
from kernels.common.super_blocks import SuperBlocks
from kernels.cpu.decoder import (
    Given,
    NativeDecoder,
    NativeForm,
    NativeLayer,
    NativeNorm,
    NativeShape,
    Passing,
    UnknownCell,
)
from kernels.cpu.linear import PackedLinear
from kernels.cpu.lora import PackedAdapter
from kernels.cpu.memory import Arena
from kernels.cpu.mixture import NativeExperts
from kernels.cpu.ranks import RanksMemory
from kernels.cpu.screen import Screen
from kernels.int8_rows import GROUP
from kernels.w4a8 import Weight4A8
from kernels.w4a16 import Weight4

log = logging.getLogger("everbatch.worker")
T = TypeVar("T", np.uintp, np.int64)


class PackLinears:
    """A MakeLinear (backend/layers/linear.py) that packs all weights for the native kernels into one arena."""

    def __init__(self, library: CDLL) -> None:
        self._library = library
        self._arena = Arena()
        self._keeps_scales = True

    def __call__(self, weight: Weight, bias: Tensor | None) -> PackedLinear:
        if isinstance(weight, SuperBlocks):
            return PackedLinear.of_super_blocks(self._library, self._arena, weight, bias)
        if isinstance(weight, Weight4 | Weight4A8):
            q, scales, zeros, group = _in_four_bits(weight)
            self._check_scales(scales)
            return PackedLinear.of_four_bits(self._library, self._arena, q, scales, zeros, group, bias)
        if not isinstance(weight, QuantizedWeight):
            if weight.dtype not in (torch.float32, torch.bfloat16):
                raise ConfigError(
                    f"weights of {weight.dtype} cannot be packed for the native kernels; use --set model.dtype=bfloat16"
                )
            return PackedLinear.of_floats(self._library, self._arena, weight, bias)
        if weight.format in ROUNDED:
            blocks = in_blocks(Rounded(weight.q, weight.scale, weight.minimum), weight.format)
            return PackedLinear.of_super_blocks(self._library, self._arena, blocks, bias, weight.q.shape[1])
        self._check_scales(weight.scale)
        is_w8a8 = weight.format == "w8a8"
        return PackedLinear.of_int8(self._library, self._arena, *_regrouped(weight), bias, is_w8a8, weight.is_rotated)

    def _check_scales(self, scales: Tensor) -> None:
        """Say once that scales are rounded."""
        if self._keeps_scales and not torch.equal(scales.bfloat16().float(), scales):
            self._keeps_scales = False
            log.info(_ROUNDED)


_ROUNDED = (
    "the native kernels hold the scales of quantised weights as bfloat16: this checkpoint's are rounded, each by at most 0.4 %; "
    "--set model.kernels=torch keeps them"
)


# An int8 screen of lm_head is worth its memory when lm_head is at least this share of the bytes that a step reads.
MIN_SHARE = 1 / 32


def make_screen(model: Decoder, library: CDLL) -> Screen | None:
    """The int8 screen of lm_head, where it is worth its memory."""
    if model.lm_head is None:
        return None
    lm_head = _packed(model.lm_head)
    if not Screen.fits(lm_head) or lm_head.num_bytes < MIN_SHARE * model.num_read_bytes:
        return None
    screen = Screen(library, lm_head)
    log.debug("greedy rows read an int8 screen of lm_head first: %.0f MB more", screen.num_bytes / 1e6)
    return screen


class NativeRows(NamedTuple):
    """The rows of a call of the native step, and what they bring besides the content of their slots."""

    numbers: NDArray[np.int32]  # as InputBatch.row_numbers makes them
    adapters: Sequence[str] = ()  # the content of each row's LoRA adapter, empty for none; no entries: no row has one
    positions: Tensor | None = None  # int64, one for each token of all rows
    embedded: Embedded | None = None


class NativeCall(NamedTuple):
    """A call of the native step."""

    rows: NativeRows
    adapters: Sequence[PackedAdapter | None]  # one for each row; no entries: no row has one
    token_ids: Tensor  # int64 [slots, max_seq_len]
    block_tables: NDArray[np.int32]  # [slots, max_blocks]
    pools: Sequence[Tensor]  # one for each layer
    wants_logits: bool
    hidden: Tensor | None = None  # where what the last norm makes of the tokens with logits is wanted


class NativeTier:
    name = "native"

    def __init__(
        self,
        model: Decoder,
        library: CDLL,
        block_size: int,
        kv_format: KVFormat = PLAIN,
        screen: Screen | None = None,
        ranks: RanksMemory | None = None,
    ) -> None:
        """The linear layers of `model` must have been made by PackLinears. `screen`: of lm_head, where there is one already.
        ranks: what they share, where there are several.
        """
        config = model.config
        self.block_size = block_size
        shape = NativeShape(
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.intermediate_size,
            block_size,
            kv_format,
            model.max_seq_len,
            config.sink_tokens,
            config.sliding_window or 0,
        )
        of_layers = zip(model.layers, config.held_settings, model.rotary, strict=True)
        layers = [_native_layer(config.block, layer, settings.window, rotary) for layer, settings, rotary in of_layers]
        lm_head = None if model.lm_head is None else _packed(model.lm_head)
        self.screen = screen or make_screen(model, library)
        self._decoder = NativeDecoder(
            *(library, shape, _native_form(config.block, model.query_scales), _table(model.embedding), layers),
            *(_native_norm(model.norm), lm_head, self.screen, ranks),
            vocab_size=config.vocab_size,
            dtype=model.dtype,
        )
        self._ranks = ranks
        self._dtype = torch.uint8 if kv_format.is_quantised else model.dtype
        self._hidden_size, self._outputs = config.hidden_size, model.outputs
        self.adapters: DeviceAdapters[PackedAdapter] = DeviceAdapters(packed_adapter)

    def kv_block(self) -> KVBlock:
        """One layer's block; its layout is described in kernels/cpu/native/kv_pool.h."""
        return KVBlock((self._decoder.kv_block_bytes // self._dtype.itemsize,), self._dtype)

    def run(
        self,
        batch: InputBatch,
        rows: list[Row],
        num_logits: Sequence[int],
        pools: list[Tensor],
        wants_logits: bool,
        outputs: dict[str, Tensor] | None = None,
        states: StateStorage | None = None,
    ) -> tuple[NDArray[np.int64], Tensor | None]:
        numbers = batch.row_numbers(rows, num_logits)
        hidden = torch.empty(sum(num_logits), self._hidden_size) if outputs else None
        wants_logits = wants_logits or bool(outputs)
        own = batch.own_inputs(rows) if batch.brings_inputs(rows) else (None, None)
        called = NativeRows(numbers, self.adapters.names(batch, rows), *own)
        try:
            adapters = self.adapters.named(called.adapters)
            of_slots = batch.token_ids, batch.block_tables
            greedy, logits = self.step(NativeCall(called, adapters, *of_slots, pools, wants_logits, hidden))
        except UnknownCell as error:
            raise IndexError(
                f"slot {rows[error.row].slot} is to run a token that it does not know, or that lies in a block that was let go; "
                f"engine and worker disagree"
            ) from None
        if outputs and hidden is not None and logits is not None:
            outputs.update({name: self._outputs[name].compute(hidden, logits) for name in outputs})
        return greedy, logits

    def step(self, call: NativeCall) -> tuple[NDArray[np.int64], Tensor | None]:
        """Run a call. Of several stages each runs one micro-batch after the other, and waits for those of the stage before.

        Results and errors are those of NativeDecoder.step.
        """
        given = self._given(call.rows)
        if self._ranks is None or self._ranks.shape.stages == 1:
            return self._decoder.step(
                *(call.rows.numbers, call.token_ids, call.block_tables, call.pools, call.wants_logits),
                *(call.adapters, call.hidden, given),
            )
        parts = micro_batches(call.rows.numbers, self._ranks.shape.micro_batches)
        done = [self._step_of_part(call, part, given, self._ranks) for part in parts]
        logits = [each for _, each in done if each is not None]
        return np.concatenate([greedy for greedy, _ in done]), torch.cat(logits) if logits else None

    def _step_of_part(
        self, call: NativeCall, part: MicroBatch, given: Given | None, ranks: RanksMemory
    ) -> tuple[NDArray[np.int64], Tensor | None]:
        rows, tokens = part.rows, part.tokens
        if given is not None:
            given = Given(_part(given.embedded, tokens), _part(given.positions, tokens), given.vectors)
        hidden = None if call.hidden is None else call.hidden[part.logits]
        entering, leaving = (None if states is None else states[tokens] for states in (ranks.entering, ranks.leaving))
        return self._decoder.step(
            *(part.numbers, call.token_ids, call.block_tables, call.pools, call.wants_logits),
            *(call.adapters[rows], hidden, given, Passing(entering, leaving)),
        )

    def check(self, call: NativeCall) -> None:
        """Raise UnknownCell where `step` would."""
        of_slots = call.token_ids, call.block_tables
        self._decoder.check(call.rows.numbers, *of_slots, call.pools, self._given(call.rows))

    def _given(self, rows: NativeRows) -> Given | None:
        positions, embedded = rows.positions, rows.embedded
        if positions is None:
            return None
        if embedded is None:
            return Given(None, positions.numpy())
        vectors = embedded.vectors.float().contiguous()
        addresses = np.zeros(len(positions), dtype=np.uintp)
        row_bytes = vectors.element_size() * self._hidden_size
        addresses[embedded.where.numpy()] = vectors.data_ptr() + np.arange(len(vectors), dtype=np.uintp) * row_bytes
        return Given(addresses, positions.numpy(), vectors)


def _part(array: NDArray[T] | None, tokens: slice) -> NDArray[T] | None:
    return None if array is None else array[tokens]


def _native_form(block: Block, query_scales: Tensor | None) -> NativeForm:
    return NativeForm(
        norm_eps=block.norm_eps,
        norm=block.norm,
        norms_rows=block.qk_norm == "row",
        activation=block.activation,
        is_gated=block.gated,
        is_parallel=block.parallel,
        is_interleaved=block.rope_interleaved,
        attention_scale=block.attention_scale,
        attention_softcap=block.attention_softcap,
        embedding_scale=block.embedding_scale,
        residual_scale=block.residual_scale,
        logit_scale=block.logit_scale,
        logit_softcap=block.logit_softcap,
        query_scales=query_scales,
    )


def _native_layer(block: Block, layer: LayerWeights, window: int | None, rotary: RotaryTables | None) -> NativeLayer:
    attention, mlp = layer.attention, layer.mlp
    assert isinstance(attention, AttentionWeights)  # others are refused so far (tier.py)
    experts = mlp if isinstance(mlp, ExpertsWeights) else None
    gate_up, down = (None, None) if isinstance(mlp, ExpertsWeights) else (_packed(mlp.gate_up), _packed(mlp.down))
    mlp_norm = layer.attention_norm if block.parallel and layer.mlp_norm is None else layer.mlp_norm
    return NativeLayer(
        qkv=_packed(attention.qkv),
        out=_packed(attention.out),
        gate_up=gate_up,
        down=down,
        attention_norm=_if_there(layer.attention_norm),
        mlp_norm=_if_there(mlp_norm),
        attention_out_norm=_if_there(layer.attention_out_norm),
        mlp_out_norm=_if_there(layer.mlp_out_norm),
        q_norm=None if attention.q_norm is None else NativeNorm(_float(attention.q_norm)),
        k_norm=None if attention.k_norm is None else NativeNorm(_float(attention.k_norm)),
        rotary=rotary,
        sinks=None if attention.sinks is None else _float(attention.sinks),
        window=window,
        experts=None if experts is None else _native_experts(experts),
    )


def _native_experts(weights: ExpertsWeights) -> NativeExperts:
    settings = weights.settings
    mlps = [(_packed(mlp.gate_up), _packed(mlp.down)) for mlp in weights.experts]
    shared = None if weights.shared is None else (_packed(weights.shared.gate_up), _packed(weights.shared.down))
    return NativeExperts(
        router=_packed(weights.router),
        experts=mlps,
        places=settings.places,
        scores=settings.scores,
        is_normalised=settings.is_normalised,
        scale=settings.scale,
        groups=settings.groups,
        kept_groups=settings.kept_groups,
        adds_two_best=settings.adds_two_best,
        choice_bias=None if weights.choice_bias is None else _float(weights.choice_bias),
        shared=shared,
        has_shared_gate=settings.has_shared_gate,
        first=weights.first,
    )


def _native_norm(norm: NormWeights) -> NativeNorm:
    return NativeNorm(_float(norm.weight), None if norm.bias is None else _float(norm.bias))


def _if_there(norm: NormWeights | None) -> NativeNorm | None:
    return None if norm is None else _native_norm(norm)


def _table(embedding: Tensor | Linear) -> Tensor | PackedLinear:
    return embedding if isinstance(embedding, Tensor) else _packed(embedding)


def _packed(linear: Linear) -> PackedLinear:
    assert isinstance(linear, PackedLinear), "the model was not loaded with PackLinears"
    return linear


def _float(tensor: Tensor) -> Tensor:
    return tensor.float().contiguous()


def _in_four_bits(weight: Weight4 | Weight4A8) -> tuple[Tensor, Tensor, Tensor | None, int]:
    """Returns (q uint8 [n, k], scales float32 [n, groups], zeros uint8 [n, groups] or None, group): (q - zero) * scale."""
    if isinstance(weight, Weight4):
        zeros = None if weight.zeros is None else weight.zeros.T.to(torch.uint8)
        return w4a16.unpack(weight.packed, weight.group), weight.scales.T.float(), zeros, weight.group
    q, scales, zeros = w4a16.unpack(weight.packed, GROUP), weight.scale[:, None], weight.zeros.T
    if weight.group_scales is None:
        return q, scales, zeros, q.shape[1]
    return q, weight.group_scales.T * scales, zeros, GROUP


def _regrouped(weight: QuantizedWeight) -> tuple[Tensor, Tensor, int]:
    """Returns (int8, scales, group) with a group size that the kernels take: 32 or a multiple of 64.

    A smaller group repeats the scale of the group that it was cut from.
    """
    group, columns = weight.group, weight.q.shape[1]
    if group >= columns:
        return weight.q, weight.scale, -(-columns // 64) * 64
    if group == 32 or group % 64 == 0:
        return weight.q, weight.scale, group
    if group % 32:
        raise ConfigError(
            f"int8 weights have a scale for each {group} columns; the native kernels take multiples of 32: "
            f"use --set model.kernels=torch"
        )
    return weight.q, weight.scale.repeat_interleave(group // 32, dim=1)[:, : -(-columns // 32)], 32
