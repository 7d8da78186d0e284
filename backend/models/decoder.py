"""The decoder that a ModelConfig describes. `forward` runs a flat batch and keeps no state between calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor

from backend.architectures.description import WHOLE, Block, ModelConfig, Shard
from backend.architectures.shards import of_rank, vocabulary
from backend.layers.activation import activate
from backend.layers.attention import AttentionWeights, attention
from backend.layers.experts import ExpertsWeights, MlpWeights, mix
from backend.layers.latent import LatentWeights, latent_attention
from backend.layers.linear import Linear, num_bytes_of
from backend.layers.lora import Adapt, AdaptedTokens
from backend.layers.norm import NormWeights, add, add_norm, norm
from backend.layers.recurrent import RecurrentWeights, States, recurrent
from backend.layers.rotary import RotaryTables, query_scales, rotary_tables
from backend.models.convert import QkvByHead
from backend.models.experts import UnstackedExperts
from backend.models.latent import AbsorbedTensors
from backend.models.layer_weights import LayerWeights, Mixer, layer_weights, norm_weights
from backend.models.linears import LinearBuilder, LinearOptions
from backend.models.parts import CheckpointParts, Parts
from backend.models.splits import SplitTensors
from backend.models.tensors import TensorSource
from kernels.activation import activate_int8
from kernels.common.kv_format import KVPool
from kernels.common.state_rows import StateRows
from kernels.embedding import embedding
from kernels.int8_rows import Int8Rows
from kernels.paged_attention import Plan


def mlp(
    x: Tensor | Int8Rows,
    weights: MlpWeights | ExpertsWeights,
    block: Block,
    may_quantize: bool = True,
    adapt: Adapt | None = None,
) -> Tensor:
    """x [num_tokens, hidden] -> [num_tokens, hidden]. adapt: adds LoRA adapters' parts; then nothing may be quantised ahead."""
    if isinstance(weights, ExpertsWeights):
        assert isinstance(x, Tensor)  # the router reads what is not quantised
        return mix(x, weights, block)
    gate_up = weights.gate_up(x)
    if adapt is None:
        quantizes = may_quantize and weights.down.takes_int8 and block.activation != "relu2"
        to_int8 = partial(activate_int8, kind=block.activation, gated=block.gated)
        return weights.down(to_int8(gate_up) if quantizes else activate(gate_up, block))
    assert isinstance(x, Tensor)  # with adapters no activations are quantised ahead
    adapt(gate_up, x, "gate_up")
    activated = activate(gate_up, block)
    y = weights.down(activated)
    adapt(y, activated, "down")
    return y


Attend = Callable[[Tensor | Int8Rows], Tensor]  # normed hidden states [num_tokens, hidden] -> their attention, alike


class StepStates(NamedTuple):
    """The states of recurrent layers in a step."""

    pools: Sequence[Tensor]  # for each recurrent layer, float32 [states, numbers of a state]
    rows: StateRows


class _Where(NamedTuple):
    """Where a layer's attention finds the keys of a step, and puts its own."""

    pool: KVPool
    plan: Plan
    positions: Tensor
    cells: Tensor


class MarkedOutput(NamedTuple):
    """A tensor that the model marks as one that requests may ask for."""

    width: int
    compute: Callable[
        [Tensor, Tensor], Tensor
    ]  # normed hidden states [rows, hidden], logits [rows, vocab] -> [rows, width]


@dataclass(slots=True)
class Decoder:
    config: ModelConfig
    embedding: (
        Tensor | Linear
    )  # [vocab, hidden]; no rows in a stage that embeds no tokens; the native tier's alone may be a Linear
    dtype: torch.dtype  # to compute in
    device: torch.device
    layers: list[LayerWeights]
    norm: NormWeights
    lm_head: (
        Linear | None
    )  # [vocab, hidden]; of several ranks each has its part of the vocabulary; None: another stage's
    rotary: list[RotaryTables | None]  # tables of each layer, shared by layers with the same rope; None = no rotation
    max_seq_len: int  # positions of the tables
    query_scales: Tensor | None = None  # float32 [max_seq_len]: Block.query_scaling
    takes_adapters: bool = False  # then products read unquantised inputs, which LoRA needs, in every batch alike
    outputs: dict[str, MarkedOutput] = field(init=False)  # by name

    def __post_init__(self) -> None:
        self.outputs = {
            "hidden_states": MarkedOutput(self.config.hidden_size, lambda hidden, logits: hidden),
            "logits": MarkedOutput(self.config.vocab_size, lambda hidden, logits: logits),
        }

    @property
    def num_linear_bytes(self) -> int:
        """Bytes of all linear layers, the output head included."""
        return sum(linear.num_bytes for linear in self._linears)

    @property
    def num_read_bytes(self) -> int:
        """Bytes that a step reads at least: of experts, as many as a token has."""
        unread = 0
        for layer in self.layers:
            if isinstance(layer.mlp, ExpertsWeights) and layer.mlp.experts:
                of_one = layer.mlp.experts[0].gate_up.num_bytes + layer.mlp.experts[0].down.num_bytes
                unread += of_one * max(0, len(layer.mlp.experts) - layer.mlp.settings.places)
        return self.num_linear_bytes - unread

    @property
    def memory(self) -> str:
        """A description of the memory that the weights take."""
        weights = sum(prod(linear.shape) for linear in self._linears)
        table = self.embedding
        own = num_bytes_of(table) if isinstance(table, Tensor) else 0 if table is self.lm_head else table.num_bytes
        return (
            f"linear layers {self.num_linear_bytes / 1e6:,.1f} MB, {8 * self.num_linear_bytes / weights:.2f} bits a weight; "
            f"embedding {own / 1e6:,.1f} MB"
        )

    @property
    def _linears(self) -> list[Linear]:
        linears = [] if self.lm_head is None else [self.lm_head]
        for layer in self.layers:
            mlp, mixer = layer.mlp, layer.attention
            if mixer is not None:
                linears += (mixer.qkv, mixer.out) if isinstance(mixer, AttentionWeights) else mixer.linears
            if mlp is not None:
                linears += mlp.linears if isinstance(mlp, ExpertsWeights) else (mlp.gate_up, mlp.down)
        return linears

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        cells: Tensor,
        plans: Mapping[int | None, Plan],
        pools: Sequence[KVPool],
        embedded: tuple[Tensor, Tensor, Sequence[Tensor]] | None = None,
        adapted: AdaptedTokens | None = None,
        states: StepStates | None = None,
        tables: RotaryTables | None = None,
    ) -> Tensor:
        """Run a flat batch of tokens and write their KV, and the states of their sequences.

        token_ids, positions, cells are int64 [num_tokens]. plans holds the attention plan of each window; pools has one pool for
        each layer with KV. states: where the model has recurrent layers. embedded: the tokens [n] int64 of the batch whose
        embeddings are given, and these, [n, hidden], which embedding_scale does not multiply; third, for some of the first
        layers, what is added to their results for these tokens. adapted: the tokens' LoRA adapters, if any has one. tables:
        cos and sin of each token, in the place of the model's; `positions` are places in them.

        Returns the hidden states before the last norm, [num_tokens, hidden].
        """
        block = self.config.block
        assert isinstance(self.embedding, Tensor), "LinearOptions.holds_super_blocks is for native kernels"
        x = embedding(self.embedding, token_ids, None if block.embedding_scale == 1 else block.embedding_scale)
        if embedded is not None:
            x.index_copy_(0, *embedded[:2])
        added = () if embedded is None else embedded[2]
        delta: Tensor | None = None  # like x, and still to be added to it
        run = self._parallel if block.parallel else self._sequential
        of_layers = zip(self.layers, self.config.held_settings, self.rotary, strict=True)
        kv_pools, state_pools = iter(pools), iter(() if states is None else states.pools)
        for index, (layer, settings, own_tables) in enumerate(of_layers):
            if embedded is not None and 0 < index <= len(added):
                x, delta = add(x, delta, block), None
                x.index_add_(0, embedded[0], added[index - 1])
            adapt = None if adapted is None else partial(adapted.add, index)
            if layer.attention is None:
                x, delta = run(x, delta, layer, None, adapt)
                continue
            if isinstance(layer.attention, RecurrentWeights):
                assert states is not None, "a model with recurrent layers is given states"
                own = States(layer.attention.settings, next(state_pools))
                mix_tokens = partial(recurrent, weights=layer.attention, block=block, states=own, rows=states.rows)
                x, delta = run(x, delta, layer, mix_tokens, adapt)
                continue
            turning = own_tables if tables is None or own_tables is None else tables
            where = _Where(next(kv_pools), plans[settings.window], positions, cells)
            if isinstance(layer.attention, LatentWeights):
                assert turning is not None, "keys of latents are rotated in every layer"
                attend = partial(
                    latent_attention, weights=layer.attention, block=block, tables=turning, **where._asdict()
                )
            else:
                attend = partial(
                    attention,
                    weights=layer.attention,
                    block=block,
                    tables=turning,
                    query_scales=self.query_scales,
                    adapt=adapt,
                    **where._asdict(),
                )
            x, delta = run(x, delta, layer, attend, adapt)
        x = add(x, delta, block)
        if embedded is not None and len(added) == len(self.layers):
            x.index_add_(0, embedded[0], added[-1])
        return x

    def _sequential(
        self, x: Tensor, delta: Tensor | None, layer: LayerWeights, attend: Attend | None, adapt: Adapt | None
    ) -> tuple[Tensor, Tensor | None]:
        """Run a layer on x and what is still to be added to it; returns the same of its results. attend: None where the layer
        has no mixer.
        """
        block = self.config.block
        if attend is not None and layer.attention is not None:
            normed, x = add_norm(x, delta, layer.attention_norm, block, self._takes_int8(layer.attention))
            delta = norm(attend(normed), layer.attention_out_norm, block)
        if layer.mlp is not None:
            normed, x = add_norm(x, delta, layer.mlp_norm, block, self._takes_int8(layer.mlp))
            done = mlp(normed, layer.mlp, block, not self.takes_adapters, adapt)
            delta = norm(done, layer.mlp_out_norm, block)
        return x, delta

    def _parallel(
        self, x: Tensor, delta: Tensor | None, layer: LayerWeights, attend: Attend | None, adapt: Adapt | None
    ) -> tuple[Tensor, Tensor | None]:
        """Like `_sequential`. Attention and mlp read the same norm, unless the mlp has one of its own."""
        assert attend is not None and layer.attention is not None and layer.mlp is not None
        block, shares = self.config.block, layer.mlp_norm is None
        to_int8 = self._takes_int8(layer.attention) and (not shares or self._takes_int8(layer.mlp))
        normed, x = add_norm(x, delta, layer.attention_norm, block, to_int8)
        attended = attend(normed)
        if not shares:
            normed, x = add_norm(x, None, layer.mlp_norm, block, self._takes_int8(layer.mlp))
        return x, attended + mlp(normed, layer.mlp, block, not self.takes_adapters, adapt)

    def _takes_int8(self, reader: Mixer | MlpWeights | ExpertsWeights) -> bool:
        """True if the norm before this reader is to quantise its output."""
        if isinstance(reader, ExpertsWeights | RecurrentWeights):
            return False
        if isinstance(reader, LatentWeights):
            linear = reader.inputs
        else:
            linear = reader.gate_up if isinstance(reader, MlpWeights) else reader.qkv
        return linear.takes_int8 and not self.takes_adapters

    def _logits(self, normed: Tensor) -> Tensor:
        assert self.lm_head is not None, "a stage that has no output head is not asked for logits"
        logits, block = self.lm_head(normed), self.config.block
        if block.logit_scale == 1 and not block.logit_softcap:
            return logits
        scaled = logits.float() * block.logit_scale
        if block.logit_softcap:
            scaled = block.logit_softcap * torch.tanh(scaled / block.logit_softcap)
        return scaled.to(logits.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [num_rows, hidden] -> [num_rows, vocab] in the model's dtype. Give it only the rows that are wanted."""
        return self._logits(norm(hidden, self.norm, self.config.block))

    def logits_and(self, names: Sequence[str], hidden: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Like `logits`, with the marked outputs of these names, each [num_rows, width]."""
        normed = norm(hidden, self.norm, self.config.block)
        logits = self._logits(normed)
        return logits, {name: self.outputs[name].compute(normed, logits) for name in names}


class Follow(NamedTuple):
    """How a caller follows a decoder being built."""

    parts: Callable[[Parts], Parts] = lambda parts: parts  # gets the checkpoint's parts, and returns what is built from
    layers: Callable[[int, int], None] = lambda done, of: None  # gets how many layers are done, of how many, after each


def build_decoder(
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    max_seq_len: int,
    dtype: torch.dtype,
    device: torch.device,
    options: LinearOptions,
    follow: Follow = Follow(),  # noqa: B008 (immutable)
    shard: Shard = WHOLE,
) -> Decoder:
    """Make a model from a checkpoint's tensors, one layer at a time, so that the original of a packed weight is freed at once.

    shard: the part of it that this rank runs. Raises ConfigError for missing, misshapen or unused tensors.
    """
    if config.names.layer.qkv_by_head:
        tensors = QkvByHead(tensors, config)
    if config.latent is not None:
        tensors = AbsorbedTensors(tensors, config)
    if config.names.layer.splits:
        tensors = SplitTensors(tensors, config)
    if config.names.layer.stacked is not None and config.experts is not None:
        tensors = UnstackedExperts(tensors, config)
    source = TensorSource(tensors, dtype, device, config.names.unused)
    parts = CheckpointParts(config, source, LinearBuilder(source, config.quantization, options), shard)
    return assemble(of_rank(config, shard), follow.parts(parts), max_seq_len, dtype, device, follow.layers)


def assemble(
    config: ModelConfig,
    parts: Parts,
    max_seq_len: int,
    dtype: torch.dtype,
    device: torch.device,
    on_layer: Callable[[int, int], None] = lambda done, of: None,
) -> Decoder:
    """Make a model of its parts. config: of this rank. on_layer: gets how many layers are done, of how many, after each."""
    config, names, shard = _rounded(config, dtype), config.names, config.shard
    embedding: Tensor | Linear = torch.empty(0, config.hidden_size, dtype=dtype, device=device)
    if shard.is_first:
        embedding = parts.embedding()
    first_token, last_token = vocabulary(config, shard)
    lm_head = parts.head(embedding, last_token - first_token) if shard.is_last else None
    layers = []
    for index in config.held:
        layers.append(layer_weights(config, parts, index))
        on_layer(len(layers), len(config.held))
    last_norm = norm_weights(config, parts, names.norm, config.hidden_size)
    parts.finish()
    tables = [rotary_tables(rope, config.head_dim, max_seq_len, device) for rope in config.ropes]
    rotary = [None if layer.rope is None else tables[layer.rope] for layer in config.held_settings]
    scaling = config.block.query_scaling
    scales = None if scaling is None else query_scales(scaling, max_seq_len, device)
    return Decoder(config, embedding, dtype, device, layers, last_norm, lm_head, rotary, max_seq_len, scales)


def _rounded(config: ModelConfig, dtype: torch.dtype) -> ModelConfig:
    """The embedding's factor as the model's type holds it, where the family asks for it."""
    if not config.block.embedding_scale_is_rounded:
        return config
    scale = torch.tensor(config.block.embedding_scale).to(dtype).item()
    return replace(config, block=replace(config.block, embedding_scale=scale))
