"""A checkpoint as one GGUF file: what `./everbatch convert --to gguf` does."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from backend.api.checkpoint.gguf import gguf_file, read_header
from backend.api.checkpoint.model_files import shown
from backend.api.errors import ConfigError
from backend.architectures.description import ModelConfig
from backend.convert.gguf.families import Rules, Stored, whole_config
from backend.convert.gguf.importance import read_imatrix
from backend.convert.gguf.tokenizer import TokenizerSource, settings_of
from backend.convert.gguf.types import FILE_TYPES
from backend.convert.gguf.write import Importance, Progress, Written, new_file, write_gguf
from backend.convert.meta_tokenizer import gguf_settings
from backend.layers.rotary import inverse_frequencies
from backend.models.config import of_object
from backend.models.gguf import read_config
from backend.quant.importance import measured, token_rows

MEASURED, NO_IMPORTANCE = "measured", "none"
_KEPT = ("tokenizer.",)  # settings of a GGUF file that come into the new one as they are
_TOLERANCE = 1e-5  # relative, of numbers that the file has in float32


def convert_to_gguf(
    directory: Path,
    output: Path,
    config: dict[str, Any],
    tensors: Mapping[str, Tensor],
    kinds: tuple[str, str, str],
    progress: Progress,
) -> tuple[Written, list[str]]:
    """Returns what was written, and remarks. kinds: --type, --importance and --tokenizer. Raises ConfigError."""
    type_name, importance, tokenizer = kinds
    if type_name not in FILE_TYPES:
        raise ConfigError(f"--type is {shown(type_name)}; use one of {', '.join(FILE_TYPES)}")
    rules, described = Rules(whole_config(config)), of_object(config)
    if described.quantization is not None:
        raise ConfigError(
            f"model {directory.name} is quantised already (quantization_config of its config.json); give the float checkpoint"
        )
    settings, remarks = settings_of(
        _tokenizer_source(directory), tokenizer, described.vocab_size, tuple(described.eos_ids)
    )
    with new_file(output) as file:
        weights = _importance(importance, directory, described, tensors)
        written = write_gguf(file, rules, tensors, settings, type_name, weights, progress)
        _check_says_the_same(described, read_config(read_header(file)))
    return written, remarks


def _tokenizer_source(directory: Path) -> TokenizerSource:
    if (file := gguf_file(directory)) is not None:
        settings = read_header(file).settings
        return TokenizerSource({key: value for key, value in settings.items() if key.startswith(_KEPT)}, directory)
    has_own = (directory / "tokenizer.json").exists()
    return TokenizerSource(None if has_own else gguf_settings(directory), directory)


def _importance(wanted: str, directory: Path, config: ModelConfig, tensors: Mapping[str, Tensor]) -> Importance:
    """Raises ConfigError for an imatrix file that is none."""
    if wanted == NO_IMPORTANCE:
        return lambda stored: None
    if wanted == MEASURED:
        found = measured(config, tensors, token_rows(directory, config.vocab_size))
        return lambda stored: found.get(stored.projection)
    return partial(_of_file, read_imatrix(Path(wanted)))


def _of_file(found: Mapping[str, Tensor], stored: Stored) -> Tensor | None:
    """The importance of a tensor's columns, or of one expert's."""
    whole, columns = found.get(stored.name), stored.values.shape[-1]
    if whole is None or stored.expert is None or len(whole) <= stored.expert * columns:
        return whole
    return whole[stored.expert * columns :][:columns]


def _check_says_the_same(wanted: ModelConfig, file: ModelConfig) -> None:
    """Raise ConfigError if the file stands for another model than the checkpoint, which has settings that no file can say."""
    ours, theirs = _described(wanted), _described(file)
    for key, value in ours.items():
        if not _is_close(value, theirs.get(key)):
            raise ConfigError(
                f"a GGUF file cannot say that {key} is {shown(value)}; it would be read as {shown(theirs.get(key))}: serve the "
                f"checkpoint as it is"
            )


def _described(config: ModelConfig) -> dict[str, Any]:
    """All numbers on which the results depend, by their names."""
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
    found = {name: getattr(config, name) for name in (*sizes, "tied_embeddings", "attention_scale", "windows")}
    block = msgspec.structs.asdict(config.block)
    scaling = block.pop("query_scaling")
    found |= block | {
        "query_scaling": scaling and msgspec.structs.asdict(scaling),
        "attention_scale": config.attention_scale,
        "layers with experts": [layer.has_experts for layer in config.layers],
    }
    if config.experts is not None:
        found |= {f"experts.{key}": value for key, value in msgspec.structs.asdict(config.experts).items()}
    used = [None if layer.rope is None else config.ropes[layer.rope] for layer in config.layers]
    positions = config.max_position
    found["frequencies"] = [rope and inverse_frequencies(rope, config.head_dim, positions).tolist() for rope in used]
    found["short frequencies"] = [rope and inverse_frequencies(rope, config.head_dim, 1).tolist() for rope in used]
    found["attention_factor"] = [rope and rope.attention_factor for rope in used]
    return found


def _is_close(one: Any, other: Any) -> bool:
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_is_close, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_close(one[key], other[key]) for key in one)
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= _TOLERANCE * max(abs(one), abs(other))
    return bool(one == other)
