"""The architectures of GGUF files: a row for each `general.architecture` that is served.

A row names the family of config.json that the file is one of, what its settings say beyond those of all
(backend/architectures/gguf/config.py), and how its numbers differ from those of a Hugging Face checkpoint. Source: llama.cpp's
converter (`conversion/`) and what its `src/models/` read; where llama.cpp leaves out what a published model has, such as the
window of Phi-3, the published model counts.

To add an architecture: a row here, and a case in tests/families/test_gguf.py; `python -m tools.write_gguf_table` and
`write_model_table` write the pages.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from backend.api.checkpoint.gguf import GgufHeader
from backend.api.checkpoint.model_files import shown
from backend.api.errors import ConfigError
from backend.architectures.gguf import latent, recurrent
from backend.architectures.gguf.routers import SIGMOID, SOFTMAX, Keys, check_router, experts_of, sigmoid_experts
from backend.architectures.gguf.settings import GgufSettings
from backend.architectures.settings import Cap, Factor, Size


class GgufFamily(NamedTuple):
    """`architecture`: of config.json. `keys`: what its config.json has besides the keys of all."""

    architecture: str
    keys: Callable[[GgufSettings], Keys] = lambda settings: {}
    epsilon: str = "rms_norm_eps"  # the key of config.json; layer norms have another; empty: `keys` has it
    rotates_pairs: bool = False  # rows of queries and keys are put in pairs by llama.cpp's converter
    adds_one: bool = False  # the weights of norms are stored with the 1 that the family adds to them
    mlp_norm: str = "ffn_norm"  # the tensor of the norm before the mlp
    last_norm: str = "output_norm"
    truncates: bool = True  # YaRN's borders are whole pairs; files do not say it
    local_theta: float | None = None  # theta of layers with a window, where the file says none; 0: that of the others


def _biases(settings: GgufSettings) -> Keys:
    return dict(
        attention_bias=settings.has_tensor("attn_q.bias") or settings.has_tensor("attn_qkv.bias"),
        mlp_bias=settings.has_tensor("ffn_gate.bias"),
    )


def _llama(settings: GgufSettings) -> Keys:
    """Mistral's files say llama as well; with a window they are read as Mistral's, with experts as Mixtral's."""
    window = _window(settings)
    if settings.get("expert_count", int):
        check_router(settings, True, SOFTMAX)
        return experts_of(settings, "num_local_experts") | dict(
            architectures=["MixtralForCausalLM"], sliding_window=window
        )
    return _biases(settings) | (dict(architectures=["MistralForCausalLM"], sliding_window=window) if window else {})


def _mistral3(settings: GgufSettings) -> Keys:
    """Ministral 3 has YaRN and queries that grow; without them it is a Mistral, as in Mistral Small 3.1."""
    if _beta(settings):
        return {}
    return dict(architectures=["MistralForCausalLM"], sliding_window=_window(settings))


def _beta(settings: GgufSettings) -> float:
    return settings.get("attention.temperature_scale", float) or 0.0


def _qwen3(settings: GgufSettings) -> Keys:
    return dict(attention_bias=settings.has_tensor("attn_q.bias"))


def _gemma2(settings: GgufSettings) -> Keys:
    return dict(
        sliding_window=_window(settings) or 4096,
        query_pre_attn_scalar=_query_scalar(settings, layers_of_27b=46),
        attn_logit_softcapping=settings.get("attn_logit_softcapping", Cap),
        final_logit_softcapping=settings.get("final_logit_softcapping", Cap),
    )


def _gemma3(settings: GgufSettings) -> Keys:
    """Without a window all layers attend to everything."""
    window = _window(settings)
    layers = settings.need("block_count", Size)
    types = _layer_types(settings) if window else ["full_attention"] * layers
    return dict(
        sliding_window=window,
        layer_types=types,
        query_pre_attn_scalar=_query_scalar(settings, layers_of_27b=62),
        final_logit_softcapping=settings.get("final_logit_softcapping", Cap),
    )


def _query_scalar(settings: GgufSettings, layers_of_27b: int) -> int:
    """The files do not say it: in the model of 27 B it is the width of a head, in all others the dimension of one."""
    heads, hidden = settings.need("attention.head_count", Size), settings.need("embedding_length", Size)
    if settings.need("block_count", Size) == layers_of_27b:
        return hidden // heads
    return settings.get("attention.key_length", Size) or hidden // heads


def _phi3(settings: GgufSettings) -> Keys:
    original = settings.get("rope.scaling.original_context_length", Size)
    return dict(sliding_window=_window(settings), original_max_position_embeddings=original)


def _glm(settings: GgufSettings) -> Keys:
    return dict(attention_bias=settings.has_tensor("attn_q.bias") or settings.has_tensor("attn_qkv.bias"))


def _granite(settings: GgufSettings) -> Keys:
    """The `shared_mlp` of Granite 4 without experts is stored as a plain one, and a false `finetuned` turns rotation off."""
    if settings.get("rope.scaling.finetuned", bool) is False:
        raise settings.unsupported("rope.scaling.finetuned", "false, a model without rotation")
    return _biases(settings) | recurrent.multipliers(settings)


def _olmo2(settings: GgufSettings) -> Keys:
    """With a window it is OLMo 3."""
    window = _window(settings)
    bias = dict(attention_bias=settings.has_tensor("attn_q.bias"))
    if not window:
        return bias
    return bias | dict(
        architectures=["Olmo3ForCausalLM"],
        sliding_window=window,
        layer_types=_layer_types(settings),
    )


def _exaone4(settings: GgufSettings) -> Keys:
    window = _window(settings)
    return dict(sliding_window=window, layer_types=_layer_types(settings) if window else None)


def _cohere(settings: GgufSettings) -> Keys:
    return dict(logit_scale=settings.get("logit_scale", Factor), attention_bias=settings.has_tensor("attn_q.bias"))


def _cohere2(settings: GgufSettings) -> Keys:
    return _cohere(settings) | dict(sliding_window=_window(settings), layer_types=_layer_types(settings))


def _starcoder2(settings: GgufSettings) -> Keys:
    return dict(use_bias=settings.has_tensor("attn_q.bias"), sliding_window=_window(settings))


def _stablelm(settings: GgufSettings) -> Keys:
    """`use_parallel_residual` is true in files of models that have none; the norm of the mlp tells."""
    return dict(
        use_parallel_residual=not settings.has_tensor("ffn_norm.weight"),
        use_qkv_bias=settings.has_tensor("attn_q.bias"),
    )


def _gpt_neox(settings: GgufSettings) -> Keys:
    return dict(
        use_parallel_residual=settings.need("use_parallel_residual", bool),
        attention_bias=settings.has_tensor("attn_qkv.bias"),
    )


def _seed_oss(settings: GgufSettings) -> Keys:
    return _biases(settings) | dict(attention_out_bias=settings.has_tensor("attn_output.bias"))


def _ernie(settings: GgufSettings) -> Keys:
    return dict(use_bias=settings.has_tensor("attn_q.bias"))


def _qwen2_moe(settings: GgufSettings) -> Keys:
    check_router(settings, False, SOFTMAX)
    shared = settings.get("expert_shared_feed_forward_length", Size)
    return experts_of(settings) | dict(
        shared_expert_intermediate_size=shared or settings.rows_of("ffn_up_shexp.weight"), norm_topk_prob=False
    )


def _qwen3_moe(settings: GgufSettings) -> Keys:
    check_router(settings, True, SOFTMAX)
    return experts_of(settings) | _qwen3(settings) | dict(norm_topk_prob=True)


def _olmoe(settings: GgufSettings) -> Keys:
    check_router(settings, False, SOFTMAX)
    own = experts_of(settings) | dict(moe_intermediate_size=None, norm_topk_prob=False)
    return own | dict(attention_bias=settings.has_tensor("attn_q.bias"))


def _granite_moe(settings: GgufSettings) -> Keys:
    check_router(settings, True, SOFTMAX)
    shared = settings.get("expert_shared_feed_forward_length", int)
    own = experts_of(settings, "num_local_experts") | dict(moe_intermediate_size=None, mlp_bias=None)
    return _granite(settings) | own | dict(shared_intermediate_size=shared or None)


def _glm4_moe(settings: GgufSettings) -> Keys:
    """Files hold layers that predict more tokens at once behind those of the model."""
    own = dict(use_qk_norm=settings.has_tensor("attn_q_norm.weight"))
    extra = settings.get("nextn_predict_layers", int) or 0
    if not 0 <= extra < settings.need("block_count", Size):
        raise settings.unsupported("nextn_predict_layers", extra)
    layers = dict(num_hidden_layers=settings.need("block_count", Size) - extra, num_nextn_predict_layers=extra)
    return sigmoid_experts(settings) | _glm(settings) | own | layers


def _dots1(settings: GgufSettings) -> Keys:
    return sigmoid_experts(settings) | dict(attention_bias=settings.has_tensor("attn_q.bias"))


def _ernie_moe(settings: GgufSettings) -> Keys:
    check_router(settings, True, SOFTMAX)
    own = experts_of(settings, "moe_num_experts", "moe_k")
    inter, shared = own["moe_intermediate_size"], settings.rows_of("ffn_up_shexp.weight") or 0
    settings.get("expert_shared_count", int)
    return own | dict(
        moe_num_shared_experts=shared // inter if inter else 0,
        moe_layer_start_index=settings.get("leading_dense_block_count", int),
        moe_layer_interval=settings.get("interleave_moe_layer_step", Size),
    )


def _minimax_m2(settings: GgufSettings) -> Keys:
    check_router(settings, True, SIGMOID)
    return experts_of(settings, "num_local_experts") | dict(
        intermediate_size=settings.need("expert_feed_forward_length", Size), moe_intermediate_size=None
    )


def _gpt_oss(settings: GgufSettings) -> Keys:
    check_router(settings, True, SOFTMAX)
    own = experts_of(settings, "num_local_experts") | dict(moe_intermediate_size=None, sliding_window=_window(settings))
    return own | dict(intermediate_size=settings.need("expert_feed_forward_length", Size))


def _window(settings: GgufSettings) -> int | None:
    return settings.get("attention.sliding_window", int) or None


def _layer_types(settings: GgufSettings) -> list[str] | None:
    """Which layers have a window, where the file says it: a list, or every n-th has none. None: as in the family."""
    given: Any = settings.get("attention.sliding_window_pattern", Any)
    if given is None:
        return None
    layers = settings.need("block_count", Size)
    if isinstance(given, int) and not isinstance(given, bool) and given > 0:
        given = [bool((layer + 1) % given) for layer in range(layers)]
    if not isinstance(given, list) or len(given) < layers or any(each not in (0, 1) for each in given):
        raise settings.unsupported("attention.sliding_window_pattern", f"{shown(given)} for {layers} layers")
    return ["sliding_attention" if each else "full_attention" for each in given[:layers]]


GGUF_FAMILIES: dict[str, GgufFamily] = {
    "llama": GgufFamily("LlamaForCausalLM", _llama, rotates_pairs=True),
    "mistral3": GgufFamily("Ministral3ForCausalLM", _mistral3, rotates_pairs=True),
    "qwen2": GgufFamily("Qwen2ForCausalLM"),
    "qwen3": GgufFamily("Qwen3ForCausalLM", _qwen3),
    "gemma": GgufFamily("GemmaForCausalLM", adds_one=True),
    "gemma2": GgufFamily("Gemma2ForCausalLM", _gemma2, adds_one=True),
    "gemma3": GgufFamily("Gemma3ForCausalLM", _gemma3, adds_one=True, local_theta=10_000.0),
    "phi3": GgufFamily("Phi3ForCausalLM", _phi3),
    "chatglm": GgufFamily("GlmForCausalLM", _glm),
    "glm4": GgufFamily("Glm4ForCausalLM", _glm),
    "granite": GgufFamily("GraniteForCausalLM", _granite, rotates_pairs=True),
    "smollm3": GgufFamily("SmolLM3ForCausalLM", _biases, rotates_pairs=True),
    "olmo2": GgufFamily("Olmo2ForCausalLM", _olmo2, local_theta=0.0),
    "exaone4": GgufFamily("Exaone4ForCausalLM", _exaone4),
    "command-r": GgufFamily("CohereForCausalLM", _cohere, "layer_norm_eps"),
    "cohere2": GgufFamily("Cohere2ForCausalLM", _cohere2, "layer_norm_eps"),
    "starcoder2": GgufFamily("Starcoder2ForCausalLM", _starcoder2, "norm_epsilon"),
    "stablelm": GgufFamily("StableLmForCausalLM", _stablelm, "layer_norm_eps"),
    "gptneox": GgufFamily("GPTNeoXForCausalLM", _gpt_neox, "layer_norm_eps"),
    "seed_oss": GgufFamily("SeedOssForCausalLM", _seed_oss, mlp_norm="post_attention_norm"),
    "ernie4_5": GgufFamily("Ernie4_5ForCausalLM", _ernie),
    "qwen2moe": GgufFamily("Qwen2MoeForCausalLM", _qwen2_moe),
    "qwen3moe": GgufFamily("Qwen3MoeForCausalLM", _qwen3_moe),
    "olmoe": GgufFamily("OlmoeForCausalLM", _olmoe),
    "granitemoe": GgufFamily("GraniteMoeSharedForCausalLM", _granite_moe, rotates_pairs=True),
    "glm4moe": GgufFamily("Glm4MoeForCausalLM", _glm4_moe, mlp_norm="post_attention_norm"),
    "dots1": GgufFamily("Dots1ForCausalLM", _dots1),
    "ernie4_5-moe": GgufFamily("Ernie4_5_MoeForCausalLM", _ernie_moe),
    "minimax-m2": GgufFamily("MiniMaxM2ForCausalLM", _minimax_m2),
    "gpt-oss": GgufFamily("GptOssForCausalLM", _gpt_oss, mlp_norm="post_attention_norm", truncates=False),
    "deepseek2": GgufFamily("DeepseekV3ForCausalLM", latent.deepseek2),
    "qwen35": GgufFamily("Qwen3_5ForCausalLM", recurrent.qwen3_5, adds_one=True, mlp_norm="post_attention_norm"),
    "qwen35moe": GgufFamily(
        "Qwen3_5MoeForCausalLM", recurrent.qwen3_5_moe, adds_one=True, mlp_norm="post_attention_norm"
    ),
    "qwen3next": GgufFamily(
        "Qwen3NextForCausalLM", recurrent.qwen3_next, adds_one=True, mlp_norm="post_attention_norm"
    ),
    "lfm2": GgufFamily("Lfm2ForCausalLM", recurrent.lfm2, "norm_eps", last_norm="token_embd_norm"),
    "lfm2moe": GgufFamily("Lfm2MoeForCausalLM", recurrent.lfm2_moe, "norm_eps", last_norm="token_embd_norm"),
    "nemotron_h": GgufFamily("NemotronHForCausalLM", recurrent.nemotron_h, "", mlp_norm="attn_norm"),
    "nemotron_h_moe": GgufFamily("NemotronHForCausalLM", recurrent.nemotron_h, "", mlp_norm="attn_norm"),
    "granitehybrid": GgufFamily("GraniteMoeHybridForCausalLM", recurrent.granite_hybrid, rotates_pairs=True),
}


def gguf_architecture(header: GgufHeader) -> str:
    """general.architecture of a GGUF file. Raises ConfigError for one that is not supported."""
    name = header.need("general.architecture", str)
    if name not in GGUF_FAMILIES:
        raise ConfigError(
            f"{header.name}: general.architecture {shown(name)} is not supported; supported are "
            f"{', '.join(GGUF_FAMILIES)}: use a model of one of them"
        )
    return name


def rope_of(settings: GgufSettings, head_dim: int, tables: dict[str, list[float]]) -> Keys:
    """The `rope_parameters` of config.json. `tables`: the divisors of frequencies that the file holds, by the tensor's name."""
    theta = settings.get("rope.freq_base", Factor) or 10_000.0
    rope: Keys = dict(rope_theta=theta)
    if (local := GGUF_FAMILIES[settings.architecture].local_theta) is not None and _window(settings):
        local = settings.get("rope.freq_base_swa", Factor) or local or theta
        kinds = dict(sliding_attention=dict(rope_type="default", rope_theta=local))
        return kinds | dict(full_attention=_rope_of(settings, head_dim, tables, rope))
    return _rope_of(settings, head_dim, tables, rope)


def _rope_of(settings: GgufSettings, head_dim: int, tables: dict[str, list[float]], rope: Keys) -> Keys:
    rotated = settings.get("rope.dimension_count", Size) or head_dim
    if rotated > head_dim or rotated % 2:
        raise settings.unsupported("rope.dimension_count", f"{rotated}, an even number up to {head_dim} is needed")
    if rotated != head_dim:
        rope["partial_rotary_factor"] = rotated / head_dim
    for name, table in tables.items():
        if len(table) != rotated // 2:
            raise settings.unsupported("rope.dimension_count", f"{rotated}, and {name} has {len(table)} values")
    kind = settings.get("rope.scaling.type", str) or "linear"
    factor = settings.get("rope.scaling.factor", float) or settings.get("rope.scale_linear", float) or 1.0
    if LONG in tables and SHORT in tables:
        return rope | _longrope(settings, tables)
    if kind == "yarn":
        return rope | _yarn(settings, factor)
    if kind not in ("none", "linear", "longrope"):
        raise settings.unsupported("rope.scaling.type", kind)
    if kind != "linear":
        factor = 1.0
    if FREQUENCIES in tables:
        return rope | dict(rope_type="factors", factors=[factor * each for each in tables[FREQUENCIES]])
    return rope | (dict(rope_type="default") if factor == 1.0 else dict(rope_type="linear", factor=factor))


FREQUENCIES = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
TABLES = (FREQUENCIES, LONG, SHORT)


def _longrope(settings: GgufSettings, tables: dict[str, list[float]]) -> Keys:
    positions = settings.need("context_length", Size)
    original = settings.get("rope.scaling.original_context_length", Size) or positions
    return dict(
        rope_type="longrope",
        long_factor=tables[LONG],
        short_factor=tables[SHORT],
        original_max_position_embeddings=original,
        attention_factor=settings.get("rope.scaling.attn_factor", Factor) or 1.0,
    )


def _yarn(settings: GgufSettings, factor: float) -> Keys:
    """llama.cpp multiplies YaRN's own factor of cos and sin, or the quotient that `yarn_log_multiplier` asks for, by
    `attn_factor`.
    """
    keys: Keys = dict(
        rope_type="yarn",
        factor=factor,
        original_max_position_embeddings=settings.need("rope.scaling.original_context_length", Size),
        beta_fast=settings.get("rope.scaling.yarn_beta_fast", Factor) or 32.0,
        beta_slow=settings.get("rope.scaling.yarn_beta_slow", Factor) or 1.0,
        truncate=GGUF_FAMILIES[settings.architecture].truncates,
    )
    all_dims = settings.get("rope.scaling.yarn_log_multiplier", float) or 0.0
    own = settings.get("rope.scaling.attn_factor", Factor) or settings.get("rope.scaling.yarn_attn_factor", Factor)
    if own is not None and own != 1.0:
        keys["attention_factor"] = own * (1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0)
    elif settings.get("attention.kv_lora_rank", Size):
        keys |= latent.log_factor(settings)
    elif all_dims:
        keys |= dict(mscale=1.0, mscale_all_dim=all_dims)
    if beta := _beta(settings):
        keys["llama_4_scaling_beta"] = beta
    return keys
