"""Hybrids in GGUF files: what their settings stand for in a config.json, and the tensors of recurrent layers.

Source: llama.cpp's converter (`conversion/qwen.py`, `lfm2.py`, `granite.py`). Against a checkpoint's its tensors differ so:

    ssm_a                     -exp(A_log)
    ssm_conv1d, shortconv     without the dimension of 1
    ssm_a, ssm_d, ssm_norm    of Mamba 2 in two dimensions
    value heads               of qwen35 and qwen35moe: the first of each key head, then the second of each (held.py)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from msgspec.structs import replace

from backend.api.checkpoint.gguf import GgufHeader
from backend.api.checkpoint.model_files import shown
from backend.architectures.description import ModelConfig
from backend.architectures.gguf.routers import SIGMOID, SOFTMAX, Keys, check_router, experts_of
from backend.architectures.gguf.settings import GgufSettings
from backend.architectures.recurrent_names import RecurrentNames
from backend.architectures.settings import Epsilon, Factor, Size

_QKVZ, _BA = "linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba"


class Named(NamedTuple):
    """A tensor without its `.weight` or `.bias`."""

    hf: str
    shape: tuple[int, ...]  # the weight's; a bias has its first dimension, one without a weight all
    has_bias: bool = False
    has_weight: bool = True
    is_whole: bool = False  # both names have all that belongs to them


def qwen3_5(settings: GgufSettings) -> Keys:
    """The parts of a rotation have the same positions in a text."""
    settings.get("rope.dimension_sections", list[int])
    return _delta(settings)


def qwen3_5_moe(settings: GgufSettings) -> Keys:
    return qwen3_5(settings) | _shared_expert(settings)


def qwen3_next(settings: GgufSettings) -> Keys:
    return _delta(settings) | _shared_expert(settings) | dict(norm_topk_prob=True)


def _delta(settings: GgufSettings) -> Keys:
    """Layers behind the model's own predict further tokens, and are left out."""
    extra = settings.get("nextn_predict_layers", int) or 0
    if not 0 <= extra < settings.need("block_count", Size):
        raise settings.unsupported("nextn_predict_layers", extra)
    layers = settings.need("block_count", Size) - extra
    every = settings.get("full_attention_interval", Size) or 4
    given = settings.get("attention.recurrent_layers", list[bool])
    are_recurrent = [bool((layer + 1) % every) for layer in range(layers)] if given is None else given[:layers]
    heads, inner = settings.need("ssm.time_step_rank", Size), settings.need("ssm.inner_size", Size)
    if inner % heads:
        raise settings.unsupported("ssm.inner_size", f"{shown(inner)} for {shown(heads)} heads")
    return dict(
        num_hidden_layers=layers,
        mtp_num_hidden_layers=extra,
        layer_types=["linear_attention" if flag else "full_attention" for flag in are_recurrent],
        linear_conv_kernel_dim=settings.need("ssm.conv_kernel", Size),
        linear_num_key_heads=settings.need("ssm.group_count", Size),
        linear_num_value_heads=heads,
        linear_key_head_dim=settings.need("ssm.state_size", Size),
        linear_value_head_dim=inner // heads,
    )


def _shared_expert(settings: GgufSettings) -> Keys:
    check_router(settings, True, SOFTMAX)
    shared = settings.get("expert_shared_feed_forward_length", Size) or settings.rows_of("ffn_up_shexp.weight")
    return experts_of(settings) | dict(shared_expert_intermediate_size=shared)


def lfm2(settings: GgufSettings) -> Keys:
    return dict(
        layer_types=_kinds(settings, "conv"),
        conv_L_cache=settings.need("shortconv.l_cache", Size),
        block_auto_adjust_ff_dim=False,  # files have the width itself
    )


def lfm2_moe(settings: GgufSettings) -> Keys:
    check_router(settings, True, SIGMOID)
    return lfm2(settings) | dict(
        experts_of(settings),
        block_auto_adjust_ff_dim=None,
        num_dense_layers=settings.get("leading_dense_block_count", int) or 0,
        use_expert_bias=settings.rows_of("exp_probs_b.bias") is not None,
        routed_scaling_factor=settings.get("expert_weights_scale", float) or None,  # 0: there is none
    )


def granite_hybrid(settings: GgufSettings) -> Keys:
    """Only models that are not rotated: files of Bamba, which is, have this architecture too."""
    if settings.get("rope.scaling.finetuned", bool):
        raise settings.unsupported("rope.scaling.finetuned", "true, a hybrid whose attention is rotated")
    heads, inner = settings.need("ssm.time_step_rank", Size), settings.need("ssm.inner_size", Size)
    experts: Keys = dict(num_local_experts=0, num_experts_per_tok=0)
    if settings.get("expert_count", int):
        check_router(settings, True, SOFTMAX)
        experts = experts_of(settings, "num_local_experts") | dict(moe_intermediate_size=None)
    shared = settings.get("expert_shared_feed_forward_length", Size) or settings.get("feed_forward_length", Size)
    return multipliers(settings) | experts | dict(
        shared_intermediate_size=shared,
        layer_types=_kinds(settings, "mamba"),
        position_embedding_type="nope",
        mamba_n_heads=heads,
        mamba_d_head=inner // heads,
        mamba_expand=inner // settings.need("embedding_length", Size),
        mamba_n_groups=settings.need("ssm.group_count", Size),
        mamba_d_state=settings.need("ssm.state_size", Size),
        mamba_d_conv=settings.need("ssm.conv_kernel", Size),
        mamba_conv_bias=settings.rows_of("ssm_conv1d.bias") is not None,
    )  # fmt: skip


def nemotron_h(settings: GgufSettings) -> Keys:
    """A layer with heads of keys attends, one with a width is an mlp or has experts, and others are Mamba's. llama.cpp does not
    bound steps from below, and no file says it.
    """
    extra = settings.get("nextn_predict_layers", int) or 0
    layers = settings.need("block_count", Size) - extra
    if extra < 0 or layers < 1:
        raise settings.unsupported("nextn_predict_layers", extra)
    attends = [kind == "full_attention" for kind in _kinds(settings, "mamba")]
    widths: Any = settings.need("feed_forward_length", Any)
    if not isinstance(widths, list) or len(widths) < layers:
        raise settings.unsupported("feed_forward_length", f"{shown(widths)} for {layers} layers")
    experts: Keys = {}
    if settings.get("expert_count", int):
        normalises = settings.get("expert_weights_norm", bool) or False
        check_router(settings, normalises, SIGMOID)
        experts = experts_of(settings, "n_routed_experts") | dict(
            moe_shared_expert_intermediate_size=settings.need("expert_shared_feed_forward_length", Size),
            moe_latent_size=settings.get("moe_latent_size", Size),
            norm_topk_prob=normalises,
            routed_scaling_factor=settings.get("expert_weights_scale", float) or None,  # 0: there is none
            n_group=settings.get("expert_group_count", Size),
            topk_group=settings.get("expert_group_used_count", Size),
        )
        settings.get("expert_shared_count", int)
    wide = "moe" if experts else "mlp"
    heads = settings.need("ssm.time_step_rank", Size)
    epsilon = settings.get("attention.layer_norm_rms_epsilon", Epsilon)
    return experts | dict(
        layers_block_type=[
            "attention" if attend else wide if width else "mamba" for attend, width in zip(attends[:layers], widths)
        ],
        num_hidden_layers=layers,
        num_nextn_predict_layers=extra,
        layer_norm_epsilon=settings.need("attention.layer_norm_epsilon", Epsilon) if epsilon is None else epsilon,
        rope_parameters=None,
        mamba_num_heads=heads,
        mamba_head_dim=settings.need("ssm.inner_size", Size) // heads,
        n_groups=settings.need("ssm.group_count", Size),
        ssm_state_size=settings.need("ssm.state_size", Size),
        conv_kernel=settings.need("ssm.conv_kernel", Size),
        use_conv_bias=settings.rows_of("ssm_conv1d.bias") is not None,
        mlp_bias=settings.rows_of("ffn_up.bias") is not None,
        time_step_min=0.0,
    )


def multipliers(settings: GgufSettings) -> Keys:
    """Granite's."""
    return dict(
        embedding_multiplier=settings.get("embedding_scale", Factor),
        residual_multiplier=settings.get("residual_scale", Factor),
        attention_multiplier=settings.get("attention.scale", Factor),
        logits_scaling=settings.get("logit_scale", Factor),
    )


def _kinds(settings: GgufSettings, recurrent: str) -> list[str]:
    """A layer without heads of keys is recurrent."""
    layers, given = settings.need("block_count", Size), settings.need("attention.head_count_kv", Any)
    heads = given if isinstance(given, list) else [given] * layers
    if len(heads) < layers:
        raise settings.unsupported("attention.head_count_kv", f"{shown(given)} for {layers} layers")
    return ["full_attention" if each else recurrent for each in heads[:layers]]


def stored_names(config: ModelConfig, header: GgufHeader) -> dict[str, Any]:
    """Fields of LayerNames: the delta rule's projections are apart in files, but for gates that are by key head in some."""
    names, first = config.names.layer, next(at for at, each in enumerate(config.layers) if each.is_recurrent)
    if config.recurrence is None or config.recurrence.kind != "delta":
        return {}
    plain = RecurrentNames()
    by_head = f"blk.{first}.ssm_ba.weight" in header.tensors
    dropped = {_QKVZ} if by_head else {_QKVZ, _BA}
    recurrent = replace(plain, gates=names.recurrent.gates if by_head else plain.gates)
    return dict(recurrent=recurrent, splits=tuple(each for each in names.splits if each.stored not in dropped))


def tensors_of_recurrence(config: ModelConfig) -> Iterator[tuple[str, Named]]:
    """The tensors in the place of attention, by their names in a file with a configuration (`as_stored`)."""
    settings, names, hidden = config.recurrence, config.names.layer.recurrent, config.hidden_size
    assert settings is not None
    heads, values, channels, has_bias = settings.value_heads, settings.num_values, settings.channels, settings.has_bias
    if settings.kind == "convolution":
        yield "shortconv.in_proj", Named(names.inputs[0], (3 * values, hidden), has_bias)
        yield "shortconv.out_proj", Named(names.out, (hidden, values), has_bias)
        yield "shortconv.conv", Named(names.convolution, (channels, settings.taps), settings.has_conv_bias)
        return
    column = (heads, 1) if settings.kind == "mamba2" else (heads,)
    yield "ssm_out", Named(names.out, (hidden, values), has_bias)
    yield "ssm_conv1d", Named(names.convolution, (channels, settings.taps), settings.has_conv_bias)
    yield "ssm_a", Named(names.log_rate, column, is_whole=True)
    yield "ssm_dt.bias", Named(names.dt_bias, (heads,), is_whole=True)
    if settings.kind == "mamba2":
        groups = max(settings.norm_groups, 1)
        yield "ssm_in", Named(config.names.layer.splits[0].stored, (values + channels + heads, hidden), has_bias)
        yield "ssm_d", Named(names.skip, column, is_whole=True)
        yield "ssm_norm", Named(names.norm, (groups, values // groups))
        return
    yield "ssm_norm", Named(names.norm, (settings.value_dim,))
    yield "attn_qkv", Named(names.inputs[0], (channels, hidden), has_bias)
    yield "attn_gate", Named(names.inputs[1], (values, hidden), has_bias)
    if names.gates[0].startswith(_BA):
        yield "ssm_ba", Named(_BA, (2 * heads, hidden), has_bias)
    else:
        for stored, gate in zip(("ssm_alpha", "ssm_beta"), names.gates, strict=True):
            yield stored, Named(gate, (heads, hidden), has_bias)
