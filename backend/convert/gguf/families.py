"""The settings and tensors of a GGUF file, made of a Hugging Face checkpoint's: a row for each architecture in RULES.

Names are those of llama.cpp's own package, gguf; the rest follows the rules of llama.cpp's converter (`conversion/`), whose files
tests/families/test_gguf.py was compared with.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import gguf
import numpy as np
from gguf import MODEL_ARCH as ARCH
from numpy.typing import NDArray
from torch import Tensor

from backend.api.checkpoint.model_files import shown
from backend.api.errors import ConfigError

# architecture of config.json -> llama.cpp's
RULES: dict[str, ARCH] = {
    "LlamaForCausalLM": ARCH.LLAMA,
    "MistralForCausalLM": ARCH.LLAMA,
    "Ministral3ForCausalLM": ARCH.MISTRAL3,
    "Qwen2ForCausalLM": ARCH.QWEN2,
    "Qwen3ForCausalLM": ARCH.QWEN3,
    "GemmaForCausalLM": ARCH.GEMMA,
    "Gemma2ForCausalLM": ARCH.GEMMA2,
    "Gemma3ForCausalLM": ARCH.GEMMA3,
    "Phi3ForCausalLM": ARCH.PHI3,
    "GlmForCausalLM": ARCH.CHATGLM,
    "Glm4ForCausalLM": ARCH.GLM4,
    "GraniteForCausalLM": ARCH.GRANITE,
    "GraniteMoeHybridForCausalLM": ARCH.GRANITE,
    "SmolLM3ForCausalLM": ARCH.SMOLLM3,
    "Olmo2ForCausalLM": ARCH.OLMO2,
    "Olmo3ForCausalLM": ARCH.OLMO2,
    "Exaone4ForCausalLM": ARCH.EXAONE4,
    "CohereForCausalLM": ARCH.COMMAND_R,
    "Cohere2ForCausalLM": ARCH.COHERE2,
    "Starcoder2ForCausalLM": ARCH.STARCODER2,
    "StableLmForCausalLM": ARCH.STABLELM,
    "GPTNeoXForCausalLM": ARCH.GPTNEOX,
    "SeedOssForCausalLM": ARCH.SEED_OSS,
    "Ernie4_5ForCausalLM": ARCH.ERNIE4_5,
    "Qwen2MoeForCausalLM": ARCH.QWEN2MOE,
    "Qwen3MoeForCausalLM": ARCH.QWEN3MOE,
    "MixtralForCausalLM": ARCH.LLAMA,
    "OlmoeForCausalLM": ARCH.OLMOE,
    "GraniteMoeForCausalLM": ARCH.GRANITE_MOE,
    "GraniteMoeSharedForCausalLM": ARCH.GRANITE_MOE,
    "Glm4MoeForCausalLM": ARCH.GLM4_MOE,
    "Dots1ForCausalLM": ARCH.DOTS1,
    "Ernie4_5_MoeForCausalLM": ARCH.ERNIE4_5_MOE,
    "MiniMaxM2ForCausalLM": ARCH.MINIMAXM2,
    "GptOssForCausalLM": ARCH.GPT_OSS,
}
# Rows of queries and keys are put in pairs.
_PAIRS = (ARCH.LLAMA, ARCH.MISTRAL3, ARCH.GRANITE, ARCH.GRANITE_MOE, ARCH.SMOLLM3)
_GEMMAS = (ARCH.GEMMA, ARCH.GEMMA2, ARCH.GEMMA3)  # the weights of norms are stored with the 1 that is added to them
_WITHOUT_WINDOW = (ARCH.LLAMA, ARCH.QWEN2, ARCH.SMOLLM3, ARCH.STARCODER2, ARCH.QWEN2MOE, ARCH.QWEN3MOE, ARCH.DOTS1)
_SIGMOID = (ARCH.GLM4_MOE, ARCH.DOTS1, ARCH.MINIMAXM2)  # scores of experts; all others have a softmax
_SAY_NORM = (ARCH.GLM4_MOE, ARCH.DOTS1)  # files say whether the weights of experts are divided by their sum
_PREDICT_MORE = (ARCH.GLM4_MOE, ARCH.DOTS1)  # layers behind the model's own are left out
_MLP_IS_EXPERT = (ARCH.MINIMAXM2, ARCH.GPT_OSS)  # intermediate_size is that of an expert, and written as such
_SEVERAL_WINDOWS = (ARCH.OLMO2, ARCH.EXAONE4)
# key of config.json -> the writer's method
_NUMBERS = {
    "vocab_size": "add_vocab_size",
    "hidden_size": "add_embedding_length",
    "num_hidden_layers": "add_block_count",
    "num_attention_heads": "add_head_count",
    "num_key_value_heads": "add_head_count_kv",
    "max_position_embeddings": "add_context_length",
    "rms_norm_eps": "add_layer_norm_rms_eps",
    "layer_norm_eps": "add_layer_norm_eps",
    "norm_epsilon": "add_layer_norm_eps",
    "embedding_multiplier": "add_embedding_scale",
    "residual_multiplier": "add_residual_scale",
    "attention_multiplier": "add_attention_scale",
    "logits_scaling": "add_logit_scale",
    "logit_scale": "add_logit_scale",
    "attn_logit_softcapping": "add_attn_logit_softcapping",
    "final_logit_softcapping": "add_final_logit_softcapping",
    "use_parallel_residual": "add_parallel_residual",
}
# The same of mixtures of experts; families have different names for one thing, and the first that has a value counts.
_EXPERTS = {
    "num_local_experts": "add_expert_count",
    "num_experts": "add_expert_count",
    "n_routed_experts": "add_expert_count",
    "moe_num_experts": "add_expert_count",
    "num_experts_per_tok": "add_expert_used_count",
    "moe_k": "add_expert_used_count",
    "moe_intermediate_size": "add_expert_feed_forward_length",
    "shared_expert_intermediate_size": "add_expert_shared_feed_forward_length",
    "shared_intermediate_size": "add_expert_shared_feed_forward_length",
    "n_shared_experts": "add_expert_shared_count",
    "moe_num_shared_experts": "add_expert_shared_count",
    "n_group": "add_expert_group_count",
    "topk_group": "add_expert_group_used_count",
    "first_k_dense_replace": "add_leading_dense_block_count",
    "moe_layer_start_index": "add_leading_dense_block_count",
    "moe_layer_interval": "add_interleave_moe_layer_step",
    "routed_scaling_factor": "add_expert_weights_scale",
}
# A tensor of one expert; of all of them [experts, n, k] in Granite, and [experts, k, n] with gate and up in turns in gpt-oss.
_OF_EXPERT = re.compile(r"(.*)(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
_OF_ALL = re.compile(
    r"(.*)(?:mlp\.experts|block_sparse_moe)\.((?:gate_up|down)_proj(?:_bias)?|(?:in|out)put_linear\.weight)"
)
_PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_LAYER = re.compile(r"model\.layers\.(\d+)\..*")
_UNUSED = ("rotary_emb.inv_freq", "attention.bias", "attention.masked_bias")  # buffers of old checkpoints


class Stored(NamedTuple):
    """A tensor of the file, or an expert's part of one."""

    name: str
    source: str  # the checkpoint's tensor that it is made of
    values: Tensor
    expert: int | None = None

    @property
    def projection(self) -> str:
        """The checkpoint's name for the linear layer, as if each expert had a tensor of its own."""
        base = self.source.removesuffix(".weight")
        if self.expert is None or f".experts.{self.expert}." in base:
            return base
        parent, _, last = base.rpartition(".")
        return f"{parent.removesuffix('.experts')}.experts.{self.expert}.{last}"


class _Part(NamedTuple):
    name: str  # one that gguf knows
    values: Tensor
    expert: int | None = None


class Rules:
    """The settings and the tensors of one checkpoint's file."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """config: the content of config.json, with a value for each key of its model type (`whole_config`). Raises ConfigError
        for an architecture that is not written.
        """
        architecture = (config.get("architectures") or [None])[0]
        if architecture not in RULES:
            raise ConfigError(
                f"config.json: {shown(architecture)} is not written as GGUF; written are {', '.join(RULES)}: use llama.cpp's "
                f"convert_hf_to_gguf.py"
            )
        is_hybrid = not set(config.get("layer_types") or ()) <= {"attention", "full_attention", "sliding_attention"}
        if is_hybrid or (architecture == "GraniteMoeHybridForCausalLM" and config.get("num_local_experts")):
            raise ConfigError(
                f"config.json: {shown(architecture)} with recurrent layers or with experts is not written as GGUF; use "
                f"llama.cpp's convert_hf_to_gguf.py"
            )
        self.config, self.arch = config, RULES[architecture]
        self.name: str = gguf.MODEL_ARCH_NAMES[self.arch]
        self._names = gguf.get_tensor_name_map(self.arch, config["num_hidden_layers"])
        heads: int = config["num_attention_heads"]
        self._heads = heads, config.get("num_key_value_heads") or heads
        self._head_dim: int = config.get("head_dim") or config["hidden_size"] // heads
        counts = (config.get(key) for key, method in _EXPERTS.items() if method == "add_expert_count")
        self.num_experts: int = next(filter(None, counts), 0)

    def add_settings(self, writer: gguf.GGUFWriter) -> None:
        """All but the tokenizer's. Raises ConfigError for a scaling of positions that has no form in these files."""
        config, arch = self.config, self.arch
        for key, method in _NUMBERS.items():
            if config.get(key) is not None:
                getattr(writer, method)(config[key])
        shared = config.get("shared_intermediate_size") if arch is ARCH.GRANITE else None
        writer.add_feed_forward_length(shared or config["intermediate_size"])
        if self.num_experts:
            self._add_experts(writer)
        if config.get("head_dim") is not None and arch is not ARCH.CHATGLM:
            writer.add_key_length(config["head_dim"])
            writer.add_value_length(config["head_dim"])
        window = config.get("sliding_window")
        is_mistral = config["architectures"][0] in ("MistralForCausalLM", "MixtralForCausalLM")
        if window and (is_mistral or arch not in _WITHOUT_WINDOW):
            writer.add_sliding_window(window)
        if window and arch in _SEVERAL_WINDOWS and config.get("layer_types"):
            writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
        self._add_rope(writer)

    def _add_experts(self, writer: gguf.GGUFWriter) -> None:
        config, arch = self.config, self.arch
        found = {method: config[key] for key, method in reversed(_EXPERTS.items()) if config.get(key) is not None}
        if arch in _MLP_IS_EXPERT:
            found["add_expert_feed_forward_length"] = config["intermediate_size"]
        if arch is ARCH.ERNIE4_5_MOE:
            shared = config["moe_intermediate_size"] * config["moe_num_shared_experts"]
            found["add_expert_shared_feed_forward_length"] = shared
        for method, value in found.items():
            getattr(writer, method)(value)
        if arch in _SAY_NORM:
            writer.add_expert_weights_norm(config["norm_topk_prob"])
        if arch in _SIGMOID:
            writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)

    def _add_rope(self, writer: gguf.GGUFWriter) -> None:
        config, rope = self.config, self._rope
        share = rope.get("partial_rotary_factor", config.get("rotary_pct", 1.0))
        if self.arch not in _GEMMAS:
            writer.add_rope_dimension_count(int(share * self._head_dim))
        if "rope_theta" in rope:
            writer.add_rope_freq_base(rope["rope_theta"])
        if "sliding_attention" in config["rope_parameters"]:
            writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
        kind = rope.get("rope_type", "default")
        if kind == "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(rope["factor"])
        elif kind == "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(rope["factor"])
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
            writer.add_rope_scaling_yarn_beta_fast(rope.get("beta_fast") or 32.0)
            writer.add_rope_scaling_yarn_beta_slow(rope.get("beta_slow") or 1.0)
            if "llama_4_scaling_beta" in rope:
                writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
                writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
        elif kind == "longrope":
            original = self._original_positions
            scale = config["max_position_embeddings"] / original
            factor = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
            writer.add_rope_scaling_orig_ctx_len(original)
            writer.add_rope_scaling_attn_factors(rope.get("attention_factor") or factor)
        elif kind not in ("default", "llama3", "factors"):
            raise ConfigError(
                f"config.json: rope_type {shown(kind)} has no form in a GGUF file; serve the checkpoint as it is"
            )

    @property
    def _rope(self) -> dict[str, Any]:
        given: dict[str, Any] = self.config["rope_parameters"] or {}
        found: dict[str, Any] = given.get("full_attention", given)
        return found

    @property
    def _original_positions(self) -> int:
        positions: int = (
            self._rope.get("original_max_position_embeddings")
            or self.config.get("original_max_position_embeddings")
            or self.config["max_position_embeddings"]
        )
        return positions

    def tables(self) -> dict[str, NDArray[np.float32]]:
        """Tensors of the file that stand for no tensor of the checkpoint: divisors of frequencies, [head_dim / 2]."""
        rope = self._rope
        kind = rope.get("rope_type", "default")
        if kind == "longrope":
            return {f"rope_factors_{name}.weight": _floats(rope[f"{name}_factor"]) for name in ("long", "short")}
        if kind == "factors":  # the source is a GGUF file
            return {"rope_freqs.weight": _floats(rope["factors"])}
        return {"rope_freqs.weight": _llama3(rope, self._head_dim)} if kind == "llama3" else {}

    def tensors(self, names: Mapping[str, Tensor]) -> Iterator[Stored]:
        """The tensors of a checkpoint in the form of the file; each is read when it comes. Raises ConfigError for one that has no
        place in the file.
        """
        for source in names:
            if self._is_left_out(source):
                continue
            for part in self._changed(source, names[source]):
                base, _, suffix = part.name.rpartition(".")
                stored = self._names.get_name(base)
                if stored is None or suffix not in ("weight", "bias"):
                    raise ConfigError(
                        f"tensor {shown(source)} has no name in a GGUF file of {self.name}; serve the checkpoint as it is"
                    )
                yield Stored(f"{stored}.{suffix}", source, part.values, part.expert)

    def _is_left_out(self, name: str) -> bool:
        if name.endswith(_UNUSED) or (self.config.get("tie_word_embeddings") and name == "lm_head.weight"):
            return True
        found = _LAYER.fullmatch(name) if self.arch in _PREDICT_MORE else None
        return found is not None and int(found[1]) >= self.config["num_hidden_layers"]

    def heads_in_pairs(self, name: str) -> int | None:
        """The number of heads of a tensor of the checkpoint whose rows are put in pairs; None: they stay."""
        if self.arch not in _PAIRS:
            return None
        return self._heads[0] if ".q_proj." in name else self._heads[1] if ".k_proj." in name else None

    def _changed(self, name: str, tensor: Tensor) -> Iterator[_Part]:
        """The tensor as the file has it, or its parts."""
        if (heads := self.heads_in_pairs(name)) is not None:
            tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(tensor.shape)
        if self.arch in _GEMMAS and name.endswith("norm.weight"):
            tensor = tensor.float() + 1
        if "attention.query_key_value" in name:
            tensor = tensor.unflatten(0, (self._heads[0], 3, -1)).transpose(0, 1).flatten(0, 2)
        if found := _OF_EXPERT.fullmatch(name):
            part = _PROJECTIONS.get(found[3], found[3])
            yield _Part(f"{found[1]}mlp.experts.{part}.weight", tensor, int(found[2]))
        elif found := _OF_ALL.fullmatch(name):
            yield from _experts_apart(f"{found[1]}mlp.experts", found[2], tensor)
        elif "shared_mlp" in name:  # Granite's
            mlp = "mlp.shared_expert" if self.num_experts else "mlp"
            prefix, _, of_mlp = name.partition("shared_mlp")
            parts = ("gate_proj", "up_proj") if "input_linear" in of_mlp else ("down_proj",)
            for part, values in zip(parts, tensor.chunk(len(parts)), strict=True):
                yield _Part(f"{prefix}{mlp}.{part}.weight", values)
        else:
            yield _Part(name.replace("correction_bias", "correction.bias").replace(".sinks", ".sinks.weight"), tensor)


def _experts_apart(prefix: str, kind: str, tensor: Tensor) -> Iterator[_Part]:
    """kind: what _OF_ALL finds."""
    suffix = "bias" if kind.endswith("_bias") else "weight"
    for expert, values in enumerate(tensor):
        if "_proj" in kind:
            rows = values if suffix == "bias" else values.T
            parts = {"gate_proj": rows[::2], "up_proj": rows[1::2]} if "gate_up" in kind else {"down_proj": rows}
        elif kind.startswith("input"):
            parts = dict(zip(("gate_proj", "up_proj"), values.chunk(2)))
        else:
            parts = {"down_proj": values}
        for part, own in parts.items():
            yield _Part(f"{prefix}.{part}.{suffix}", own.contiguous(), expert)


def whole_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with the defaults of its model type, and the positions under the name of today. Raises ConfigError."""
    from transformers import AutoConfig, logging

    logging.set_verbosity_error()
    leave_out = ("model_type", "quantization_config")
    try:
        given = {key: _of_json(value) for key, value in config.items() if key not in leave_out}
        found: dict[str, Any] = AutoConfig.for_model(str(config.get("model_type")), **given).to_dict()
    except Exception as error:  # whatever the class of a model type raises for a value
        raise ConfigError(f"config.json cannot be read by transformers ({shown(str(error))}); fetch it again") from None
    return found


def _of_json(value: Any) -> Any:
    """A value in which transformers' form of infinity is a number."""
    if isinstance(value, list):
        return [_of_json(each) for each in value]
    return float(value["__float__"]) if isinstance(value, dict) and "__float__" in value else value


def _floats(values: Any) -> NDArray[np.float32]:
    return np.array(values, np.float32)


def _llama3(rope: dict[str, Any], head_dim: int) -> NDArray[np.float32]:
    """Each frequency's divisor: none of short waves, `factor` of long ones, and between the two a mean of both."""
    wavelengths = 2 * math.pi * rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = ((rope["original_max_position_embeddings"] / wavelengths - low) / (high - low)).clip(0, 1)
    return _floats(1 / ((1 - smooth) / rope["factor"] + smooth))
