"""Prompt adapters: the rows of embeddings that prompt tuning has learned, put in front of the prompts of requests that name them.

Format: a directory that PEFT has written for PromptTuningConfig: adapter_config.json with peft_type PROMPT_TUNING, and
adapter_model.safetensors with the tensor prompt_embeddings [virtual tokens, hidden size] in a float type. The virtual tokens of a
request have the ids behind the vocabulary (`Request.prompt_embeddings`); KV is shared with requests of the same rows only.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

import msgspec

from backend.api import Request
from backend.api.adapter_files import WEIGHTS
from backend.api.errors import ConfigError, Unsupported
from backend.api.lora import ADAPTER_CONFIG
from backend.api.model_files import find_file, read_object, shown
from backend.api.tensor import TensorData
from backend.api.weight_files import tensor_shapes

TENSOR = "prompt_embeddings"
MAX_FILE_BYTES = 256 << 20
MAX_HELD = 32  # adapters, and below their bytes together
MAX_HELD_BYTES = 256 << 20
_TYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


class _Held(NamedTuple):
    stamp: tuple[int, int, int]  # of the file: a changed one is read again
    table: TensorData


class PromptAdapters:
    """Reads adapters, and holds the latest. For any thread."""

    def __init__(self) -> None:
        self._held: OrderedDict[str, _Held] = OrderedDict()
        self._lock = threading.Lock()

    def table(self, directory: str) -> TensorData:
        """The rows, float32. Raises ConfigError, and Unsupported for another kind of adapter."""
        path = Path(directory)
        file = find_file(path, WEIGHTS, MAX_FILE_BYTES) if path.is_dir() else None
        if file is None:
            raise ConfigError(
                f"{shown(path.name)}: {WEIGHTS}: File does not exist; give the directory of a prompt adapter"
            )
        found = file.stat()
        stamp = (found.st_mtime_ns, found.st_size, found.st_ino)
        with self._lock:
            held = self._held.get(directory)
            if held is not None and held.stamp == stamp:
                self._held.move_to_end(directory)
                return held.table
        table = read_table(path, file)
        with self._lock:
            self._held[directory] = _Held(stamp, table)
            self._held.move_to_end(directory)
            while len(self._held) > 1 and (
                len(self._held) > MAX_HELD or sum(len(each.table.data) for each in self._held.values()) > MAX_HELD_BYTES
            ):
                self._held.popitem(last=False)
        return table


def with_table(request: Request, table: TensorData, vocab_size: int) -> Request:
    """The request with the adapter's virtual tokens in front of its prompt. Raises Unsupported beside embeddings of its own."""
    if request.prompt_embeddings is not None or request.position_ids is not None:
        raise Unsupported(
            "a prompt adapter does not go with prompt embeddings or positions of the request; leave one out"
        )
    virtual = list(range(vocab_size, vocab_size + table.shape[0]))
    return msgspec.structs.replace(request, input_token_ids=virtual + request.input_token_ids, prompt_embeddings=table)


def read_table(directory: Path, file: Path) -> TensorData:
    """Raises ConfigError and Unsupported."""
    import numpy as np  # not needed by programs without prompt adapters

    config = read_object(directory, ADAPTER_CONFIG)
    if config is None:
        raise ConfigError(f"{shown(directory.name)}: {ADAPTER_CONFIG}: File does not exist; give a PEFT directory")
    if config.get("peft_type") != "PROMPT_TUNING" or config.get("num_transformer_submodules") not in (None, 1):
        raise Unsupported(
            f"{ADAPTER_CONFIG}: peft_type is {shown(config.get('peft_type'))}; a prompt adapter is PROMPT_TUNING of a decoder"
        )
    shapes = tensor_shapes(file)
    shape = shapes.get(TENSOR)
    if shape is None or len(shape) != 2 or 0 in shape:
        raise ConfigError(f"{WEIGHTS}: {TENSOR} has shape {shown(shape)}, [virtual tokens, hidden size] is needed")
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    entry = json.loads(data[8 : 8 + length])[TENSOR]
    if entry["dtype"] not in _TYPES:
        raise ConfigError(f"{WEIGHTS}: {TENSOR} is {shown(entry['dtype'])}, one of {', '.join(_TYPES)} is needed")
    begin, end = entry["data_offsets"]
    stored = np.frombuffer(data[8 + length + begin : 8 + length + end], _TYPES[entry["dtype"]])
    if entry["dtype"] == "BF16":
        stored = (stored.astype("<u4") << 16).view("<f4")
    rows = stored.astype("<f4")
    if not np.isfinite(rows).all():
        raise ConfigError(f"{WEIGHTS}: {TENSOR} holds a number that is not finite; train the adapter again")
    return TensorData("float32", (shape[0], shape[1]), rows.tobytes())
