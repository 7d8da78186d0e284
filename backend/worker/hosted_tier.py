"""HostedTier: runs a model of backend/hosted. transformers runs the layers, and their attention reads and writes the KV pools."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import CDLL
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from backend.core.step import Row
from backend.hosted.attention import LayerAttention
from backend.hosted.model import HostedModel
from backend.hosted.native_modules import NativeModules
from backend.worker.input_batch import FlatBatch, InputBatch
from backend.worker.state_storage import StateStorage
from backend.worker.tier import KVBlock
from backend.worker.token_adapters import NativeAdapters, TorchAdapters
from kernels.common.kv_format import KVFormat, PoolLayout
from kernels.common.scoring import Scoring
from kernels.cpu.attention import NativeAttention, Scratch, StepRows
from kernels.cpu.decoder import UnknownCell
from kernels.kv_append import kv_append
from kernels.paged_attention import paged_attention, plan_attention

_TRIAL = 8  # tokens of the trial that finds which modules can be native


class HostedTier:
    """`run` leaves torch's own operators one thread and no oneDNN: how they share their work, and whether oneDNN does it, depends
    on the batch's size, and the last bits of some depend on that.
    """

    def __init__(
        self,
        model: HostedModel,
        attention: NativeLayers | PoolLayers | WholeTexts,
        adapters: NativeAdapters | TorchAdapters,
    ) -> None:
        self.model, self._attention, self.adapters = model, attention, adapters
        self.name = attention.name

    def kv_block(self) -> KVBlock:
        return self._attention.kv_block()

    def run(
        self,
        batch: InputBatch,
        rows: list[Row],
        num_logits: Sequence[int],
        pools: list[Tensor],
        wants_logits: bool,
        outputs: dict[str, Tensor] | None = None,
        states: StateStorage | None = None,
    ) -> tuple[None, Tensor]:
        """See Tier.run. Logits are always computed, and the most likely tokens never: the sampler finds them."""
        flat = batch.flatten(rows, num_logits)
        self._attention.begin(batch, rows, num_logits, flat, pools)
        adapted = self.adapters.of_tokens(batch, rows)
        with torch.inference_mode(), _same_for_all_sizes():
            try:
                logits, hidden = self.model.run(
                    flat.token_ids,
                    flat.positions,
                    flat.logits_index,
                    self._attention,
                    flat.embedded,
                    adapted,
                )
            except UnknownCell as error:
                raise IndexError(
                    f"slot {rows[error.row].slot} is to run a token in a block that was let go; engine and worker disagree"
                ) from None
        logits = logits.float()
        if outputs:
            marked = self.model.outputs
            outputs.update({name: marked[name].compute(hidden, logits) for name in outputs})
        return None, logits


class NativeLayers:
    """Attention by the native kernels. A layer's result for a token depends on its own sequence alone, bit for bit."""

    name = "native"

    def __init__(self, model: HostedModel, library: CDLL, block_size: int, kv_format: KVFormat) -> None:
        self._model, self.library = model, library
        self._block_size, self._kv_format = block_size, kv_format
        self.scratch, self.threads = Scratch(library), torch.get_num_threads()
        self._layers: dict[int, NativeAttention] = {}
        self._modules = NativeModules(model.host, self)
        block = self.kv_block()
        pools = [torch.zeros(1, *block.shape, dtype=block.dtype)] * model.config.num_layers
        self.rows = StepRows(np.array([(0, 0, _TRIAL, 0)], np.int32), np.zeros((1, 1), np.int32), pools, self.threads)
        with torch.inference_mode(), _same_for_all_sizes():
            model.use_native_modules(self._modules, self, _TRIAL)

    def kv_block(self) -> KVBlock:
        dtype = torch.uint8 if self._kv_format.is_quantised else self._model.dtype
        num_bytes = self._layer(self._model.config.num_heads, 1.0, 0.0, None, None).kv_block_bytes
        return KVBlock((num_bytes // dtype.itemsize,), dtype)

    def begin(
        self, batch: InputBatch, rows: list[Row], num_logits: Sequence[int], flat: FlatBatch, pools: list[Tensor]
    ) -> None:
        self.rows = StepRows(batch.row_numbers(rows, num_logits), batch.block_tables, pools, self.threads)
        self._modules.begin()

    def __call__(
        self, index: int, layer: LayerAttention, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> Tensor:
        attention = self._layers.get(index)
        if attention is None:
            attention = self._layer(layer.heads, layer.scale, layer.softcap, layer.window, sinks)
            self._layers[index] = attention
        return attention(q, k, v, self.rows, index)

    def of_layer(self, index: int) -> NativeAttention:
        """The attention of a layer that has run."""
        return self._layers[index]

    def _layer(
        self, heads: int, scale: float, softcap: float, window: int | None, sinks: Tensor | None
    ) -> NativeAttention:
        config = self._model.config
        return NativeAttention(
            self.library,
            self.scratch,
            heads,
            config.num_kv_heads,
            config.head_dim,
            self._model.dtype,
            self._block_size,
            self._kv_format,
            window,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
        )


class PoolLayers:
    """Attention by the kernels of the torch and Triton tiers."""

    name = "torch"

    def __init__(self, model: HostedModel, layout: PoolLayout) -> None:
        self._model, self._layout = model, layout

    def kv_block(self) -> KVBlock:
        return KVBlock(self._layout.block_shape, self._layout.dtype)

    def begin(
        self, batch: InputBatch, rows: list[Row], num_logits: Sequence[int], flat: FlatBatch, pools: list[Tensor]
    ) -> None:
        config = self._model.config
        self._flat = flat
        self._pools = [self._layout.view(pool) for pool in pools]
        device, dtype = flat.token_ids.device, self._model.dtype
        self._plans = plan_attention(
            flat.rows, self._layout.block_size, config.windows, config.head_dim, dtype, device, sink_tokens=0
        )

    def __call__(
        self, index: int, layer: LayerAttention, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> Tensor:
        qkv = torch.cat((q, k, v), dim=1).flatten(1)
        pool, flat = self._pools[index], self._flat
        q = kv_append(qkv, flat.positions, None, None, flat.cells, pool)
        return paged_attention(q, pool, self._plans[layer.window], Scoring(layer.scale, layer.softcap, sinks))


class WholeTexts:
    """Attention of an encoder: each token sees its own text, before and behind it, so that a step runs texts whole. One text is
    computed after the other, without padding, so that its bits do not depend on others. The KV pools hold nothing.
    """

    def __init__(self, name: str) -> None:
        """`name`: of the tier whose linear layers the model has."""
        self.name = name

    def kv_block(self) -> KVBlock:
        return KVBlock((1,), torch.uint8)

    def begin(
        self, batch: InputBatch, rows: list[Row], num_logits: Sequence[int], flat: FlatBatch, pools: list[Tensor]
    ) -> None:
        """Raises IndexError for a row that is not a whole text."""
        for row in rows:
            if row.num_computed or row.num_tokens < batch.num_tokens[row.slot]:
                raise IndexError(
                    f"slot {row.slot} is to run tokens {row.num_computed} to {row.num_computed + row.num_tokens} of "
                    f"{batch.num_tokens[row.slot]}, and the model reads whole texts; engine and worker disagree"
                )
        self._texts = list(pairwise(flat.rows.starts.tolist()))
        self._masks: dict[tuple[int, int], Tensor] = {}

    def __call__(
        self, index: int, layer: LayerAttention, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> Tensor:
        out = torch.empty_like(q)
        repeats = q.shape[1] // k.shape[1]
        k, v = (side.repeat_interleave(repeats, dim=1) if repeats > 1 else side for side in (k, v))
        for start, end in self._texts:
            # Copies of its own: the library's kernels may round in another way where memory is aligned in another way.
            queries, keys, values = (
                side[start:end].transpose(0, 1)[None].clone(memory_format=torch.contiguous_format) for side in (q, k, v)
            )
            mask = self._mask(end - start, layer.window, q.device)
            seen = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=layer.scale)
            out[start:end] = seen[0].transpose(0, 1)
        return out

    def _mask(self, length: int, window: int | None, device: torch.device) -> Tensor | None:
        """bool [length, length], True where a query sees a key; None if it sees all."""
        if window is None or window >= length:
            return None
        if (length, window) not in self._masks:
            places = torch.arange(length, device=device)
            self._masks[length, window] = (places[:, None] - places).abs() < window
        return self._masks[length, window]


@contextmanager
def _same_for_all_sizes() -> Iterator[None]:
    """Let torch's operators round an element alike in tensors of all sizes."""
    count, one_dnn = torch.get_num_threads(), torch._C._get_mkldnn_enabled()
    torch.set_num_threads(1)
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch.set_num_threads(count)
        torch._C._set_mkldnn_enabled(one_dnn)
