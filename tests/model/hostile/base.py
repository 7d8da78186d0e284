"""A checkpoint of one tiny layer with its tokenizer, written in milliseconds, and ways to spoil it."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Reader = Literal["engine", "text"]
CONFIG: dict[str, Any] = dict(
    architectures=["LlamaForCausalLM"],
    vocab_size=32,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=64,
    rope_theta=10000.0,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    torch_dtype="float32",
    eos_token_id=1,
)
LAYER = "model.layers.0."
DOWN = LAYER + "mlp.down_proj.weight"
WORDS = ["<unk>", "</s>", *(chr(code) for code in range(ord("a"), ord("a") + 26))]
TOKENIZER: dict[str, Any] = dict(
    version="1.0",
    truncation=None,
    padding=None,
    added_tokens=[],
    normalizer=None,
    pre_tokenizer=None,
    post_processor=None,
    decoder=None,
    model=dict(type="WordLevel", vocab={word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"),
)
INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"


class Case(NamedTuple):
    """A checkpoint that must be refused."""

    name: str
    spoil: Callable[[Path], object]
    tells: tuple[str, ...]  # the sentence must name these, in this order
    reader: Reader = "engine"


def write(directory: Path) -> Path:
    """A checkpoint that both readers take."""
    directory.mkdir(parents=True)
    write_json(directory / "config.json", CONFIG)
    write_json(directory / "generation_config.json", {"eos_token_id": [1]})
    write_json(directory / "tokenizer.json", TOKENIZER)
    write_json(directory / "tokenizer_config.json", {"eos_token": "</s>", "clean_up_tokenization_spaces": False})
    (directory / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    save_file(weights(), directory / WEIGHTS, {"format": "pt"})
    return directory


def weights() -> dict[str, Tensor]:
    shapes = {"model.embed_tokens.weight": (32, 64), "model.norm.weight": (64,)}
    shapes |= {LAYER + f"{name}_layernorm.weight": (64,) for name in ("input", "post_attention")}
    for name, rows in dict(q=64, k=32, v=32, o=64).items():
        shapes[LAYER + f"self_attn.{name}_proj.weight"] = (rows, 64)
    shapes |= {LAYER + f"mlp.{name}_proj.weight": (64, 64) for name in ("gate", "up", "down")}
    return {name: torch.full(shape, 0.01) for name, shape in shapes.items()}


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content))


def config(**changes: object) -> Callable[[Path], None]:
    """Writes other values into config.json."""
    return merged("config.json", **changes)


def merged(name: str, **changes: object) -> Callable[[Path], None]:
    """A JSON file with other values at its top; DELETE leaves a key out."""

    def spoil(directory: Path) -> None:
        path = directory / name
        raw = (json.loads(path.read_text()) if path.is_file() else {}) | changes
        write_json(path, {key: value for key, value in raw.items() if value != "DELETE"})

    return spoil


def text(name: str, content: str | bytes) -> Callable[[Path], None]:
    """Writes a file with this content."""
    return lambda directory: (directory / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def config_text(key: str, literal: str) -> Callable[[Path], None]:
    """config.json with a value that json.dumps would not write."""

    def spoil(directory: Path) -> None:
        raw = json.dumps(CONFIG | {key: "PLACE"})
        (directory / "config.json").write_text(raw.replace('"PLACE"', literal))

    return spoil


def deep(levels: int, opening: str = "[", closing: str = "]") -> str:
    return '{"a":' + opening * levels + "0" + closing * levels + "}"


def sparse(name: str, num_bytes: int) -> Callable[[Path], None]:
    """A file of zeros that takes no room on the disk."""

    def spoil(directory: Path) -> None:
        with (directory / name).open("wb") as file:
            file.truncate(num_bytes)

    return spoil


def tensors(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    """Writes other tensors into model.safetensors."""

    def spoil(directory: Path) -> None:
        held = load_file(directory / WEIGHTS)
        change(held)
        save_file(held, directory / WEIGHTS, {"format": "pt"})

    return spoil


def read_header(directory: Path) -> tuple[dict[str, Any], bytes]:
    """Returns (header, data) of model.safetensors."""
    content = (directory / WEIGHTS).read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def put_header(directory: Path, header: bytes, data: bytes, length: int | None = None) -> None:
    """`length`: what the file says of its header, if not the truth."""
    declared = struct.pack("<Q", len(header) if length is None else length)
    (directory / WEIGHTS).write_bytes(declared + header + data)


def header(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """model.safetensors with another header before the same data."""

    def spoil(directory: Path) -> None:
        entries, data = read_header(directory)
        change(entries)
        put_header(directory, json.dumps(entries).encode(), data)

    return spoil


def both(*spoils: Callable[[Path], object]) -> Callable[[Path], None]:
    def spoil(directory: Path) -> None:
        for each in spoils:
            each(directory)

    return spoil


def remove(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).unlink()


def instead(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Something else in the place of a file: `make` is given its path."""

    def spoil(directory: Path) -> None:
        (directory / name).unlink(missing_ok=True)
        make(directory / name)

    return spoil


def index(weight_map: object, keep_file: bool = False) -> Callable[[Path], None]:
    """An index in the place of model.safetensors, which stays as shard.safetensors or under its name."""

    def spoil(directory: Path) -> None:
        if not keep_file:
            (directory / WEIGHTS).rename(directory / "shard.safetensors")
        write_json(directory / INDEX, {"metadata": {}, "weight_map": weight_map})

    return spoil
