"""Checkpoint folders: one float layer at a time is read, one quantised layer at a time written.

The folder is written under another name in the same parent folder and renamed at the end, so that it is never half there.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from backend.api.checkpoint.gguf import GgufHeader, eos_ids, gguf_file, read_header
from backend.api.checkpoint.gguf_parts import parts_of
from backend.api.checkpoint.model_files import find_file, read_object
from backend.api.errors import ConfigError
from backend.models.gguf import raw_config
from backend.models.loader import open_directory
from backend.quant.folds import Layer, stored_layer
from backend.text.chat import FILES, templates_of
from backend.text.gguf_tokenizer import build_tokenizer

SHARD_BYTES = 4 << 30
COPIED = ("*.json", "*.jinja", "*.model", "*.txt")  # tokenizer, chat template, generation_config.json
NOT_COPIED = ("config.json", "model.safetensors.index.json", "quantize_config.json", "params.json")
INDEX = "model.safetensors.index.json"


class FloatCheckpoint:
    """A checkpoint of float weights, a folder or a GGUF file. Raises ConfigError if it is quantised or cannot be read."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        checkpoint = open_directory(directory)
        if checkpoint.config.quantization is not None:
            raise ConfigError(
                f"model {directory.name} is quantised already (by the quantization_config of its config.json, or the types of "
                f"its GGUF file); give the float checkpoint that it was made from"
            )
        self.config = checkpoint.config
        self._tensors = checkpoint.tensors

    def layer(self, index: int) -> tuple[Layer, torch.dtype]:
        """Returns the tensors of decoder layer `index` in float32, by their names within the layer, and their stored type."""
        names = self.config.names
        stored = stored_layer(self._tensors, self.config, index)
        if not stored:
            raise ConfigError(
                f"the checkpoint lacks the tensors of {names.layers}{index}.; its config.json describes another model"
            )
        projection = stored.get(names.layer.down + ".weight")
        dtype = torch.float32 if projection is None else projection.dtype
        return {name: tensor.float() for name, tensor in stored.items()}, dtype

    def others(self) -> Layer:
        """Returns the embedding, the last norm and the output head as they are stored."""
        prefix = self.config.names.layers
        return {name: self._tensors[name] for name in self._tensors if not name.startswith(prefix)}

    def embedding(self) -> Tensor:
        return self._tensors[self.config.names.embedding + ".weight"]

    def raw_config(self) -> dict[str, Any]:
        """The content of config.json; for a GGUF file what it would be."""
        if (file := gguf_file(self.directory)) is not None:
            content = raw_config(read_header(file))
            return {key: value for key, value in content.items() if value is not None}
        raw = read_object(self.directory, "config.json")
        assert raw is not None  # it has been read before
        return raw

    def num_bytes(self) -> int:
        if (file := gguf_file(self.directory)) is not None:
            return sum(part.stat().st_size for part in parts_of(file))
        return sum(path.stat().st_size for path in self.directory.glob("*.safetensors"))


class Writer:
    """Writes the weights of a checkpoint as safetensors files, each of at least SHARD_BYTES but the last."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._pending: dict[str, Tensor] = {}
        self._shards: list[list[str]] = []
        self.num_bytes = 0

    def add(self, tensors: dict[str, Tensor]) -> None:
        self._pending |= {name: tensor.contiguous() for name, tensor in tensors.items()}
        self.num_bytes += sum(tensor.nbytes for tensor in tensors.values())
        if sum(tensor.nbytes for tensor in self._pending.values()) >= SHARD_BYTES:
            self._flush()

    def finish(self, config: dict[str, Any]) -> None:
        """Write the remaining tensors, config.json, and an index if there are several shards."""
        self._flush()
        (self._directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        if len(self._shards) == 1:
            self._part(0).rename(self._directory / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._shards):
            file = f"model-{number + 1:05d}-of-{len(self._shards):05d}.safetensors"
            self._part(number).rename(self._directory / file)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self.num_bytes}, "weight_map": weight_map}
        (self._directory / INDEX).write_text(json.dumps(index, indent=1) + "\n")

    def _flush(self) -> None:
        if self._pending:
            path = self._part(len(self._shards))
            save_file(self._pending, path, {"format": "pt"})
            path.chmod(0o644)
            self._shards.append(list(self._pending))
            self._pending = {}

    def _part(self, number: int) -> Path:
        return self._directory / f"part-{number}"


@contextmanager
def new_folder(output: Path, source: Path) -> Iterator[Path]:
    """Yields a folder that holds the source's tokenizer. It is renamed to `output` at the end, or removed after an error.

    The source is a folder or a GGUF file.
    """
    check_output(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    try:
        if (file := gguf_file(source)) is not None:
            _write_text_files(read_header(file), scratch)
        for pattern in COPIED if file is None else ():
            for path in source.glob(pattern):
                if path.name not in NOT_COPIED and find_file(source, path.name) is not None:
                    shutil.copyfile(path, scratch / path.name)
        yield scratch
        scratch.chmod(0o755)
        scratch.rename(output)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _write_text_files(header: GgufHeader, folder: Path) -> None:
    """The tokenizer and the chat template of a GGUF file in the files of a Hugging Face checkpoint."""
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(eos_ids(header))}) + "\n")
    for name, source in templates_of(header).items():
        (folder / FILES[name]).parent.mkdir(exist_ok=True)
        (folder / FILES[name]).write_text(source, encoding="utf-8")
    if header.settings.get("tokenizer.ggml.tokens"):
        tokenizer, named = build_tokenizer(header)
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(named, indent=2) + "\n")


def check_output(output: Path) -> None:
    """Raises ConfigError if `output` is a file or a folder that is not empty."""
    if output.is_dir() and any(output.iterdir()):
        raise ConfigError(f"output folder {output} is not empty; give a new one, or empty it")
    if output.exists() and not output.is_dir():
        raise ConfigError(f"output {output} is a file; give the name of a folder")
