"""Families with layers of Mamba 2 (arXiv:2405.21060) beside layers that attend: Granite 4, Bamba, Nemotron-H."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from msgspec.structs import replace

from backend.api.checkpoint.model_files import REMEDY, shown
from backend.api.checkpoint.quantised import FILE
from backend.api.errors import ConfigError
from backend.architectures.common import Sizes, describe, read_block, read_sizes
from backend.architectures.description import (
    Block,
    Experts,
    LayerConfig,
    LayerNames,
    ModelConfig,
    Recurrence,
    TensorNames,
)
from backend.architectures.hybrids import read_mixers, with_recurrence
from backend.architectures.llama import granite_factors
from backend.architectures.mixtures import GRANITE, behind, mixed, read_experts, with_experts
from backend.architectures.recurrent_names import RecurrentNames, Split
from backend.architectures.rope import RopeDefaults, read_rope
from backend.architectures.settings import MAX_LAYERS, Cap, Epsilon, Factor, HeadDim, Settings, Size

# Keys of training and of other implementations, and of tensors that predict further tokens.
_NEMOTRON_UNUSED = """
    layer_types num_logits_to_keep chunk_size expand mamba_proj_bias mamba_ssm_cache_dtype moe_shared_expert_overlap
    mtp_layers_block_type mtp_hybrid_override_pattern n_shared_experts norm_eps
    rescale_prenorm_residual rms_norm_eps time_step_floor time_step_limit time_step_max time_step_rank use_mamba_kernels
    moe_intermediate_size moe_shared_expert_intermediate_size n_routed_experts num_experts_per_tok n_group topk_group
    norm_topk_prob routed_scaling_factor intermediate_size mamba_state_dim
""".split()
_MIXERS = dict(
    mamba=LayerConfig(None, None, is_recurrent=True, has_mlp=False), attention=LayerConfig(None, None, has_mlp=False)
)
_BLOCKS = {
    **_MIXERS,
    "linear_attention": _MIXERS["mamba"],
    "full_attention": _MIXERS["attention"],
    "mlp": LayerConfig(None, None, has_mixer=False),
    "moe": LayerConfig(None, None, has_experts=True, has_mixer=False),
}
_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
NEMOTRON = LayerNames(
    qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    out="mixer.o_proj",
    gate_up=("mixer.up_proj",),
    down="mixer.down_proj",
    attention_norm="norm",
    mlp_norm="norm",
    router="mixer.gate",
    choice_bias="mixer.gate.e_score_correction_bias",
    experts="mixer.experts.",
    expert_gate_up=("up_proj",),
    shared_gate_up=("mixer.shared_experts.up_proj",),
    shared_down="mixer.shared_experts.down_proj",
)
MAMBA_TYPES = ("mamba", "linear_attention")


class Keys(NamedTuple):
    """A family's keys of config.json for the settings of Mamba layers."""

    heads: str = "mamba_n_heads"
    head_dim: str = "mamba_d_head"
    groups: str = "mamba_n_groups"
    state: str = "mamba_d_state"
    taps: str = "mamba_d_conv"
    conv_bias: str = "mamba_conv_bias"
    bias: str = "mamba_proj_bias"


def granite4(settings: Settings, architecture: str) -> ModelConfig:
    """Granite 4 with and without layers of Mamba, and with and without experts."""
    settings.only("normalization_function", "rmsnorm")
    settings.only("position_embedding_type", "rope", "nope")
    has_experts = settings.has("num_local_experts") and settings.content["num_local_experts"] != 0
    sizes = read_sizes(settings, inter_key="intermediate_size" if has_experts else "shared_intermediate_size")
    kinds = read_mixers(settings, sizes.layers, MAMBA_TYPES, ())
    rotates = settings.content.get("position_embedding_type") == "rope"
    layers = [LayerConfig(rope=0 if rotates else None, is_recurrent=flag) for flag in kinds]
    bias = settings.get("attention_bias", bool, False)
    block = read_block(settings, qkv_bias=bias, out_bias=bias, **granite_factors(settings))
    recurrence = _read_mamba(settings, sizes)
    names = replace(GRANITE, gate_up=GRANITE.shared_gate_up, down=GRANITE.shared_down, **_mamba_names(recurrence))
    config = describe(settings, architecture, sizes, layers, [read_rope(settings, sizes.head_dim)], block, names)
    if has_experts:
        mixture = read_experts(
            settings, intermediate=sizes.intermediate, shared=settings.get("shared_intermediate_size", Size, 1024)
        )
        config = with_experts(replace(config, layers=tuple(mixed(layers, lambda layer: True))), mixture)
    settings.ignore("intermediate_size", "num_experts_per_tok", "router_aux_loss_coef", "output_router_logits")
    return with_recurrence(config, recurrence) if any(kinds) else config


def bamba(settings: Settings, architecture: str) -> ModelConfig:
    """Half of a head is rotated."""
    settings.ignore("num_logits_to_keep", "layers_block_type", "layer_types")
    sizes = read_sizes(settings)
    settings.only("attn_rotary_emb", sizes.head_dim // 2)
    attends = settings.find("attn_layer_indices", list[int]) or []
    layers = [LayerConfig(is_recurrent=layer not in attends) for layer in range(sizes.layers)]
    rope = read_rope(settings, sizes.head_dim, RopeDefaults(partial=0.5))
    bias = settings.get("attention_bias", bool, False)
    mlp_bias = settings.get("mlp_bias", bool, False)
    block = read_block(settings, eps=1e-5, qkv_bias=bias, out_bias=bias, mlp_bias=mlp_bias)
    recurrence = _read_mamba(settings, sizes)
    names = LayerNames(
        gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
        mlp_norm="pre_ff_layernorm",
        **_mamba_names(recurrence),
    )
    tensors = TensorNames(norm="model.final_layernorm", layer=names)
    config = describe(settings, architecture, sizes, layers, [rope], block, tensors)
    return with_recurrence(config, recurrence) if any(each.is_recurrent for each in layers) else config


def nemotron_h(settings: Settings, architecture: str) -> ModelConfig:
    """Each layer is one block behind one norm: Mamba, attention without positions, an mlp, or experts (arXiv:2504.03624)."""
    settings.ignore(*_NEMOTRON_UNUSED)
    settings.only("attention_bias", False)
    settings.only("mlp_hidden_act", "relu2")
    settings.only("mamba_hidden_act", "silu")
    settings.only("residual_in_fp32", False)
    if settings.find("moe_latent_size", int) is not None:
        raise settings.unsupported("moe_latent_size", "null is")
    layers = _read_blocks(settings)
    sizes = read_sizes(settings, settings.get("attention_head_dim", HeadDim, 128), layers=len(layers))
    block = Block(
        norm_eps=settings.get("layer_norm_epsilon", Epsilon, 1e-5),
        activation="relu2",
        gated=False,
        mlp_bias=settings.get("mlp_bias", bool, False),
    )
    keys = Keys(
        "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel", "use_conv_bias", "use_bias"
    )
    heads, head_dim = settings.get(keys.heads, Size, 128), settings.get(keys.head_dim, Size, 64)
    limits = settings.get("time_step_min", Cap, 0.001), math.inf  # as in transformers
    recurrence = _mamba2(settings, keys, heads, head_dim, limits)
    names = replace(NEMOTRON, **_mamba_names(recurrence, "mixer"))
    unused = (r"mtp\..*", *behind(len(layers), settings.get("num_nextn_predict_layers", int, 0)))
    tensors = TensorNames("backbone.embeddings", "backbone.layers.", "backbone.norm_f", unused=unused, layer=names)
    config = describe(settings, architecture, sizes, layers, [read_rope(settings, sizes.head_dim)], block, tensors)
    if any(layer.has_experts for layer in layers):
        config = with_experts(config, _nemotron_experts(settings))
    return with_recurrence(config, recurrence) if any(layer.is_recurrent for layer in layers) else config


def _nemotron_experts(settings: Settings) -> Experts:
    return read_experts(
        settings,
        intermediate=settings.need("moe_intermediate_size", Size),
        scores="sigmoid",
        is_normalised=settings.get("norm_topk_prob", bool, True),
        scale=settings.get("routed_scaling_factor", Factor, 1.0),
        groups=settings.get("n_group", Size, 1),
        kept_groups=settings.get("topk_group", Size, 1),
        adds_two_best=True,
        has_choice_bias=True,
        shared=settings.need("moe_shared_expert_intermediate_size", Size),
    )


def _read_blocks(settings: Settings) -> list[LayerConfig]:
    """By `layers_block_type`, or a letter for each."""
    kinds = settings.find("layers_block_type", list[str])
    pattern = settings.find("hybrid_override_pattern", str)
    if kinds is None:
        kinds = [_LETTERS.get(letter, letter) for letter in pattern or ""]
    unknown = sorted(set(kinds) - set(_BLOCKS))
    if unknown:
        raise ConfigError(
            f"{FILE}: layers_block_type: {shown(unknown[0])} is not supported; supported are {', '.join(_BLOCKS)}"
        )
    if not 0 < len(kinds) <= MAX_LAYERS:
        raise ConfigError(
            f"{FILE}: layers_block_type names {len(kinds)} layers, 1 to {MAX_LAYERS} are needed; {REMEDY}"
        )
    settings.only("num_hidden_layers", len(kinds))
    return [_BLOCKS[kind] for kind in kinds]


def _read_mamba(settings: Settings, sizes: Sizes) -> Recurrence:
    """The width of all heads is `mamba_expand` times that of the model. Raises ConfigError for heads that are not."""
    settings.ignore("mamba_chunk_size")
    keys = Keys()
    heads = settings.get(keys.heads, Size, 128)
    width = settings.get("mamba_expand", Size, 2) * sizes.hidden
    is_named = settings.has(keys.head_dim) and settings.content[keys.head_dim] != "auto"
    head_dim = settings.need(keys.head_dim, Size) if is_named else width // heads
    if heads * head_dim != width:
        raise ConfigError(
            f"{FILE}: {keys.heads} {shown(heads)} times {keys.head_dim} {shown(head_dim)} is not mamba_expand times hidden_size, "
            f"{shown(width)}; {REMEDY}"
        )
    return _mamba2(settings, keys, heads, head_dim, _read_limits(settings))


def _mamba2(settings: Settings, keys: Keys, heads: int, head_dim: int, limits: tuple[float, float]) -> Recurrence:
    groups = settings.get(keys.groups, Size, 1)
    return Recurrence(
        kind="mamba2",
        taps=settings.get(keys.taps, Size, 4),
        key_heads=groups,
        value_heads=heads,
        key_dim=settings.get(keys.state, Size, 256),
        value_dim=head_dim,
        has_conv_bias=settings.get(keys.conv_bias, bool, True),
        has_bias=settings.get(keys.bias, bool, False),
        norm_groups=groups,
        gates_first=True,
        limits=limits,
    )


def _read_limits(settings: Settings) -> tuple[float, float]:
    """`time_step_limit`; transformers writes infinity as an object, because JSON has no such number."""
    given = settings.find("time_step_limit", list[Any])
    if given is None:
        return 0.0, math.inf
    low, high = (_number(each) for each in given) if len(given) == 2 else (math.nan, math.nan)
    if not 0 <= low <= high or low == math.inf:
        raise settings.unsupported("time_step_limit", "two numbers from 0 on, the lesser first, are")
    return low, high


def _number(given: Any) -> float:
    """Not a number where it is none."""
    if isinstance(given, dict):
        given = given.get("__float__")
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    return math.inf if given == "Infinity" or (is_number and given > 1e30) else float(given) if is_number else math.nan


def _mamba_names(recurrence: Recurrence, module: str = "mamba") -> dict[str, Any]:
    """Fields of LayerNames. One tensor holds the gate, what is convolved, and the steps."""
    stored = f"{module}.in_proj"
    parts = (
        (f"{stored}.gate", recurrence.num_values),
        (f"{stored}.convolved", recurrence.channels),
        (f"{stored}.step", recurrence.value_heads),
    )
    names = RecurrentNames(
        inputs=(parts[1][0], parts[0][0]),
        gates=(parts[2][0],),
        out=f"{module}.out_proj",
        convolution=f"{module}.conv1d",
        log_rate=f"{module}.A_log",
        dt_bias=f"{module}.dt_bias",
        skip=f"{module}.D",
        norm=f"{module}.norm",
    )
    return dict(recurrent=names, splits=(Split(stored, 1, parts),))
