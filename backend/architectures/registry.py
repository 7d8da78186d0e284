"""The families of models that this server builds, by the architecture in config.json; docs/models.md is made of them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from backend.api.checkpoint.model_files import convert, shown
from backend.api.checkpoint.quantised import FILE
from backend.api.errors import ConfigError
from backend.architectures import (
    deepseek,
    fused,
    gemma,
    hybrids,
    layer_norm,
    llama,
    mamba,
    mixtures,
    multimodal,
    post_norm,
)
from backend.architectures.description import ModelConfig
from backend.architectures.settings import Settings


class Family(NamedTuple):
    read: Callable[[Settings, str], ModelConfig]
    models: str  # examples that people know
    is_quantised: bool = True  # False: its quantised checkpoints are refused


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(llama.llama, "Llama 2 and 3, SmolLM2, TinyLlama, Yi, Falcon 3"),
    "MistralForCausalLM": Family(llama.mistral, "Mistral 7B, Nemo and Small 3"),
    "MinistralForCausalLM": Family(llama.ministral, "Ministral 8B"),
    "Ministral3ForCausalLM": Family(llama.ministral3, "Ministral 3"),
    "Mistral3ForConditionalGeneration": Family(
        multimodal.mistral3, "Mistral Small 3.1 and 3.2, Ministral 3, with images"
    ),
    "Qwen2ForCausalLM": Family(llama.qwen2, "Qwen2, Qwen2.5, QwQ, DeepSeek-R1-Distill-Qwen"),
    "Qwen3ForCausalLM": Family(llama.qwen3, "Qwen3 0.6B to 32B"),
    "GemmaForCausalLM": Family(gemma.gemma, "Gemma 2B and 7B, CodeGemma"),
    "Gemma2ForCausalLM": Family(gemma.gemma2, "Gemma 2 2B, 9B and 27B"),
    "VaultGemmaForCausalLM": Family(gemma.gemma2, "VaultGemma 1B"),
    "Gemma3ForCausalLM": Family(gemma.gemma3, "Gemma 3 270M and 1B, text only"),
    "Gemma3ForConditionalGeneration": Family(multimodal.gemma3, "Gemma 3 4B, 12B and 27B, with images"),
    "Phi3ForCausalLM": Family(fused.phi3, "Phi-3, Phi-3.5-mini, Phi-4, Phi-4-mini"),
    "GlmForCausalLM": Family(fused.glm, "GLM-4-9B"),
    "Glm4ForCausalLM": Family(fused.glm, "GLM-4-0414, GLM-Z1"),
    "GraniteForCausalLM": Family(llama.granite, "Granite 3.0 to 3.3"),
    "GraniteMoeHybridForCausalLM": Family(
        mamba.granite4, "Granite 4.0 Micro, 350M and 1B, H-350M, H-1B, H-Micro, H-Tiny and H-Small"
    ),
    "BambaForCausalLM": Family(mamba.bamba, "Bamba 9B"),
    "NemotronHForCausalLM": Family(
        mamba.nemotron_h, "Nemotron-H 4B to 56B, Nemotron Nano 2 9B and 12B, Nemotron 3 Nano 30B-A3B"
    ),
    "SmolLM3ForCausalLM": Family(llama.smollm3, "SmolLM3 3B"),
    "Olmo2ForCausalLM": Family(post_norm.olmo2, "OLMo 2 1B to 32B"),
    "Olmo3ForCausalLM": Family(post_norm.olmo3, "OLMo 3 7B and 32B"),
    "Exaone4ForCausalLM": Family(post_norm.exaone4, "EXAONE 4.0 1.2B and 32B"),
    "CohereForCausalLM": Family(layer_norm.cohere, "Command R, Aya 23; without norms of queries and keys"),
    "Cohere2ForCausalLM": Family(layer_norm.cohere2, "Command R7B, Command A"),
    "Starcoder2ForCausalLM": Family(layer_norm.starcoder2, "StarCoder2 3B to 15B"),
    "StableLmForCausalLM": Family(layer_norm.stablelm, "StableLM 2 1.6B, StableLM 3B"),
    "GPTNeoXForCausalLM": Family(layer_norm.gpt_neox, "Pythia, GPT-NeoX-20B, Dolly 2", is_quantised=False),
    "SeedOssForCausalLM": Family(llama.seed_oss, "Seed-OSS 36B"),
    "HeliumForCausalLM": Family(llama.helium, "Helium 1 2B"),
    "Ernie4_5ForCausalLM": Family(llama.ernie, "ERNIE 4.5 0.3B"),
    "Qwen2MoeForCausalLM": Family(mixtures.qwen2_moe, "Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B"),
    "Qwen3MoeForCausalLM": Family(mixtures.qwen3_moe, "Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder-30B-A3B"),
    "MixtralForCausalLM": Family(mixtures.mixtral, "Mixtral 8x7B and 8x22B"),
    "OlmoeForCausalLM": Family(mixtures.olmoe, "OLMoE 1B-7B"),
    "GraniteMoeForCausalLM": Family(
        mixtures.granite_moe, "Granite 3.0 and 3.1 1B-A400M and 3B-A800M", is_quantised=False
    ),
    "GraniteMoeSharedForCausalLM": Family(
        mixtures.granite_moe, "Granite mixtures with a shared expert", is_quantised=False
    ),
    "Glm4MoeForCausalLM": Family(mixtures.glm4_moe, "GLM-4.5, GLM-4.5-Air, GLM-4.6"),
    "Dots1ForCausalLM": Family(mixtures.dots1, "dots.llm1"),
    "Ernie4_5_MoeForCausalLM": Family(mixtures.ernie_moe, "ERNIE 4.5 21B-A3B and 300B-A47B"),
    "MiniMaxM2ForCausalLM": Family(mixtures.minimax_m2, "MiniMax M2"),
    "GptOssForCausalLM": Family(mixtures.gpt_oss, "gpt-oss-20b and gpt-oss-120b"),
    "DeepseekV2ForCausalLM": Family(deepseek.deepseek_v2, "DeepSeek V2, V2-Lite and Coder V2"),
    "DeepseekV3ForCausalLM": Family(deepseek.deepseek_v3, "DeepSeek V3 and R1, Kimi K2, Moonlight 16B-A3B"),
    "Glm4MoeLiteForCausalLM": Family(deepseek.glm4_moe_lite, "GLM-4.7-Flash"),
    "Qwen3_5ForCausalLM": Family(hybrids.qwen3_5, "Qwen3.5 0.8B to 27B, the text model"),
    "Qwen3_5MoeForCausalLM": Family(hybrids.qwen3_5_moe, "Qwen3.5 35B-A3B to 397B-A17B, the text model"),
    "Qwen2VLForConditionalGeneration": Family(multimodal.qwen2_vl, "Qwen2-VL 2B to 72B, with images"),
    "Qwen2_5_VLForConditionalGeneration": Family(multimodal.qwen2_vl, "Qwen2.5-VL 3B to 72B, with images"),
    "Qwen3VLForConditionalGeneration": Family(multimodal.qwen3_vl, "Qwen3-VL 2B to 32B, with images"),
    "SmolVLMForConditionalGeneration": Family(multimodal.smolvlm, "SmolVLM2 256M to 2.2B, with images"),
    "Idefics3ForConditionalGeneration": Family(multimodal.smolvlm, "SmolVLM 256M to 2B, Idefics 3, with images"),
    "LlavaForConditionalGeneration": Family(multimodal.llava, "LLaVA 1.5, Pixtral, with images"),
    "LlavaOnevisionForConditionalGeneration": Family(multimodal.llava, "LLaVA-OneVision, with images"),
    "InternVLForConditionalGeneration": Family(
        multimodal.llava, "InternVL 3 and 3.5 in transformers' form, with images"
    ),
    "Qwen3_5ForConditionalGeneration": Family(multimodal.qwen3_5, "Qwen3.5 0.8B to 27B, with images"),
    "Qwen3_5MoeForConditionalGeneration": Family(
        multimodal.qwen3_5_moe, "Qwen3.5 35B-A3B, 122B-A10B and 397B-A17B, with images"
    ),
    "Qwen3NextForCausalLM": Family(hybrids.qwen3_next, "Qwen3-Next-80B-A3B, Qwen3-Coder-Next"),
    "Lfm2ForCausalLM": Family(hybrids.lfm2, "LFM2 350M, 700M, 1.2B and 2.6B"),
    "Lfm2MoeForCausalLM": Family(hybrids.lfm2_moe, "LFM2-8B-A1B"),
}
# The same decoders without their head, as they are stored after training for embeddings: served for hidden states only.
HEADLESS = {
    "LlamaModel": "LlamaForCausalLM",
    "MistralModel": "MistralForCausalLM",
    "Qwen2Model": "Qwen2ForCausalLM",
    "Qwen3Model": "Qwen3ForCausalLM",
}


def read_config(content: dict[str, Any]) -> ModelConfig:
    """The decoder that the content of a config.json describes, without its quantisation. Raises ConfigError."""
    name = architecture(content)
    settings = Settings(content)
    config = FAMILIES[HEADLESS.get(name, name)].read(settings, name)
    settings.only("is_causal", True)  # some embedding models have false here: their tokens attend to later ones, too
    settings.check_all_known(name)
    return config


def architecture(content: dict[str, Any]) -> str:
    """The first of `architectures`. Raises ConfigError for one that is not supported."""
    given = content.get("architectures")
    names = (None if given is None else convert(given, list[str], FILE, "architectures")) or [""]
    known = {**FAMILIES, **HEADLESS}
    if names[0] not in known:
        place = f"{FILE}: architectures {shown(names)}" if names[0] else FILE
        raise ConfigError(refusal(place, names[0], shown(names[0]), known, "use a model of one of them"))
    return names[0]


_ENDING = re.compile(r"(ForCausalLM|ForConditionalGeneration|ForMaskedLM|Model|LMHeadModel)$")


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """At most three of `known`, the most alike first. Endings that most names have, as ForCausalLM, do not count."""
    stems: dict[str, list[str]] = {}
    for each in dict.fromkeys(known):
        stems.setdefault(_ENDING.sub("", each), []).append(each)
    found = difflib.get_close_matches(_ENDING.sub("", name[:100]), stems, n=3, cutoff=0.6)
    return [each for stem in found for each in stems[stem]][:3]


def refusal(place: str, name: str, shown: str, known: Iterable[str], remedy: str) -> str:
    """The sentence for an architecture that is not known. `place`: where it was read; `shown`: the name, made fit to print."""
    names = list(dict.fromkeys(known))
    if not name:
        return f"{place}: architectures names none; use the config.json that came with the model"
    near = nearest(name, names)
    advice = f"near it are {', '.join(near)}, and " if near else ""
    return f"{place}: {shown} is not supported; {advice}docs/models.md lists the {len(names)} that are: {remedy}"
