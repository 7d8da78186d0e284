"""Checkpoints: a Hugging Face directory (config.json, safetensors in one file or shards), or the same in memory.

safetensors only: a pickle-based file could run code while it is read, so it is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from backend.api.errors import ConfigError
from backend.models.config import ModelConfig, eos_ids, parse_model_config, read_model_config
from backend.models.linears import LinearOptions
from backend.models.llama import Llama
from backend.models.registry import FAMILIES

DEFAULT_MODEL = Path(__file__).resolve().parents[2] / "models" / "default"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_model_path(path: str) -> Path:
    """A directory, a Hugging Face hub id (fetched or found in the local cache), or "" for the default model."""
    if not path:
        return DEFAULT_MODEL
    if Path(path).is_dir():
        return Path(path)
    if Path(path).is_absolute() or path.startswith((".", "~")) or path.count("/") != 1:
        raise ConfigError(f"model {path}: File does not exist; give a checkpoint directory or a hub id (ORG/NAME)")
    return _from_hub(path)


class Checkpoint:
    """A parsed config.json and the tensors that go with it. Nothing large is read before `build`."""

    def __init__(self, config: ModelConfig, tensors: Mapping[str, Tensor]):
        self.config = config
        self.tensors = tensors

    def compute_dtype(self, dtype: str) -> torch.dtype:
        """The dtype to compute in; `auto` is the checkpoint's own. Raises ConfigError for one that is not supported."""
        name = self.config.dtype if dtype == "auto" else dtype
        if name is None:
            embedding = self.tensors.get("model.embed_tokens.weight")
            name = "float32" if embedding is None else str(embedding.dtype)
        name = name.removeprefix("torch.")
        if name not in DTYPES:
            raise ConfigError(
                f"dtype {name} is not supported; use one of {', '.join(DTYPES)} with --set model.dtype=..."
            )
        return DTYPES[name]

    def build(self, max_seq_len: int | None, dtype: torch.dtype, device: torch.device, linears: LinearOptions) -> Llama:
        """Make the model. Raises ConfigError."""
        limit = max_seq_len or self.config.max_position
        if limit > self.config.max_position:
            raise ConfigError(
                f"model.max_seq_len is {limit}, the model's own limit is {self.config.max_position}; lower it"
            )
        with torch.inference_mode():
            return FAMILIES[self.config.architecture](self.config, self.tensors, limit, dtype, device, linears)


def open_directory(directory: Path) -> Checkpoint:
    """A checkpoint directory. Raises ConfigError."""
    return Checkpoint(read_model_config(directory), _LazyTensors(_weight_files(directory)))


def of_buffers(tensors: Mapping[str, Tensor], json_config: str) -> Checkpoint:
    """Tensors in memory and the text of a config.json. Raises ConfigError."""
    return Checkpoint(parse_model_config(json_config), tensors)


def load_directory(
    directory: Path,
    max_seq_len: int | None,
    dtype: str,
    device: torch.device,
    linears: LinearOptions = LinearOptions(),  # noqa: B008 (immutable)
) -> Llama:
    """Open and build in one go. Raises ConfigError."""
    checkpoint = open_directory(directory)
    return checkpoint.build(max_seq_len, checkpoint.compute_dtype(dtype), device, linears)


def read_eos_ids(directory: Path) -> tuple[int, ...]:
    """Token ids that end a text: generation_config.json's, else config.json's."""
    path = directory / "generation_config.json"
    if path.is_file():
        try:
            ids = eos_ids(json.loads(path.read_text()))
        except (json.JSONDecodeError, AttributeError):
            raise ConfigError(f"model {directory.name}: generation_config.json is not a JSON object") from None
        if ids:
            return ids
    return read_model_config(directory).eos_ids


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, "pt")
    except SafetensorError as error:
        raise ConfigError(f"{path.name} is no safetensors file, or is cut short: {error}; fetch it again") from None


class _LazyTensors(Mapping[str, Tensor]):
    """Tensors of safetensors files, read one at a time when they are asked for.

    safetensors maps a whole file into memory for as long as a tensor of it lives, and pages once touched count as used. So
    the file is opened for each tensor anew: what has been read is let go together with the tensor.
    """

    def __init__(self, paths: list[Path]):
        self._paths: dict[str, Path] = {}
        for path in paths:
            with _open(path) as file:
                self._paths |= dict.fromkeys(file.keys(), path)

    def __getitem__(self, name: str) -> Tensor:
        with _open(self._paths[name]) as file:
            return file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


def _weight_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError):
            raise ConfigError(f"model {directory.name}: {index.name} has no weight_map; fetch it again") from None
        missing = [name for name in names if not (directory / name).is_file()]
        if missing:
            raise ConfigError(f"model {directory.name}: {missing[0]}: File does not exist; {len(missing)} missing")
        return [directory / name for name in names]
    if (directory / "model.safetensors").is_file():
        return [directory / "model.safetensors"]
    if any(directory.glob("*.bin")) or any(directory.glob("*.pt")):
        raise ConfigError(f"model {directory.name} has pickle weights (.bin, .pt): refused; convert to safetensors")
    raise ConfigError(f"model {directory.name}: model.safetensors: File does not exist")


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.model", "*.jinja"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"model {name}: File does not exist here and could not be fetched ({type(error).__name__}); "
            f"give a checkpoint directory"
        ) from None
