"""Checkpoints with Meta's names: params.json, consolidated.00.pth, .01, ... and tokenizer.model; Mistral's own in safetensors.

Format: meta-llama/llama-models, models/llama3/args.py (ModelArgs) and model.py. Each consolidated file is the part of one rank of
model parallelism: rows of wq, wk, wv, w1, w3 and output, columns of wo and w2; of the embedding rows (Llama 3) or columns.
Neighbouring rows of wq and wk are rotated together, where Hugging Face pairs row i with row i + head_dim/2.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor

from backend.api.checkpoint.model_files import convert, find_file, read_object, shown
from backend.api.errors import ConfigError
from backend.convert.pickled import open_pickle
from backend.models.convert import hf_to_meta, meta_to_hf
from backend.models.loader import open_tensors

PARAMS = "params.json"
MAX_FILES = 64
_FILE = re.compile(r"consolidated(\.\d{2})?\.(pth|safetensors)")
_OUTSIDE = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_INSIDE = {
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}
_BY_COLUMNS = ("wo.weight", "w2.weight")
_UNUSED = ("rope.freqs", "inner_attention.rope.freqs")
# constants of the scaled rope in Meta's program
_SCALED = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_LAYER = re.compile(r"layers\.(\d{1,5})\.(.+)")


class Params(Struct):
    """The keys of params.json that the converter uses. Other sizes come from the shapes of the tensors."""

    dim: int
    n_layers: int
    n_heads: int
    norm_eps: float
    n_kv_heads: int | None = None
    head_dim: int | None = None
    rope_theta: float | None = None
    use_scaled_rope: bool = False
    rope_scaling_factor: float | None = None
    sliding_window: int | None = None
    max_seq_len: int | None = None
    moe: Any = None
    moe_args: Any = None
    quantization_args: Any = None
    vision_chunk_size: int | None = None

    @property
    def kv_heads(self) -> int:
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads


def is_meta(directory: Path) -> bool:
    return directory.is_dir() and (directory / PARAMS).exists() and bool(_files(directory))


def _files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if _FILE.fullmatch(path.name))


class MetaCheckpoint(Mapping[str, Tensor]):
    """The tensors by their Hugging Face names, in Hugging Face's order of rows; each is put together when it is asked for."""

    def __init__(self, directory: Path) -> None:
        """Raises ConfigError."""
        self.directory = directory
        raw = read_object(directory, PARAMS)
        if raw is None:
            raise ConfigError(f"model {directory.name}: {PARAMS}: File does not exist; fetch the checkpoint again")
        self.params = convert(raw, Params, PARAMS)
        _check_params(self.params)
        self._shards = [_open(directory, name) for name in _checked_files(directory)]
        self._names = self._map()
        self._check_shapes()

    def __getitem__(self, name: str) -> Tensor:
        stored = self._names[name]
        parts = [shard[stored] for shard in self._shards]
        whole = parts[0] if parts[0].dim() == 1 else torch.cat(parts, self._dim(stored, parts[0]))
        heads = {"attention.wq.weight": self.params.n_heads, "attention.wk.weight": self.params.kv_heads}
        count = next((number for end, number in heads.items() if stored.endswith(end)), None)
        return whole if count is None else meta_to_hf(whole, count)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the whole tensor, without reading its numbers."""
        stored, count = self._names[name], len(self._shards)
        first = self._shards[0][stored]
        sizes = list(first.shape)
        if first.dim() == 2:
            sizes[self._dim(stored, first)] *= count
        return tuple(sizes)

    def config(self, max_positions: int | None, rope_factor: float | None) -> dict[str, Any]:
        """The content of a config.json."""
        params, head = self.params, self._head_dim()
        rows, _ = self.shape("model.embed_tokens.weight")
        config: dict[str, Any] = {
            "architectures": ["MistralForCausalLM" if params.sliding_window else "LlamaForCausalLM"],
            "model_type": "mistral" if params.sliding_window else "llama",
            "vocab_size": rows,
            "hidden_size": params.dim,
            "intermediate_size": self.shape("model.layers.0.mlp.gate_proj.weight")[0],
            "num_hidden_layers": params.n_layers,
            "num_attention_heads": params.n_heads,
            "num_key_value_heads": params.kv_heads,
            "head_dim": head,
            "hidden_act": "silu",
            "rms_norm_eps": params.norm_eps,
            "max_position_embeddings": max_positions or self._positions(),
            "tie_word_embeddings": "lm_head.weight" not in self._names,
            "rope_theta": params.rope_theta or 10_000.0,
            "dtype": str(self["model.norm.weight"].dtype).removeprefix("torch."),
        }
        if params.sliding_window:
            config["sliding_window"] = params.sliding_window
        if params.use_scaled_rope:
            factor = rope_factor or params.rope_scaling_factor or 8.0
            config["rope_scaling"] = {"rope_type": "llama3", "factor": factor, **_SCALED}
        return config

    def _positions(self) -> int:
        if self.params.max_seq_len:
            return self.params.max_seq_len
        if self.params.use_scaled_rope:
            return 131_072
        return 8192 if (self.params.rope_theta or 0) >= 500_000 else 4096 if self.params.norm_eps >= 1e-5 else 2048

    def _head_dim(self) -> int:
        return self.params.head_dim or self.params.dim // self.params.n_heads

    def _dim(self, stored: str, part: Tensor) -> int:
        """The dimension along which the ranks share a matrix."""
        if stored == "tok_embeddings.weight":
            return 0 if part.shape[1] == self.params.dim else 1
        return 1 if stored.endswith(_BY_COLUMNS) else 0

    def _map(self) -> dict[str, str]:
        """Hugging Face name -> name in the files. Raises ConfigError for a name that is no part of a plain decoder."""
        first = set(self._shards[0])
        if any(set(shard) != first for shard in self._shards):
            raise ConfigError("the consolidated files do not hold the same tensors; fetch the checkpoint again")
        names: dict[str, str] = {}
        for stored in sorted(first):
            if stored.endswith(_UNUSED):
                continue
            layer = _LAYER.fullmatch(stored)
            inside = None if layer is None else _INSIDE.get(layer[2])
            found = _OUTSIDE.get(stored) if layer is None else inside and f"model.layers.{int(layer[1])}.{inside}"
            if found is None:
                raise ConfigError(
                    f"tensor {shown(stored)} is no part of Llama's or Mistral's decoders, of which alone checkpoints with these "
                    f"names are converted; use the Hugging Face checkpoint of the model"
                )
            names[found] = stored
        return names

    def _check_shapes(self) -> None:
        """Raise ConfigError for a tensor that is missing or has another shape than params.json says."""
        params, head = self.params, self._head_dim()
        q, kv = params.n_heads * head, params.kv_heads * head
        expected: dict[str, tuple[int | None, ...]] = {
            "model.embed_tokens.weight": (None, params.dim),
            "model.norm.weight": (params.dim,),
        }
        if "lm_head.weight" in self._names:
            expected["lm_head.weight"] = (None, params.dim)
        for index in range(params.n_layers):
            for name, shape in {
                "self_attn.q_proj": (q, params.dim),
                "self_attn.k_proj": (kv, params.dim),
                "self_attn.v_proj": (kv, params.dim),
                "self_attn.o_proj": (params.dim, q),
                "mlp.gate_proj": (None, params.dim),
                "mlp.up_proj": (None, params.dim),
                "mlp.down_proj": (params.dim, None),
                "input_layernorm": (params.dim,),
                "post_attention_layernorm": (params.dim,),
            }.items():
                expected[f"model.layers.{index}.{name}.weight"] = shape
            if f"model.layers.{index}.self_attn.q_proj.weight" not in self._names:
                break  # n_layers may be any number; the loop below reports the missing tensor
        for name, shape in expected.items():
            found = self.shape(name) if name in self._names else None
            if found is None or len(found) != len(shape) or any(s not in (None, f) for s, f in zip(shape, found)):
                sizes = ["any" if size is None else size for size in shape]
                raise ConfigError(
                    f"{name} has shape {None if found is None else list(found)}, {PARAMS} says {sizes}; they do not belong "
                    f"together: fetch the checkpoint again"
                )
        if len(self._names) != len(expected):
            raise ConfigError(
                f"{PARAMS}: n_layers is {params.n_layers}, and the files hold {len(self._names)} tensors where {len(expected)} "
                f"are needed; fetch the checkpoint again"
            )


def meta_params(config: Mapping[str, Any]) -> dict[str, Any]:
    """The content of Meta's params.json that says what a Llama's config.json says. Raises ConfigError for another model."""
    if config.get("architectures") != ["LlamaForCausalLM"] or config.get("attention_bias") or config.get("mlp_bias"):
        raise ConfigError(
            f"config.json: {shown(config.get('architectures'))} has no form with Meta's names; only Llama without biases has one"
        )
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "llama3"):
        raise ConfigError(
            f"config.json: rope_type {shown(kind)} has no form in {PARAMS}; only default and llama3 have one"
        )
    if kind == "llama3" and any(rope.get(name) != value for name, value in _SCALED.items()):
        raise ConfigError(
            f"config.json: the scaled rope of Meta's files has {', '.join(f'{n} {v}' for n, v in _SCALED.items())}, which cannot "
            f"be said otherwise; this model has others"
        )
    params = {
        "dim": config["hidden_size"],
        "n_layers": config["num_hidden_layers"],
        "n_heads": config["num_attention_heads"],
        "n_kv_heads": config.get("num_key_value_heads") or config["num_attention_heads"],
        "head_dim": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "rope_theta": rope.get("rope_theta") or config.get("rope_theta") or 10_000.0,
        "vocab_size": config["vocab_size"],
        "max_seq_len": config["max_position_embeddings"],
    }
    return params | ({"use_scaled_rope": True, "rope_scaling_factor": rope["factor"]} if kind == "llama3" else {})


def meta_tensor(name: str, tensor: Tensor, params: Mapping[str, Any]) -> tuple[str, Tensor]:
    """The name and the order of rows that Meta's files have. Raises ConfigError for a tensor that they do not have."""
    outside = {ours: theirs for theirs, ours in _OUTSIDE.items()}
    if name in outside:
        return outside[name], tensor
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    inside = {ours: theirs for theirs, ours in _INSIDE.items()}
    if layer is None or layer[2] not in inside:
        raise ConfigError(f"tensor {shown(name)} has no name in Meta's files; only plain Llama decoders are written so")
    stored = inside[layer[2]]
    heads = {"attention.wq.weight": params["n_heads"], "attention.wk.weight": params["n_kv_heads"]}.get(stored)
    return f"layers.{layer[1]}.{stored}", tensor if heads is None else hf_to_meta(tensor, heads)


def _check_params(params: Params) -> None:
    """Raises ConfigError."""
    for name in ("dim", "n_layers", "n_heads", "kv_heads"):
        value = getattr(params, name)
        if not 1 <= value <= 1 << 24:
            raise ConfigError(f"{PARAMS}: {name} is {shown(value)}, 1 to {1 << 24} is possible; fetch it again")
    head = params.head_dim or params.dim // params.n_heads
    if params.n_heads % params.kv_heads or head < 2 or head % 2 or head > 1 << 16:
        raise ConfigError(
            f"{PARAMS}: n_heads {params.n_heads}, n_kv_heads {params.kv_heads} and dim {params.dim} do not go together"
        )
    for name in ("moe", "moe_args", "quantization_args", "vision_chunk_size"):
        if getattr(params, name):
            raise ConfigError(
                f"{PARAMS}: {name} is set, which is not converted; use the Hugging Face checkpoint of the model"
            )


def _checked_files(directory: Path) -> list[str]:
    names = _files(directory)
    if len(names) > MAX_FILES or len({name.rpartition(".")[2] for name in names}) > 1:
        raise ConfigError(
            f"model {directory.name} has {len(names)} consolidated files of "
            f"{', '.join(sorted({name.rpartition('.')[2] for name in names}))}; one kind and at most {MAX_FILES} are read"
        )
    if not names:
        raise ConfigError(f"model {directory.name} has no consolidated.00.pth; fetch the checkpoint again")
    return names


def _open(directory: Path, name: str) -> Mapping[str, Tensor]:
    if name.endswith(".pth"):
        return open_pickle(directory, name)
    path = find_file(directory, name)
    assert path is not None  # it has been listed
    return open_tensors([path])
