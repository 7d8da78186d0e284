"""Checks of a prompt adapter's files that read none of its numbers: before a server starts, and before they are read.

Format: a directory that PEFT has written for PromptTuningConfig: adapter_config.json with peft_type PROMPT_TUNING, and
adapter_model.safetensors with the tensor prompt_embeddings [virtual tokens, hidden size] in a float type.
"""

from __future__ import annotations

from pathlib import Path

from backend.api.checkpoint.adapter_files import WEIGHTS
from backend.api.checkpoint.model_files import find_file, read_object, shown
from backend.api.checkpoint.weight_files import tensor_shapes
from backend.api.errors import ConfigError, Unsupported
from backend.api.lora import ADAPTER_CONFIG

TENSOR = "prompt_embeddings"
MAX_FILE_BYTES = 256 << 20


def prompt_adapter_file(directory: Path) -> Path:
    """The file of the rows. Raises ConfigError."""
    file = find_file(directory, WEIGHTS, MAX_FILE_BYTES) if directory.is_dir() else None
    if file is None:
        raise ConfigError(
            f"{shown(directory.name)}: {WEIGHTS}: File does not exist; give the directory of a prompt adapter"
        )
    return file


def check_prompt_adapter(directory: Path) -> tuple[int, int]:
    """The shape of the rows, [virtual tokens, hidden size]. Raises ConfigError, and Unsupported for another kind of adapter."""
    file, config = prompt_adapter_file(directory), read_object(directory, ADAPTER_CONFIG)
    if config is None:
        raise ConfigError(f"{shown(directory.name)}: {ADAPTER_CONFIG}: File does not exist; give a PEFT directory")
    if config.get("peft_type") != "PROMPT_TUNING" or config.get("num_transformer_submodules") not in (None, 1):
        raise Unsupported(
            f"{ADAPTER_CONFIG}: peft_type is {shown(config.get('peft_type'))}; a prompt adapter is PROMPT_TUNING of a decoder"
        )
    shape = tensor_shapes(file).get(TENSOR)
    if shape is None or len(shape) != 2 or 0 in shape:
        raise ConfigError(f"{WEIGHTS}: {TENSOR} has shape {shown(shape)}, [virtual tokens, hidden size] is needed")
    return shape[0], shape[1]
