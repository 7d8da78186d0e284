"""Write a checkpoint of the Llama family as GGUF, for measurements in which token ids go in. Runs in llama.cpp's environment.

    python -m benchmarks.peers.write_gguf MODEL_DIR FILE bf16|q8_0 [vocabulary]

Without `vocabulary` token ids come out as well. With it tokens have the texts of tokenizer.json, so that llama.cpp's server can
write them; how a text is cut into tokens is not converted, because no text goes in.

Tensor names, the permutation of Llama's query and key rows, and the factors of Llama 3's rope scaling are those of llama.cpp's
own convert_hf_to_gguf.py.
"""

from __future__ import annotations

import json
import math
import mmap
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy

# architecture -> its name in GGUF, and whether its rope pairs neighbours, for which query and key rows are permuted
ARCHITECTURES = {
    "LlamaForCausalLM": ("llama", True),
    "MistralForCausalLM": ("llama", True),
    "Qwen2ForCausalLM": ("qwen2", False),
    "Qwen3ForCausalLM": ("qwen3", False),
}
TYPES = {
    "bf16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}
Q8_0_BLOCK = 32
NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write(model_dir: Path, file: Path, kind: str, with_vocabulary: bool = False) -> None:
    """Convert. SystemExit with one sentence for an architecture that is not known here."""
    config = json.loads((model_dir / "config.json").read_text())
    architecture = config["architectures"][0]
    if architecture not in ARCHITECTURES:
        raise SystemExit(f"architecture {architecture} has no GGUF form here, only {', '.join(ARCHITECTURES)} have")
    name, permuted = ARCHITECTURES[architecture]
    writer = gguf.GGUFWriter(file, name)
    heads = {"q_proj": config["num_attention_heads"]}
    heads["k_proj"] = config.get("num_key_value_heads") or heads["q_proj"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads["q_proj"]
    _write_settings(writer, config, heads, head_dim)
    if with_vocabulary:
        write_vocabulary(writer, json.loads((model_dir / "tokenizer.json").read_text()), config["vocab_size"])
    else:
        writer.add_tokenizer_model("no_vocab")
    quantization, file_type = TYPES[kind]
    writer.add_file_type(file_type)
    factors = rope_factors(config, head_dim)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    for key, tensor in read_tensors(model_dir):
        projection = key.split(".")[-2]
        if permuted and projection in heads:
            tensor = permute(tensor, heads[projection])
        if tensor.ndim == 1:
            writer.add_tensor(gguf_name(key), tensor)
            continue
        fits = kind != "q8_0" or tensor.shape[-1] % Q8_0_BLOCK == 0
        used = quantization if fits else gguf.GGMLQuantizationType.F16
        writer.add_tensor(gguf_name(key), gguf.quants.quantize(numpy.ascontiguousarray(tensor), used), raw_dtype=used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_settings(writer: gguf.GGUFWriter, config: dict[str, Any], heads: dict[str, int], head_dim: int) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads["q_proj"])
    writer.add_head_count_kv(heads["k_proj"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(_rope(config).get("rope_theta", config.get("rope_theta", 10000.0)))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def write_vocabulary(writer: gguf.GGUFWriter, tokenizer: dict[str, Any], size: int) -> None:
    """Tokens as in `tokenizer.json`, and made-up ones for ids that it lacks. SystemExit where it is no list of pairs (BPE)."""
    model = tokenizer["model"]
    if model["type"] != "BPE":
        raise SystemExit(f"a tokenizer of kind {model['type']} has no GGUF form here, only BPE has")
    tokens = [f"[PAD{place}]" for place in range(size)]
    kinds = [gguf.TokenType.UNUSED] * size
    named = [(text, place, gguf.TokenType.NORMAL) for text, place in model["vocab"].items()]
    named += [(added["content"], added["id"], gguf.TokenType.CONTROL) for added in tokenizer["added_tokens"]]
    for text, place, kind in named:
        if place < size:
            tokens[place], kinds[place] = text, kind
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    last = max((place for _, place, kind in named if kind == gguf.TokenType.CONTROL), default=0)
    writer.add_eos_token_id(min(last, size - 1))
    writer.add_add_bos_token(False)


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def rope_factors(config: dict[str, Any], head_dim: int) -> numpy.ndarray | None:
    """What Llama 3's scaling divides each frequency by, float32 [head_dim / 2]; None without scaling."""
    rope = _rope(config)
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return None
    if kind != "llama3":
        raise SystemExit(f"rope scaling {kind} has no GGUF form here, only llama3 has")
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    lengths = 2 * math.pi * theta ** (numpy.arange(0, head_dim, 2) / head_dim)
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    smooth = (rope["original_max_position_embeddings"] / lengths - low) / (high - low)
    return (1 / ((1 - numpy.clip(smooth, 0, 1)) / factor + numpy.clip(smooth, 0, 1))).astype(numpy.float32)


def gguf_name(key: str) -> str:
    """`blk.3.attn_q.weight` for `model.layers.3.self_attn.q_proj.weight`."""
    base, _, suffix = key.rpartition(".")
    if not base.startswith("model.layers."):
        return f"{NAMES[base]}.{suffix}"
    _, _, layer, rest = base.split(".", 3)
    return f"blk.{layer}.{LAYER_NAMES[rest]}.{suffix}"


def permute(rows: numpy.ndarray, num_heads: int) -> numpy.ndarray:
    """Rows of each head (its two halves rotate together) so that neighbours do."""
    shape = rows.shape
    return rows.reshape(num_heads, 2, shape[0] // num_heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def read_tensors(model_dir: Path) -> Iterator[tuple[str, numpy.ndarray]]:
    """Yields (name, float32 values) of all safetensors files. A bfloat16, which numpy lacks, is the upper half of a float32."""
    for file in sorted(model_dir.glob("*.safetensors")):
        with open(file, "rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            size = int.from_bytes(data[:8], "little")
            header = json.loads(data[8 : 8 + size])
            header.pop("__metadata__", None)
            for name, entry in header.items():
                begin, end = (8 + size + offset for offset in entry["data_offsets"])
                yield name, _decoded(data[begin:end], entry["dtype"]).reshape(entry["shape"])


def _decoded(data: bytes, dtype: str) -> numpy.ndarray:
    if dtype == "BF16":
        return (numpy.frombuffer(data, numpy.uint16).astype(numpy.uint32) << 16).view(numpy.float32)
    return numpy.frombuffer(data, {"F32": numpy.float32, "F16": numpy.float16}[dtype]).astype(numpy.float32)


def main() -> None:
    model_dir, file, kind, *vocabulary = sys.argv[1:]
    write(Path(model_dir), Path(file), kind, with_vocabulary=bool(vocabulary))


if __name__ == "__main__":
    main()
