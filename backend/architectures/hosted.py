"""The families that transformers runs (backend/hosted), and those that it knows and this server refuses.

tests/hosted decides every entry: it builds a tiny checkpoint of the family, compares the logits with transformers' own, and
looks whether a token's bits depend on others.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from backend.api.checkpoint.model_files import convert, shown
from backend.api.checkpoint.quantised import FILE
from backend.api.config.schema import Implementation
from backend.api.errors import ConfigError
from backend.architectures.registry import FAMILIES, HEADLESS, refusal

HOSTED: dict[str, str] = {  # architecture -> model_type
    "AXK1ForCausalLM": "axk1",
    "AfmoeForCausalLM": "afmoe",
    "ApertusForCausalLM": "apertus",
    "ArceeForCausalLM": "arcee",
    "AriaTextForCausalLM": "aria_text",
    "BeamForCausalLM": "beam",
    "BioGptForCausalLM": "biogpt",
    "BitNetForCausalLM": "bitnet",
    "CTRLLMHeadModel": "ctrl",
    "Cohere2ForCausalLM": "cohere2",
    "Cohere2MoeForCausalLM": "cohere2_moe",
    "CohereCompassForCausalLM": "cohere_compass_text",
    "CohereForCausalLM": "cohere",
    "CwmForCausalLM": "cwm",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Dots1ForCausalLM": "dots1",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "Ernie4_5_MoeForCausalLM": "ernie4_5_moe",
    "Exaone4ForCausalLM": "exaone4",
    "ExaoneMoeForCausalLM": "exaone_moe",
    "FlexOlmoForCausalLM": "flex_olmo",
    "FlintForCausalLM": "flint",
    "GPT2LMHeadModel": "gpt2",
    "GPTBigCodeForCausalLM": "gpt_bigcode",
    "GPTNeoXForCausalLM": "gpt_neox",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "Gemma4ForCausalLM": "gemma4_text",
    "Gemma4UnifiedForCausalLM": "gemma4_unified_text",
    "GemmaForCausalLM": "gemma",
    "Glm4ForCausalLM": "glm4",
    "Glm4MoeForCausalLM": "glm4_moe",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
    "GlmForCausalLM": "glm",
    "GptOssForCausalLM": "gpt_oss",
    "GraniteForCausalLM": "granite",
    "GraniteMoeForCausalLM": "granitemoe",
    "GraniteMoeSWAForCausalLM": "granitemoe_swa",
    "GraniteMoeSharedForCausalLM": "granitemoeshared",
    "GraniteSWAForCausalLM": "granite_swa",
    "HYV3ForCausalLM": "hy_v3",
    "HeliumForCausalLM": "helium",
    "HunYuanDenseV1ForCausalLM": "hunyuan_v1_dense",
    "HunYuanMoEV1ForCausalLM": "hunyuan_v1_moe",
    "HyperCLOVAXForCausalLM": "hyperclovax",
    "Jais2ForCausalLM": "jais2",
    "JetMoeForCausalLM": "jetmoe",
    "Kolibri1ForCausalLM": "kolibri1",
    "LagunaForCausalLM": "laguna",
    "LlamaForCausalLM": "llama",
    "MellumForCausalLM": "mellum",
    "MiMoV2FlashForCausalLM": "mimo_v2_flash",
    "MiniCPM3ForCausalLM": "minicpm3",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "Ministral3ForCausalLM": "ministral3",
    "MinistralForCausalLM": "ministral",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "ModernBertDecoderForCausalLM": "modernbert-decoder",
    "MoshiForCausalLM": "moshi",
    "NanoChatForCausalLM": "nanochat",
    "NemotronForCausalLM": "nemotron",
    "OPTForCausalLM": "opt",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo3",
    "OlmoForCausalLM": "olmo",
    "OlmoeForCausalLM": "olmoe",
    "PersimmonForCausalLM": "persimmon",
    "Phi3ForCausalLM": "phi3",
    "PhiForCausalLM": "phi",
    "PhimoeForCausalLM": "phimoe",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "SeedOssForCausalLM": "seed_oss",
    "SmolLM3ForCausalLM": "smollm3",
    "SolarOpenForCausalLM": "solar_open",
    "StableLmForCausalLM": "stablelm",
    "Starcoder2ForCausalLM": "starcoder2",
    "VaultGemmaForCausalLM": "vaultgemma",
}


class EncoderFamily(NamedTuple):
    """A family whose tokens attend to the whole text, before and behind them."""

    model_type: str
    counts_from_padding: bool = False  # positions begin behind the id of the padding token, as RoBERTa's do; else at 0

    def first_position(self, pad_token_id: int | None) -> int:
        return (pad_token_id or 0) + 1 if self.counts_from_padding else 0


ENCODERS: dict[str, EncoderFamily] = {
    "AlbertModel": EncoderFamily("albert"),
    "BertModel": EncoderFamily("bert"),
    "CamembertModel": EncoderFamily("camembert", True),
    "DistilBertModel": EncoderFamily("distilbert"),
    "ElectraModel": EncoderFamily("electra"),
    "ErnieModel": EncoderFamily("ernie"),
    "EuroBertModel": EncoderFamily("eurobert"),
    "GteModel": EncoderFamily("gte"),
    "ModernBertModel": EncoderFamily("modernbert"),
    "NomicBertModel": EncoderFamily("nomic_bert"),
    "RobertaModel": EncoderFamily("roberta", True),
    "XLMRobertaModel": EncoderFamily("xlm-roberta", True),
}
# The same with a head that fills in masked words, which embeddings do not need.
ENCODERS |= {name.removesuffix("Model") + "ForMaskedLM": encoder for name, encoder in ENCODERS.items()}
PARTS = ("Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration")  # the text model of these is served
PART_PREFIX = "model.language_model."  # prefix of its tensors; the other tensors are left out

REASONS: dict[str, tuple[str, ...]] = {
    "it keeps a recurrent state of a kind that this server has no layers for": (
        "BailingHybridForCausalLM", "FalconH1ForCausalLM", "FalconMambaForCausalLM",
        "JambaForCausalLM", "KimiLinearForCausalLM", "Lfm3ForCausalLM",
        "Mamba2ForCausalLM", "MambaForCausalLM", "MiniMaxForCausalLM", "OlmoHybridForCausalLM",
        "Qwen4ExpForCausalLM",
        "RecurrentGemmaForCausalLM", "RwkvForCausalLM", "Zamba2ForCausalLM", "ZambaForCausalLM", "ZayaForCausalLM",
        "xLSTMForCausalLM",
    ),
    "its attention chooses keys by an index of its own, which has no place in the KV cache": (
        "AXK2ForCausalLM", "DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM", "Dots3NoteForCausalLM",
        "GlmMoeDsaForCausalLM", "HYV4ForCausalLM", "MiniMaxM3VLForCausalLM",
    ),
    "it attends to later tokens, or to an encoder's output": (
        "BartForCausalLM", "BertGenerationDecoder", "BertLMHeadModel", "BigBirdForCausalLM", "BigBirdPegasusForCausalLM",
        "BlenderbotForCausalLM", "BlenderbotSmallForCausalLM", "CamembertForCausalLM", "Data2VecTextForCausalLM",
        "ElectraForCausalLM", "ErnieForCausalLM", "MBartForCausalLM", "MarianForCausalLM", "MegatronBertForCausalLM",
        "MllamaForCausalLM", "MusicgenForCausalLM", "MusicgenMelodyForCausalLM", "MvpForCausalLM", "PLBartForCausalLM",
        "PegasusForCausalLM", "ProphetNetForCausalLM", "RemBertForCausalLM", "RoCBertForCausalLM", "RoFormerForCausalLM",
        "RobertaForCausalLM", "RobertaPreLayerNormForCausalLM", "TrOCRForCausalLM", "WhisperForCausalLM",
        "XLMRobertaForCausalLM", "XLMRobertaXLForCausalLM", "XmodForCausalLM",
    ),
    "it computes attention by itself, not through transformers' attention interface": (
        "BloomForCausalLM", "BltForCausalLM", "CodeGenForCausalLM", "CpmAntForCausalLM", "DbrxForCausalLM",
        "DebertaModel", "DebertaV2Model", "DogeForCausalLM", "FalconForCausalLM", "GPTJForCausalLM", "GPTNeoForCausalLM",
        "GPTNeoXJapaneseForCausalLM", "MPNetForMaskedLM", "MPNetModel", "MptForCausalLM", "OpenAIGPTLMHeadModel",
        "ReformerModelWithLMHead", "XGLMForCausalLM", "XLMWithLMHeadModel", "XLNetLMHeadModel",
    ),
    "transformers does not give back the embedding of a checkpoint that it wrote": ("YoutuForCausalLM",),
    "it is part of a model for images or speech": (
        "Emu3ForCausalLM", "FuyuForCausalLM", "GitForCausalLM", "Phi4MultimodalForCausalLM",
    ),
    "its attention adds a bias of positions to the scores": ("Inkling2ForCausalLM", "InklingForCausalLM"),
    "its experts do not run on the engine's layers": ("LongcatFlashForCausalLM",),
    "its layers attend more than once in a pass": ("DiffLlamaForCausalLM", "HrmTextForCausalLM"),
    "its attention sees chunks of a text, and this server has windows only": ("Llama4ForCausalLM",),
    "it multiplies activations with activations, so that a token would depend on the requests beside it": ("Gemma3nForCausalLM",),
}  # fmt: skip
REFUSED: dict[str, str] = {name: reason for reason, names in REASONS.items() for name in names}


def implementation_of(content: dict[str, Any], wanted: Implementation) -> Literal["native", "transformers"]:
    """Which implementation runs the model of a config.json. Raises ConfigError where none does, or not the wanted one."""
    given = content.get("architectures")
    names = (None if given is None else convert(given, list[str], FILE, "architectures")) or [""]
    name = names[0]
    native = (*FAMILIES, *HEADLESS)
    if name in native and wanted != "transformers":
        return "native"
    of_library = (*HOSTED, *PARTS, *ENCODERS)
    if name in of_library and wanted != "native":
        return "transformers"
    place = f"{FILE}: architectures {shown(names)}"
    if name in of_library:
        raise ConfigError(
            f"{place}: model.implementation is native, which has no {shown(name)}; use --set model.implementation=auto"
        )
    if name in REFUSED:
        raise ConfigError(f"{place}: {shown(name)} is not supported: {REFUSED[name]}; use a model of another family")
    known = of_library if wanted == "transformers" else (*native, *of_library)
    raise ConfigError(refusal(place if name else FILE, name, shown(name), known, "use a model of one of them"))


class HostedSizes(NamedTuple):
    """Sizes of a hosted model, which its KV cache follows from."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_position: int


def sizes_of(content: dict[str, Any]) -> HostedSizes:
    """An estimate: what transformers fills in by default is not known here. Absent sizes are 1."""
    part = content.get("text_config")
    content = part if isinstance(part, dict) else content

    def number(*names: str) -> int:
        for name in names:
            if isinstance(value := content.get(name), int) and 0 < value <= 2**40:
                return value
        return 1

    heads = number("num_attention_heads", "n_head")
    kv_heads, head_dim = number("num_key_value_heads", "num_attention_heads", "n_head"), content.get("head_dim")
    if isinstance(
        content.get("kv_lora_rank"), int
    ):  # multi-head latent attention, whose keys and values are of all heads
        kv_heads, head_dim = heads, number("qk_nope_head_dim") + number("qk_rope_head_dim")
    if not isinstance(head_dim, int) or head_dim < 1:
        head_dim = max(1, number("hidden_size", "n_embd") // heads)
    positions = number("max_position_embeddings", "n_positions")
    names = content.get("architectures")
    if isinstance(names, list) and names and (encoder := ENCODERS.get(str(names[0]))) is not None:
        padding = content.get("pad_token_id", 1)
        positions = max(1, positions - encoder.first_position(padding if isinstance(padding, int) else 1))
    return HostedSizes(number("num_hidden_layers", "n_layer"), kv_heads, head_dim, positions)
