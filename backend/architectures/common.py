"""Parts that the families share: sizes, activations, windows, and the ModelConfig made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from backend.api.checkpoint.model_files import REMEDY, shown, token_ids
from backend.api.checkpoint.quantised import FILE, parse_quantisation
from backend.api.errors import ConfigError
from backend.architectures.description import (
    Activation,
    Block,
    LayerConfig,
    LayerNames,
    ModelConfig,
    RopeConfig,
    TensorNames,
)
from backend.architectures.settings import Epsilon, HeadDim, NumLayers, Settings, Size

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}
LAYER_TYPES = ("full_attention", "sliding_attention")
LLAMA = LayerNames()
# After the attention and after the mlp each has a norm of its output, beside those of their inputs.
SANDWICH = LayerNames(
    attention_out_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
)
OUTPUTS_ONLY = LayerNames(
    attention_norm=None,
    attention_out_norm="post_attention_layernorm",
    mlp_norm=None,
    mlp_out_norm="post_feedforward_layernorm",
)


class Sizes(NamedTuple):
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_position: int


def read_sizes(
    settings: Settings, head_dim: int | None = None, inter_key: str = "intermediate_size", layers: int | None = None
) -> Sizes:
    """`head_dim`: what the family takes where config.json names none; None = the width divided by the heads. `layers`: their
    number, where config.json tells it otherwise than as `num_hidden_layers`.
    """
    hidden, heads = settings.need("hidden_size", Size), settings.need("num_attention_heads", Size)
    sizes = Sizes(
        vocab=settings.need("vocab_size", Size),
        hidden=hidden,
        intermediate=settings.need(inter_key, Size),
        layers=layers or settings.need("num_hidden_layers", NumLayers),
        heads=heads,
        kv_heads=settings.get("num_key_value_heads", Size, heads),
        head_dim=settings.get("head_dim", HeadDim, head_dim or 0) or _head_dim(hidden, heads),
        max_position=settings.need("max_position_embeddings", Size),
    )
    if sizes.heads % sizes.kv_heads:
        raise ConfigError(
            f"{FILE}: num_attention_heads {sizes.heads} is no multiple of num_key_value_heads {sizes.kv_heads}; {REMEDY}"
        )
    return sizes


def read_activation(settings: Settings, key: str = "hidden_act", default: str = "silu") -> Activation:
    name = settings.get(key, str, default)
    if name not in ACTIVATIONS:
        raise settings.unsupported(key, f"supported are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def read_window(settings: Settings, is_on: bool = True) -> int | None:
    """`sliding_window`; None where it is null or not on."""
    window = settings.find("sliding_window", int)
    if window is None or not is_on:
        return None
    if not 1 <= window <= 2**40:
        raise ConfigError(f"{FILE}: sliding_window is {shown(window)}, less than 1 or too large; null turns it off")
    return window


def read_layer_types(settings: Settings, num_layers: int, has_window: Callable[[int], bool]) -> list[bool]:
    """For each layer, if it has a window. `has_window` tells it of a layer where config.json has no `layer_types`."""
    kinds = settings.find("layer_types", list[str])
    if kinds is None:
        return [has_window(layer) for layer in range(num_layers)]
    kinds = [LAYER_TYPES[0] if kind == "attention" else kind for kind in kinds]  # the older name
    unknown = set(kinds) - set(LAYER_TYPES)
    if unknown:
        raise ConfigError(
            f"{FILE}: layer_types: layer type {shown(min(unknown))} is not supported; supported are "
            f"{' and '.join(LAYER_TYPES)}"
        )
    if len(kinds) != num_layers:
        raise ConfigError(f"{FILE}: layer_types has {len(kinds)} entries for num_hidden_layers {num_layers}; {REMEDY}")
    return [kind == LAYER_TYPES[1] for kind in kinds]


def read_pattern(settings: Settings, default: int) -> Callable[[int], bool]:
    """Every n-th layer attends to everything, and the others have a window: for files without `layer_types`."""
    settings.ignore("_sliding_window_pattern")
    every = settings.get("sliding_window_pattern", Size, settings.get("_sliding_window_pattern", Size, default))
    return lambda layer: bool((layer + 1) % every)


def alike(sizes: Sizes, window: int | None = None) -> tuple[LayerConfig, ...]:
    """Layers that do not differ."""
    return (LayerConfig(window),) * sizes.layers


def windowed(
    types: Iterable[bool], window: int | None, full: int | None = 0, sliding: int | None = 0
) -> list[LayerConfig]:
    """Layers with and without a window; `full` and `sliding` are their ropes."""
    return [LayerConfig(window, sliding) if has_window else LayerConfig(None, full) for has_window in types]


def read_block(settings: Settings, eps: float = 1e-6, **fields: Any) -> Block:
    """`eps`: of the norms, where config.json does not say it; `fields`: of Block."""
    norm_eps = settings.get("rms_norm_eps", Epsilon, eps)
    return Block(norm_eps=norm_eps, activation=read_activation(settings), **fields)


def read_window_layers(settings: Settings, sizes: Sizes) -> list[LayerConfig]:
    """Qwen's windows, where `use_sliding_window` says so: by `layer_types`, else from the layer `max_window_layers` on."""
    window = read_window(settings, settings.get("use_sliding_window", bool, False))
    first = settings.get("max_window_layers", int, 28)
    return windowed(read_layer_types(settings, sizes.layers, lambda layer: layer >= first), window)


def describe(
    settings: Settings,
    architecture: str,
    sizes: Sizes,
    layers: Sequence[LayerConfig],
    ropes: Sequence[RopeConfig],
    block: Block,
    names: TensorNames | LayerNames = LLAMA,
    tied: bool = False,
) -> ModelConfig:
    """`tied`: whether the head is the embedding, where config.json does not say it. Raises ConfigError."""
    content = settings.content
    _, kv_cache_dtype = parse_quantisation(content)
    dtype = settings.get("torch_dtype", str, "")
    return ModelConfig(
        architecture=architecture,
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_layers=sizes.layers,
        num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        max_position=sizes.max_position,
        tied_embeddings=settings.get("tie_word_embeddings", bool, tied),
        layers=tuple(layers),
        ropes=tuple(ropes),
        dtype=settings.get("dtype", str, dtype) or None,
        eos_ids=token_ids(content, "eos_token_id", FILE),
        quantization=None,  # backend/models/config.py adds what reads the tensors
        kv_cache_dtype=kv_cache_dtype,
        block=block,
        names=TensorNames(layer=names) if isinstance(names, LayerNames) else names,
    )


def _head_dim(hidden: int, heads: int) -> int:
    """The head dimension of a config.json that has no head_dim."""
    size, rest = divmod(hidden, heads)
    if rest or size % 2 or size == 0:
        raise ConfigError(
            f"{FILE}: num_attention_heads {heads} does not divide hidden_size {hidden} into even heads, and there is no "
            f"head_dim; {REMEDY}"
        )
    return size
