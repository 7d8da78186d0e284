"""A decoder's weights and settings as the native kernels take them (kernels/cpu/decoder.py)."""

from __future__ import annotations

from torch import Tensor

from backend.architectures.description import Block
from backend.layers.attention import AttentionWeights
from backend.layers.experts import ExpertsWeights, MlpWeights
from backend.layers.latent import LatentWeights
from backend.layers.linear import Linear
from backend.layers.norm import NormWeights
from backend.layers.recurrent import RecurrentWeights
from backend.layers.rotary import RotaryTables
from backend.models.layer_weights import LayerWeights
from kernels.cpu.decoder import NativeForm, NativeLayer, NativeNorm
from kernels.cpu.latent import NativeLatent
from kernels.cpu.linear import PackedLinear
from kernels.cpu.mixture import NativeExperts
from kernels.cpu.recurrence import NativeRecurrence


def native_form(block: Block, query_scales: Tensor | None) -> NativeForm:
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
        gates_attention=block.gates_attention,
    )


def native_layer(block: Block, layer: LayerWeights, window: int | None, rotary: RotaryTables | None) -> NativeLayer:
    mixer, mlp = layer.attention, layer.mlp
    attention = mixer if isinstance(mixer, AttentionWeights) else None
    latent = mixer if isinstance(mixer, LatentWeights) else None
    qkv = None if attention is None else attention.qkv
    experts = mlp if isinstance(mlp, ExpertsWeights) else None
    gate_up, down = (packed(mlp.gate_up), packed(mlp.down)) if isinstance(mlp, MlpWeights) else (None, None)
    mlp_norm = layer.attention_norm if block.parallel and layer.mlp_norm is None else layer.mlp_norm
    return NativeLayer(
        qkv=_packed_if_there(qkv if latent is None else latent.inputs),
        out=None if mixer is None else packed(mixer.out),
        gate_up=gate_up,
        down=down,
        attention_norm=_if_there(layer.attention_norm),
        mlp_norm=_if_there(mlp_norm),
        attention_out_norm=_if_there(layer.attention_out_norm),
        mlp_out_norm=_if_there(layer.mlp_out_norm),
        q_norm=None if attention is None or attention.q_norm is None else NativeNorm(_float(attention.q_norm)),
        k_norm=None if attention is None or attention.k_norm is None else NativeNorm(_float(attention.k_norm)),
        rotary=rotary,
        sinks=None if attention is None or attention.sinks is None else _float(attention.sinks),
        key_shift=None if attention is None else attention.key_shift,
        window=window,
        experts=None if experts is None else native_experts(experts),
        recurrence=native_recurrence(mixer) if isinstance(mixer, RecurrentWeights) else None,
        latent=None if latent is None else native_latent(latent),
    )


def native_latent(weights: LatentWeights) -> NativeLatent:
    of, query_norm = weights.settings, weights.query_norm
    return NativeLatent(
        *(of.rank, of.rotated, of.plain, of.value_dim, packed(weights.keys), packed(weights.values)),
        *(_float(weights.norm), of.norm_eps, _packed_if_there(weights.queries)),
        None if query_norm is None else _float(query_norm),
    )


def native_recurrence(weights: RecurrentWeights) -> NativeRecurrence:
    of, taps = weights.settings, weights.taps.T.contiguous()
    inputs, bias = packed(weights.inputs), weights.conv_bias
    if of.kind == "convolution":
        return NativeRecurrence("convolution", inputs, taps, bias)
    assert weights.gates is not None
    is_delta = of.kind == "delta"
    # queries, keys, values; of Mamba 2 values (x), keys (B), queries (C)
    first = (0, of.num_keys, 2 * of.num_keys) if is_delta else (of.num_values + of.num_keys, of.num_values, 0)
    return NativeRecurrence(
        *("delta" if is_delta else "sum", inputs, taps, bias, packed(weights.gates)),
        *(of.key_heads, of.value_heads, of.key_dim, of.value_dim, *first),
        query_scale=of.key_dim**-0.5 if is_delta else 1.0,
        rate=weights.rate,
        dt_bias=weights.dt_bias,
        skip=weights.skip,
        dt_min=of.limits[0],
        dt_max=of.limits[1],
        norm=weights.norm,
        norm_size=of.value_dim if is_delta else of.num_values // max(1, of.norm_groups),
        gates_first=of.gates_first,
    )


def native_experts(weights: ExpertsWeights) -> NativeExperts:
    settings = weights.settings
    mlps = [(packed(mlp.gate_up), packed(mlp.down)) for mlp in weights.experts]
    shared = None if weights.shared is None else (packed(weights.shared.gate_up), packed(weights.shared.down))
    return NativeExperts(
        router=packed(weights.router),
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


def native_norm(norm: NormWeights) -> NativeNorm:
    return NativeNorm(_float(norm.weight), None if norm.bias is None else _float(norm.bias))


def _if_there(norm: NormWeights | None) -> NativeNorm | None:
    return None if norm is None else native_norm(norm)


def table(embedding: Tensor | Linear) -> Tensor | PackedLinear:
    return embedding if isinstance(embedding, Tensor) else packed(embedding)


def packed(linear: Linear) -> PackedLinear:
    assert isinstance(linear, PackedLinear), "the model was not loaded with PackLinears"
    return linear


def _packed_if_there(linear: Linear | None) -> PackedLinear | None:
    return None if linear is None else packed(linear)


def _float(tensor: Tensor) -> Tensor:
    return tensor.float().contiguous()
