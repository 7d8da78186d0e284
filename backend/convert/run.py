"""Converts a checkpoint folder: Meta's files or pickled ones to Hugging Face's form, or a Llama to Meta's files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from backend.api.checkpoint.gguf import gguf_file, read_header
from backend.api.checkpoint.model_files import read_object
from backend.api.errors import ConfigError
from backend.convert.meta import MetaCheckpoint, is_meta, meta_params, meta_tensor
from backend.convert.meta_tokenizer import read_tokenizer
from backend.convert.pickled import PickledTensors
from backend.models.gguf import read_config
from backend.models.gguf_checkpoint import GgufCheckpoint
from backend.models.loader import DTYPES, open_directory
from backend.quant.checkpoint import Writer, new_folder

PICKLE_INDEX, PICKLE = "pytorch_model.bin.index.json", "pytorch_model.bin"
_SHARD = re.compile(r"pytorch_model-\d{5}-of-\d{5}\.bin")
Progress = Callable[[Sequence[str]], Iterable[str]]


class ConvertSettings(NamedTuple):
    to: str = "huggingface"  # or "meta", or "gguf": a file
    dtype: str | None = None  # float32, bfloat16 or float16; None: as stored
    max_positions: int | None = None  # max_position_embeddings, which Meta's files do not say
    rope_factor: float | None = None  # factor of the scaled rope that came with Llama 3.1
    type: str = "BF16"  # the name of a GGUF file's type
    importance: str = "none"  # how much columns count there: "measured", or the path of an imatrix file
    tokenizer: str = "auto"  # "none", or the name of its words there


class Converted(NamedTuple):
    num_tensors: int
    num_bytes: int
    remarks: list[str]  # sentences about what the files did not say


class ConvertSource(NamedTuple):
    """Tensors by their Hugging Face names, and the content of config.json."""

    tensors: Mapping[str, Tensor]
    config: dict[str, Any]
    remarks: list[str]
    dtype: str | None = None  # in which tensors are written where the settings ask for none; None: as stored


_OWN_ROPE = (
    "the frequencies of the file are those of no scaling that has a name: config.json has them as rope_type factors, which \
this server reads, and transformers does not"
)


def open_source(directory: Path, wanted: ConvertSettings) -> ConvertSource:
    """Raises ConfigError."""
    if is_meta(directory):
        meta = MetaCheckpoint(directory)
        return ConvertSource(meta, meta.config(wanted.max_positions, wanted.rope_factor), _remarks(meta, wanted))
    if (file := gguf_file(directory)) is not None:
        read_config(header := read_header(file))  # raises for what `serve` would refuse
        checkpoint = GgufCheckpoint(header)
        remarks = [_OWN_ROPE] if checkpoint.has_own_rope else []
        return ConvertSource(checkpoint, checkpoint.config, remarks, checkpoint.config["dtype"])
    config = read_object(directory, "config.json")
    if config is None:
        raise ConfigError(
            f"model {directory.name} has neither params.json with consolidated files nor config.json; give the folder of a "
            f"checkpoint"
        )
    if names := _pickles(directory):
        return ConvertSource(PickledTensors(directory, names), config, [])
    return ConvertSource(open_directory(directory).tensors, config, [])


def convert_checkpoint(
    directory: Path, output: Path, wanted: ConvertSettings, progress: Progress = lambda names: names
) -> Converted:
    """Write the folder or the GGUF file `output`, which appears when it is whole. Raises ConfigError."""
    source = open_source(directory, wanted)
    if wanted.to == "gguf":
        return _write_gguf(source, directory, output, wanted, progress)
    if wanted.dtype is None:
        wanted = wanted._replace(dtype=source.dtype)
    with torch.inference_mode(), new_folder(output, directory) as folder:
        if wanted.to == "meta":
            num_bytes = _write_meta(source, folder, wanted, progress)
        else:
            num_bytes = _write(source, folder, wanted, progress)
            if is_meta(directory):
                source.remarks.extend(_write_tokenizer(directory, folder))
            open_directory(folder)  # raises for what `serve` would refuse
    return Converted(len(source.tensors), num_bytes, source.remarks)


def _write_gguf(
    source: ConvertSource, directory: Path, output: Path, wanted: ConvertSettings, progress: Progress
) -> Converted:
    if find_spec("gguf") is None:
        raise ConfigError(
            "GGUF files are written with the package gguf, which is not installed; pip install 'everbatch[gguf]' (or pip install "
            "-r requirements/gguf.txt)"
        )
    from backend.convert.to_gguf import convert_to_gguf

    kinds = wanted.type, wanted.importance, wanted.tokenizer
    with torch.inference_mode():
        written, remarks = convert_to_gguf(directory, output, source.config, source.tensors, kinds, progress)
    return Converted(written.num_tensors, written.num_bytes, [*source.remarks, *remarks])


def _write(source: ConvertSource, folder: Path, wanted: ConvertSettings, progress: Progress) -> int:
    writer, config = Writer(folder), dict(source.config)
    for name in progress(list(source.tensors)):
        writer.add({name: _as(source.tensors[name], wanted.dtype)})
    if wanted.dtype is not None:
        config.pop("torch_dtype", None)
        config["dtype"] = wanted.dtype
    writer.finish(config)
    return writer.num_bytes


def _write_meta(source: ConvertSource, folder: Path, wanted: ConvertSettings, progress: Progress) -> int:
    """consolidated.00.pth and params.json, the form of one rank. All of it is in memory before it is written."""
    params = meta_params(source.config)
    tensors = {}
    for name in progress(list(source.tensors)):
        stored, tensor = meta_tensor(name, source.tensors[name], params)
        tensors[stored] = _as(tensor, wanted.dtype).contiguous().clone()
    if "output.weight" not in tensors and not source.config.get("tie_word_embeddings"):
        raise ConfigError("the checkpoint has no lm_head; fetch it again")
    torch.save(tensors, folder / "consolidated.00.pth")
    (folder / "params.json").write_text(json.dumps(params, indent=2) + "\n")
    return sum(tensor.nbytes for tensor in tensors.values())


def _write_tokenizer(directory: Path, folder: Path) -> list[str]:
    """The tokenizer's files, unless the source had them. Returns remarks. Raises ConfigError."""
    if (folder / "tokenizer.json").exists():
        return []
    found = read_tokenizer(directory)
    if found is None:
        return ["there is no tokenizer.model, so the checkpoint has no tokenizer: add a tokenizer.json"]
    tokenizer, named, ends = found
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(named, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}) + "\n")
    return ["Meta's files hold no chat template: set model.chat_template where clients send messages"]


def _remarks(meta: MetaCheckpoint, wanted: ConvertSettings) -> list[str]:
    config, found = meta.config(wanted.max_positions, wanted.rope_factor), []
    if wanted.max_positions is None and not meta.params.max_seq_len:
        limit = config["max_position_embeddings"]
        found.append(f"params.json says no longest sequence: {limit} tokens are assumed (--max-positions)")
    if meta.params.use_scaled_rope and not (wanted.rope_factor or meta.params.rope_scaling_factor):
        found.append(
            "params.json says no rope factor: 8 is assumed, as of Llama 3.1; of Llama 3.2 it is 32 (--rope-factor)"
        )
    return found


def _pickles(directory: Path) -> list[str]:
    """The pickle files of a checkpoint without safetensors. Raises ConfigError for an index that names other files."""
    if any(directory.glob("*.safetensors")):
        return []
    index = read_object(directory, PICKLE_INDEX)
    if index is None:
        return [PICKLE] if (directory / PICKLE).exists() else []
    files = index.get("weight_map")
    names = sorted(set(map(str, files.values()))) if isinstance(files, dict) else []
    if not names or any(not _SHARD.fullmatch(name) for name in names):
        raise ConfigError(f"{PICKLE_INDEX} names other files than pytorch_model-...-of-....bin; fetch it again")
    return names


def _as(tensor: Tensor, dtype: str | None) -> Tensor:
    return tensor if dtype is None else tensor.to(DTYPES[dtype])
