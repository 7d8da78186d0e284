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
from backend.core.step import Row
from backend.layers.linear import QuantizedWeight, Weight
from backend.layers.rotary import RotaryTables
from backend.models.decoder import Decoder
from backend.worker.adapters import DeviceAdapters
from backend.worker.input_batch import InputBatch
from backend.worker.micro_batches import MicroBatch, micro_batches
from backend.worker.native_layers import native_form, native_layer, native_norm, packed, table
from backend.worker.prompt_inputs import Embedded
from backend.worker.state_storage import StateStorage
from backend.worker.tier import KVBlock
from backend.worker.token_adapters import packed_adapter
from kernels import w4a16
from kernels.common.kv_format import PLAIN, KVFormat
from kernels.common.rounding import ROUNDED, Rounded, in_blocks
from kernels.common.super_blocks import SuperBlocks
from kernels.cpu.decoder import NativeDecoder, NativeShape, UnknownCell
from kernels.cpu.given import Given, Passing
from kernels.cpu.linear import PackedLinear
from kernels.cpu.lora import PackedAdapter
from kernels.cpu.memory import Arena
from kernels.cpu.ranks import RanksMemory
from kernels.cpu.recurrence import NativeStates
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
    lm_head = packed(model.lm_head)
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
    tables: RotaryTables | None = None  # cos and sin of each token; `positions` are places in them
    ends: NDArray[np.int32] | None = None  # one past the last key that each token sees


class NativeCall(NamedTuple):
    """A call of the native step."""

    rows: NativeRows
    adapters: Sequence[PackedAdapter | None]  # one for each row; no entries: no row has one
    token_ids: Tensor  # int64 [slots, max_seq_len]
    block_tables: NDArray[np.int32]  # [slots, max_blocks]
    pools: Sequence[Tensor | None]  # one for each layer; None: it is recurrent
    wants_logits: bool
    hidden: Tensor | None = None  # where what the last norm makes of the tokens with logits is wanted
    states: NativeStates | None = None  # where layers are recurrent


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
        # None: the layer neither attends nor has a state
        self._is_recurrent = [layer.is_recurrent if layer.has_mixer else None for layer in config.held_settings]
        self._all_attend = set(self._is_recurrent) == {False}
        of_layers = zip(model.layers, config.held_settings, model.rotary, strict=True)
        layers = [native_layer(config.block, layer, settings.window, rotary) for layer, settings, rotary in of_layers]
        lm_head = None if model.lm_head is None else packed(model.lm_head)
        self.screen = screen or make_screen(model, library)
        self._decoder = NativeDecoder(
            *(library, shape, native_form(config.block, model.query_scales), table(model.embedding), layers),
            *(native_norm(model.norm), lm_head, self.screen, ranks),
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
        own = batch.own_inputs(rows) if batch.brings_inputs(rows) else ()
        of_layers, of_rows = self._of_layers(pools), None
        if states is not None:
            read = states.rows(rows)
            of_rows = NativeStates(self._of_layers(states.pools, recurrent=True), read.numbers, read.saves)
        called = NativeRows(numbers, self.adapters.names(batch, rows), *own)
        try:
            adapters = self.adapters.named(called.adapters)
            of_slots = batch.token_ids, batch.block_tables
            greedy, logits = self.step(
                NativeCall(called, adapters, *of_slots, of_layers, wants_logits, hidden, of_rows)
            )
        except UnknownCell as error:
            raise IndexError(
                f"slot {rows[error.row].slot} is to run a token that it does not know, or that lies in a block that was let go; "
                f"engine and worker disagree"
            ) from None
        if outputs and hidden is not None and logits is not None:
            outputs.update({name: self._outputs[name].compute(hidden, logits) for name in outputs})
        return greedy, logits

    def _of_layers(self, pools: Sequence[Tensor], recurrent: bool = False) -> Sequence[Tensor | None]:
        """The pool of each layer, None for layers of the other kind. pools: of the layers with KV, or of recurrent ones."""
        if self._all_attend:
            return pools
        each = iter(pools)
        return [next(each) if flag is recurrent else None for flag in self._is_recurrent]

    def step(self, call: NativeCall) -> tuple[NDArray[np.int64], Tensor | None]:
        """Run a call. Of several stages each runs one micro-batch after the other, and waits for those of the stage before.

        Results and errors are those of NativeDecoder.step.
        """
        given = self._given(call.rows)
        if self._ranks is None or self._ranks.shape.stages == 1:
            return self._decoder.step(
                *(call.rows.numbers, call.token_ids, call.block_tables, call.pools, call.wants_logits),
                *(call.adapters, call.hidden, given),
                states=call.states,
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
            given = given._replace(embedded=_part(given.embedded, tokens), positions=_part(given.positions, tokens))
        hidden = None if call.hidden is None else call.hidden[part.logits]
        entering, leaving = (None if states is None else states[tokens] for states in (ranks.entering, ranks.leaving))
        return self._decoder.step(
            *(part.numbers, call.token_ids, call.block_tables, call.pools, call.wants_logits),
            *(call.adapters[rows], hidden, given, Passing(entering, leaving)),
        )

    def check(self, call: NativeCall) -> None:
        """Raise UnknownCell where `step` would."""
        of_slots = call.token_ids, call.block_tables
        self._decoder.check(call.rows.numbers, *of_slots, call.pools, self._given(call.rows), call.states)

    def _given(self, rows: NativeRows) -> Given | None:
        positions, embedded = rows.positions, rows.embedded
        if positions is None:
            return None
        tables = None if rows.tables is None else (rows.tables[0], rows.tables[1])
        if embedded is None:
            return Given(None, positions.numpy(), tables=tables)
        layers = [each.float().contiguous() for each in (embedded.vectors, *embedded.added)]
        addresses = np.zeros((len(layers), len(positions)), dtype=np.uintp)
        row_bytes, where = layers[0].element_size() * self._hidden_size, embedded.where.numpy()
        for of_layer, vectors in zip(addresses, layers):
            of_layer[where] = vectors.data_ptr() + np.arange(len(vectors), dtype=np.uintp) * row_bytes
        return Given(addresses[0], positions.numpy(), layers, addresses[1:], tables, rows.ends)


def _part(array: NDArray[T] | None, tokens: slice) -> NDArray[T] | None:
    return None if array is None else array[tokens]


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
