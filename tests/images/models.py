"""Tiny checkpoints of models that read images, as transformers writes them, with random weights, a processor and a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

ROOT = Path(__file__).resolve().parents[2]
VOCAB, TOKEN = 4200, 4096  # the tokens that are added follow the tokenizer's own
_QWEN = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>")
_TILES = tuple(f"<row_{row + 1}_col_{column + 1}>" for row in range(6) for column in range(6))
_SMOL = ("<image>", "<fake_token_around_image>", "<global-img>", *_TILES)
_SIDES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
_ENDS = dict(video_token_id=TOKEN + 3, vision_start_token_id=TOKEN + 1, vision_end_token_id=TOKEN + 2)
_PIXELS = [[32, 32], [32, 64], [64, 32], [64, 64]]


def _text(**more: Any) -> dict[str, Any]:
    sizes = dict(hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2)
    ids = dict(vocab_size=VOCAB, pad_token_id=None, bos_token_id=0, eos_token_id=1, tie_word_embeddings=False)
    return dict(num_hidden_layers=3, max_position_embeddings=2048) | sizes | ids | more


def _rope(sections: list[int], **more: Any) -> dict[str, Any]:
    return dict(rope_type="default", rope_theta=1e6, mrope_section=sections) | more


def _siglip(**more: Any) -> dict[str, Any]:
    return _SIDES | dict(image_size=32, patch_size=4) | more


def _qwen_tower(**more: Any) -> dict[str, Any]:
    sizes = dict(hidden_size=32, out_hidden_size=64, intermediate_size=48, num_heads=2, patch_size=4)
    return dict(depth=2, spatial_merge_size=2) | sizes | more


class Tiny(NamedTuple):
    name: str  # of transformers' class, without its ending
    config: dict[str, Any]
    tokens: tuple[str, ...]
    processor: dict[str, Any]  # preprocessor_config.json
    texts: dict[str, Any] = {}  # processor_config.json


def _qwen_pixels(**more: Any) -> dict[str, Any]:
    normal = dict(image_mean=[0.48, 0.45, 0.40], image_std=[0.26, 0.26, 0.27])
    patches = dict(patch_size=4, temporal_patch_size=2, merge_size=2)
    return dict(image_processor_type="Qwen2VLImageProcessor") | normal | patches | more


_BY_SIDE = _qwen_pixels(min_pixels=64, max_pixels=4096)
_BY_SIZE = _qwen_pixels(size=dict(shortest_edge=64, longest_edge=4096))
_INTERLEAVED = _rope([4, 2, 2], mrope_interleaved=True)
_HYBRID = dict(
    num_hidden_layers=4,
    head_dim=16,
    layer_types=["linear_attention"] * 3 + ["full_attention"],
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    rope_parameters=_rope([2, 1, 1], mrope_interleaved=True, partial_rotary_factor=0.5),
)
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32)
_YARN = dict(
    rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=32, llama_4_scaling_beta=0.3
)
_GEMMA = ("<image_soft_token>", "<start_of_image>", "<end_of_image>")
_PIXTRAL = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")


def _mistral3(**text: Any) -> Tiny:
    return Tiny(
        "Mistral3",
        dict(
            text_config=_text(head_dim=16, **text),
            vision_config=_SIDES | dict(model_type="pixtral", image_size=64, patch_size=4, head_dim=16),
            image_token_index=TOKEN,
            spatial_merge_size=2,
        ),
        _PIXTRAL,
        dict(image_processor_type="PixtralImageProcessor", patch_size=8, size=dict(longest_edge=64)),
        dict(patch_size=4, spatial_merge_size=2),
    )


TINY: dict[str, Tiny] = {
    "qwen2_vl": Tiny(
        "Qwen2VL",
        dict(
            text_config=_text(rope_parameters=_rope([4, 2, 2])),
            vision_config=dict(depth=2, embed_dim=32, hidden_size=64, num_heads=2, patch_size=4, mlp_ratio=2),
            image_token_id=TOKEN,
        )
        | _ENDS,
        _QWEN,
        _BY_SIDE,
    ),
    "qwen2_5_vl": Tiny(
        "Qwen2_5_VL",
        dict(
            text_config=_text(rope_parameters=_rope([4, 2, 2])),
            vision_config=_qwen_tower(window_size=16, fullatt_block_indexes=[1]),
            image_token_id=TOKEN,
        )
        | _ENDS,
        _QWEN,
        _BY_SIDE,
    ),
    "qwen3_vl": Tiny(
        "Qwen3VL",
        dict(
            text_config=_text(head_dim=16, rope_parameters=_INTERLEAVED),
            vision_config=_qwen_tower(depth=3, deepstack_visual_indexes=[0, 1], num_position_embeddings=64),
            image_token_id=TOKEN,
        )
        | _ENDS,
        _QWEN,
        _BY_SIZE,
    ),
    "qwen3_5": Tiny(
        "Qwen3_5",
        dict(
            text_config=_text(**_HYBRID),
            vision_config=_qwen_tower(num_position_embeddings=64),
            image_token_id=TOKEN,
        )
        | _ENDS,
        _QWEN,
        _BY_SIZE,
    ),
    "qwen3_5_moe": Tiny(
        "Qwen3_5Moe",
        dict(
            text_config=_text(**_HYBRID, **_EXPERTS),
            vision_config=_qwen_tower(num_position_embeddings=64),
            image_token_id=TOKEN,
        )
        | _ENDS,
        _QWEN,
        _BY_SIZE,
    ),
    "smolvlm": Tiny(
        "SmolVLM",
        dict(text_config=_text(model_type="llama"), vision_config=_siglip(), image_token_id=TOKEN, scale_factor=2),
        _SMOL,
        dict(
            image_processor_type="SmolVLMImageProcessor",
            size=dict(longest_edge=128),
            max_image_size=dict(longest_edge=32),
            do_image_splitting=True,
        ),
        dict(processor_class="SmolVLMProcessor", image_seq_len=16),
    ),
    "llava_onevision": Tiny(
        "LlavaOnevision",
        dict(
            text_config=_text(model_type="qwen2"),
            vision_config=_siglip(model_type="siglip_vision_model", vision_use_head=False),
            image_token_index=TOKEN,
            video_token_index=TOKEN + 3,
            vision_feature_layer=-1,
            image_grid_pinpoints=_PIXELS,
        ),
        ("<image>", "<one>", "<two>", "<video>"),
        dict(
            image_processor_type="LlavaOnevisionImageProcessor",
            size=dict(height=32, width=32),
            image_grid_pinpoints=_PIXELS,
        ),
        dict(num_image_tokens=64, vision_feature_select_strategy="full"),
    ),
    "llava": Tiny(
        "Llava",
        dict(
            text_config=_text(model_type="llama"),
            vision_config=_siglip(model_type="clip_vision_model", projection_dim=32, num_hidden_layers=3),
            image_token_index=TOKEN,
        ),
        ("<image>",),
        dict(
            image_processor_type="CLIPImageProcessor",
            size=dict(shortest_edge=32),
            crop_size=dict(height=32, width=32),
        ),
        dict(patch_size=4, vision_feature_select_strategy="default", num_additional_image_tokens=1),
    ),
    "internvl": Tiny(
        "InternVL",
        dict(
            text_config=_text(model_type="qwen2"),
            vision_config=_SIDES | dict(image_size=[32, 32], patch_size=[4, 4]),
            image_token_id=TOKEN,
            image_seq_length=16,
        ),
        ("<IMG_CONTEXT>", "<img>", "</img>", "<video>"),
        dict(
            image_processor_type="GotOcr2ImageProcessor",
            size=dict(height=32, width=32),
            crop_to_patches=True,
            min_patches=1,
            max_patches=4,
        ),
        dict(image_seq_length=16),
    ),
    "gemma3": Tiny(
        "Gemma3",
        dict(
            text_config=_text(
                head_dim=16,
                sliding_window=24,
                query_pre_attn_scalar=16,
                layer_types=["sliding_attention"] * 2 + ["full_attention"],
            ),
            vision_config=_siglip(vision_use_head=False),
            image_token_index=TOKEN,
            boi_token_index=TOKEN + 1,
            eoi_token_index=TOKEN + 2,
            mm_tokens_per_image=16,
        ),
        _GEMMA,
        dict(image_processor_type="Gemma3ImageProcessor", size=dict(height=32, width=32)),
        dict(processor_class="Gemma3Processor", image_seq_length=16),
    ),
    "mistral3": _mistral3(model_type="mistral"),
    "mistral3_ministral3": _mistral3(model_type="ministral3", rope_parameters=_YARN),
    "pixtral": Tiny(
        "Llava",
        dict(
            text_config=_text(model_type="mistral", head_dim=16),
            vision_config=_SIDES | dict(model_type="pixtral", image_size=64, patch_size=4, head_dim=16),
            image_token_index=TOKEN,
            vision_feature_layer=-1,
            vision_feature_select_strategy="full",
        ),
        _PIXTRAL,
        dict(image_processor_type="PixtralImageProcessor", patch_size=4, size=dict(longest_edge=64)),
        dict(processor_class="PixtralProcessor", patch_size=4),
    ),
}
_NAMES = {
    "gemma3": dict(zip(("image_token", "boi_token", "eoi_token"), _GEMMA)),
    "internvl": dict(
        start_image_token="<img>",
        end_image_token="</img>",
        context_image_token="<IMG_CONTEXT>",
        video_token="<video>",
    ),
}
_TEMPLATE = """{% for m in messages %}<|im_start|>{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}\
{% if p.type == 'image' %}PLACE{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>{% endfor %}"""


def place_of(name: str) -> str:
    """The text that stands for an image in a prompt."""
    first = TINY[name].tokens[name == "gemma3"]
    return f"{_QWEN[1]}{first}{_QWEN[2]}" if name.startswith("qwen") else first


def make(directory: Path, name: str) -> Path:
    """Write the checkpoint, its processor, its tokenizer and a chat template."""
    tiny, path = TINY[name], directory / name
    config = getattr(transformers, f"{tiny.name}Config")(**tiny.config)
    torch.manual_seed(0)
    model: Any = getattr(transformers, f"{tiny.name}ForConditionalGeneration")(config).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.08 if weight.dim() == 2 else 0.05)
    model.save_pretrained(path)
    default = ROOT / "models" / "default"
    tokenizer = json.loads((default / "tokenizer.json").read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer["added_tokens"] += [
        dict(id=TOKEN + index, content=text, special=True, **flags) for index, text in enumerate(tiny.tokens)
    ]
    settings = json.loads((default / "tokenizer_config.json").read_text())
    files: dict[str, Any] = {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": settings | {"extra_special_tokens": _NAMES.get(name, {})},
        "preprocessor_config.json": tiny.processor,
    }
    if tiny.texts:
        files["processor_config.json"] = tiny.texts
    for file, content in files.items():
        (path / file).write_text(json.dumps(content))
    (path / "chat_template.jinja").write_text(_TEMPLATE.replace("PLACE", place_of(name)))
    return path


Made = Callable[[str], Path]
