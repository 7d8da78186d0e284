"""Families with mixtures of experts: those of Llama's shape, some or all of whose mlps are many small ones behind a router."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from backend.api.checkpoint.model_files import REMEDY, shown
from backend.api.checkpoint.quantised import FILE
from backend.api.errors import ConfigError
from backend.architectures.common import (
    Sizes,
    alike,
    describe,
    read_block,
    read_layer_types,
    read_sizes,
    read_window,
    read_window_layers,
    windowed,
)
from backend.architectures.description import (
    Block,
    Experts,
    LayerConfig,
    LayerNames,
    ModelConfig,
    RopeConfig,
    StackedExperts,
    TensorNames,
)
from backend.architectures.llama import granite_factors
from backend.architectures.rope import PLAIN, RopeDefaults, read_rope
from backend.architectures.settings import Epsilon, Factor, NumExperts, Settings, Size

_SPARSE = "block_sparse_moe."
MIXTRAL = LayerNames(
    router=_SPARSE + "gate",
    choice_bias=_SPARSE + "e_score_correction_bias",
    experts=_SPARSE + "experts.",
    expert_gate_up=("w1", "w3"),
    expert_down="w2",
)
QWEN = LayerNames(
    shared_gate_up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    shared_down="mlp.shared_expert.down_proj",
)
GRANITE = LayerNames(
    router=_SPARSE + "router.layer",
    experts=_SPARSE + "experts.",
    expert_gate_up=("input_linear",),
    expert_down="output_linear",
    stacked=StackedExperts(_SPARSE + "input_linear.weight", _SPARSE + "output_linear.weight"),
    shared_gate_up=("shared_mlp.input_linear",),
    shared_down="shared_mlp.output_linear",
)
ERNIE = LayerNames(choice_bias="mlp.moe_statics.e_score_correction_bias")
GPT_OSS = LayerNames(
    router="mlp.router",
    expert_gate_up=("gate_up_proj",),
    stacked=StackedExperts(
        "mlp.experts.gate_up_proj",
        "mlp.experts.down_proj",
        "mlp.experts.gate_up_proj_bias",
        "mlp.experts.down_proj_bias",
        is_transposed=True,
        is_interleaved=True,
    ),
)
# Keys for the number of experts, and for the experts of a token.
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_PLACES = ("num_experts_per_tok", "moe_k")
_TRAINING = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "moe_aux_loss_coeff")


def qwen2_moe(settings: Settings, architecture: str) -> ModelConfig:
    bias = settings.get("qkv_bias", bool, True)
    shared = settings.get("shared_expert_intermediate_size", Size, 5632)
    return _qwen(settings, architecture, dict(shared=shared, has_shared_gate=True), QWEN, qkv_bias=bias)


def qwen3_moe(settings: Settings, architecture: str) -> ModelConfig:
    bias = settings.get("attention_bias", bool, False)
    return _qwen(settings, architecture, {}, LayerNames(), qkv_bias=bias, out_bias=bias, qk_norm="head")


def _qwen(
    settings: Settings,
    architecture: str,
    experts: dict[str, Any],
    names: LayerNames,
    **block: Any,
) -> ModelConfig:
    """Every n-th layer has experts, `decoder_sparse_step`, but for those of `mlp_only_layers`."""
    sizes = read_sizes(settings)
    step = settings.get("decoder_sparse_step", Size, 1)
    dense = settings.find("mlp_only_layers", list[int]) or []
    mixture = read_experts(
        settings,
        is_normalised=settings.get("norm_topk_prob", bool, False),
        intermediate=settings.need("moe_intermediate_size", Size),
        **experts,
    )
    layers = mixed(read_window_layers(settings, sizes), lambda layer: layer not in dense and (layer + 1) % step == 0)
    rope = read_rope(settings, sizes.head_dim)
    return _described(settings, architecture, sizes, layers, [rope], read_block(settings, **block), names, mixture)


def mixtral(settings: Settings, architecture: str) -> ModelConfig:
    sizes, window = read_sizes(settings), read_window(settings)
    mixture = read_experts(settings, intermediate=sizes.intermediate)
    return _all_alike(settings, architecture, sizes, MIXTRAL, mixture, RopeDefaults(theta=1e6), window, eps=1e-5)


def minimax_m2(settings: Settings, architecture: str) -> ModelConfig:
    """Sigmoids choose; queries and keys are normed over all heads, and rotated in part."""
    settings.ignore(
        "use_mtp", "num_mtp_modules", "mtp_transformer_layers", "attn_type_list", "shared_intermediate_size"
    )
    settings.ignore("layernorm_full_attention_beta", "layernorm_linear_attention_beta", "layernorm_mlp_beta")
    settings.only("use_qk_norm", True)
    settings.only("qk_norm_type", "per_layer")
    settings.only("scoring_func", "sigmoid")
    settings.only("use_routing_bias", True)
    sizes = read_sizes(settings, 128)
    mixture = read_experts(settings, intermediate=sizes.intermediate, scores="sigmoid", has_choice_bias=True)
    rotated = settings.get("rotary_dim", Size, sizes.head_dim)
    rope = RopeDefaults(theta=5e6, partial=rotated / sizes.head_dim)
    return _all_alike(settings, architecture, sizes, MIXTRAL, mixture, rope, qk_norm="row")


def olmoe(settings: Settings, architecture: str) -> ModelConfig:
    if settings.find("clip_qkv", float) is not None:
        raise settings.unsupported("clip_qkv", "null is")
    bias = settings.get("attention_bias", bool, False)
    sizes = read_sizes(settings)
    mixture = read_experts(
        settings, is_normalised=settings.get("norm_topk_prob", bool, False), intermediate=sizes.intermediate
    )
    fields: dict[str, Any] = dict(eps=1e-5, qk_norm="row", qkv_bias=bias, out_bias=bias)
    return _all_alike(settings, architecture, sizes, LayerNames(), mixture, **fields)


def granite_moe(settings: Settings, architecture: str) -> ModelConfig:
    sizes, bias = read_sizes(settings), settings.get("attention_bias", bool, False)
    shared = settings.get("shared_intermediate_size", int, 0)
    if shared < 0:
        raise settings.unsupported("shared_intermediate_size", "0 and more are")
    mixture = read_experts(settings, intermediate=sizes.intermediate, shared=shared)
    fields = dict(qkv_bias=bias, out_bias=bias, **granite_factors(settings))
    return _all_alike(settings, architecture, sizes, GRANITE, mixture, **fields)


def glm4_moe(settings: Settings, architecture: str) -> ModelConfig:
    """DeepSeek-V3's router in front of GLM's attention; the first layers are dense."""
    settings.ignore("num_mtp_layers")
    norm = "head" if settings.get("use_qk_norm", bool, False) else "none"
    bias = settings.get("attention_bias", bool, False)
    rope = RopeDefaults(partial=0.5)
    silent = DeepseekDefaults(dense=1, shared=1, is_normalised=True)
    return _deepseek(settings, architecture, rope, silent, eps=1e-5, qkv_bias=bias, qk_norm=norm)


def dots1(settings: Settings, architecture: str) -> ModelConfig:
    settings.only("scoring_func", "sigmoid")
    settings.only("topk_method", "noaux_tc")
    bias = settings.get("attention_bias", bool, False)
    silent = DeepseekDefaults(dense=0, shared=0, is_normalised=False)
    return _deepseek(settings, architecture, PLAIN, silent, qkv_bias=bias, out_bias=bias, qk_norm="head")


class DeepseekDefaults(NamedTuple):
    """Values of a family where config.json has none; they are those of transformers."""

    dense: int  # first layers without experts
    shared: int
    is_normalised: bool


def _deepseek(
    settings: Settings, architecture: str, rope: RopeDefaults, silent: DeepseekDefaults, **block: Any
) -> ModelConfig:
    sizes = read_sizes(settings)
    mixture = read_deepseek_experts(settings, silent)
    window = read_window(settings, settings.get("use_sliding_window", bool, True))
    first = settings.get("max_window_layers", int, 2**40)
    types = read_layer_types(settings, sizes.layers, lambda layer: window is not None and layer >= first)
    dense = settings.get("first_k_dense_replace", int, silent.dense)
    layers = mixed(windowed(types, window), lambda layer: layer >= dense)
    ropes = [read_rope(settings, sizes.head_dim, rope)]
    more = settings.get("num_nextn_predict_layers", int, 1)
    names = TensorNames(layer=LayerNames(), unused=behind(sizes.layers, more))
    return _described(settings, architecture, sizes, layers, ropes, read_block(settings, **block), names, mixture)


def read_deepseek_experts(settings: Settings, silent: DeepseekDefaults, **fields: Any) -> Experts:
    """DeepSeek-V3's, but for `fields` of Experts."""
    settings.ignore("ep_size", "moe_layer_freq", "pretraining_tp", "aux_loss_alpha", "seq_aux")
    inter = settings.need("moe_intermediate_size", Size)
    of_v3: dict[str, Any] = dict(
        scores="sigmoid",
        is_normalised=settings.get("norm_topk_prob", bool, silent.is_normalised),
        scale=settings.get("routed_scaling_factor", Factor, 1.0),
        groups=settings.get("n_group", Size, 1),
        kept_groups=settings.get("topk_group", Size, 1),
        adds_two_best=True,
        has_choice_bias=True,
        shared=inter * _read_shared(settings, "n_shared_experts", silent.shared),
    )
    return read_experts(settings, intermediate=inter, **(of_v3 | fields))


def ernie_moe(settings: Settings, architecture: str) -> ModelConfig:
    """Softmax with a bias for the choice; layers between two numbers have experts."""
    sizes = read_sizes(settings)
    settings.only("use_bias", False)
    inter = settings.need("moe_intermediate_size", Size)
    settings.ignore("moe_norm_min", "moe_capacity", "moe_gate", "moe_use_aux_free", "num_nextn_predict_layers")
    mixture = read_experts(
        settings,
        intermediate=inter,
        has_choice_bias=True,
        choice_bias_is_row=True,
        shared=inter * _read_shared(settings, "moe_num_shared_experts", 2),
    )
    first, every = settings.get("moe_layer_start_index", int, 1), settings.get("moe_layer_interval", Size, 1)
    last = settings.get("moe_layer_end_index", int, -1)
    last = sizes.layers - 1 if last == -1 else last
    layers = mixed(list(alike(sizes)), lambda layer: (layer + 1) % every == 0 and first <= layer <= last)
    rope = read_rope(settings, sizes.head_dim, RopeDefaults(theta=5e5))
    block = read_block(settings, eps=1e-5, rope_interleaved=True)
    return _described(settings, architecture, sizes, layers, [rope], block, ERNIE, mixture, tied=True)


def gpt_oss(settings: Settings, architecture: str) -> ModelConfig:
    """Attention sinks, biases everywhere, and a clamped SwiGLU (arXiv:2508.10925)."""
    settings.ignore("hidden_act", "experts_per_token", "initial_context_length")
    settings.only("swiglu_alpha", 1.702)
    settings.only("swiglu_limit", 7.0)
    sizes, window = read_sizes(settings, 64), read_window(settings)
    types = read_layer_types(settings, sizes.layers, lambda layer: layer % 2 == 0)
    if any(types) and window is None:
        raise ConfigError(f"{FILE}: it lacks the key sliding_window, which layers have by layer_types; {REMEDY}")
    bias = settings.get("attention_bias", bool, True)
    mixture = read_experts(settings, intermediate=sizes.intermediate, has_bias=True, router_bias=True)
    block = Block(
        norm_eps=settings.get("rms_norm_eps", Epsilon, 1e-5),
        activation="swiglu_oai",
        qkv_bias=bias,
        out_bias=bias,
        attention_sinks=True,
    )
    layers = mixed(windowed(types, window), lambda layer: True)
    rope = read_rope(settings, sizes.head_dim, RopeDefaults(theta=150000.0))
    return _described(settings, architecture, sizes, layers, [rope], block, GPT_OSS, mixture)


def read_experts(settings: Settings, **fields: Any) -> Experts:
    """fields: of Experts. Raises ConfigError for numbers that do not fit together."""
    settings.ignore(*_TRAINING)
    count, places = _one_of(settings, _COUNTS), _one_of(settings, _PLACES)
    experts = Experts(count=settings.need(count, NumExperts), places=settings.need(places, NumExperts), **fields)
    if experts.places > experts.count:
        raise ConfigError(f"{FILE}: {places} is {experts.places}, {count} {experts.count}; {REMEDY}")
    groups, kept = experts.groups, experts.kept_groups
    if experts.count % groups or not 1 <= kept <= groups or experts.places > kept * (experts.count // groups):
        raise ConfigError(
            f"{FILE}: {shown(groups)} groups of which {shown(kept)} are kept do not fit {experts.count} experts of which a token "
            f"has {experts.places}; {REMEDY}"
        )
    return experts


def behind(layers: int, more: int) -> tuple[str, ...]:
    """Names of the tensors of `more` layers that predict further tokens: they stand behind the model's own, and are not read."""
    numbers = range(layers, layers + min(max(more, 0), 64))
    return tuple(rf"(?:(?:model|backbone)\.layers|blk)\.{number}\..*" for number in numbers)


def _read_shared(settings: Settings, key: str, default: int) -> int:
    """The number of shared experts, which are one mlp of so many times the size."""
    count = settings.find(key, int) if settings.has(key) else default
    if not 0 <= (count or 0) <= 4096:
        raise settings.unsupported(key, "0 to 4096 are")
    return count or 0


def _one_of(settings: Settings, keys: tuple[str, ...]) -> str:
    """The first of several names of a setting that config.json has; transformers writes some families' under another."""
    settings.ignore(*keys)
    return next((key for key in keys if settings.has(key)), keys[0])


def mixed(layers: list[LayerConfig], has_experts: Callable[[int], bool]) -> list[LayerConfig]:
    return [replace(layer, has_experts=has_experts(index)) for index, layer in enumerate(layers)]


def _all_alike(
    settings: Settings,
    architecture: str,
    sizes: Sizes,
    names: LayerNames,
    experts: Experts,
    rope: RopeDefaults = PLAIN,
    window: int | None = None,
    **block: Any,
) -> ModelConfig:
    layers = mixed(list(alike(sizes, window)), lambda layer: True)
    ropes = [read_rope(settings, sizes.head_dim, rope)]
    return _described(settings, architecture, sizes, layers, ropes, read_block(settings, **block), names, experts)


def _described(
    settings: Settings,
    architecture: str,
    sizes: Sizes,
    layers: list[LayerConfig],
    ropes: Sequence[RopeConfig],
    block: Block,
    names: LayerNames | TensorNames,
    experts: Experts,
    tied: bool = False,
) -> ModelConfig:
    config = describe(settings, architecture, sizes, layers, ropes, block, names, tied)
    return with_experts(config, experts)


def with_experts(config: ModelConfig, experts: Experts) -> ModelConfig:
    """The model, whose layers with experts have these."""
    return replace(config, experts=experts) if any(layer.has_experts for layer in config.layers) else config
