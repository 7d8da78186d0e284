"""Prompt adapters: the rows of embeddings that prompt tuning has learned, put in front of the prompts of requests that name them.

The files are those of backend/api/checkpoint/prompt_adapter_files.py. The virtual tokens of a request have the ids behind the
vocabulary (`Request.prompt_embeddings`); KV is shared with requests of the same rows only.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from backend.api import Request
from backend.api.checkpoint.adapter_files import WEIGHTS
from backend.api.checkpoint.model_files import shown
from backend.api.checkpoint.prompt_adapter_files import TENSOR, check_prompt_adapter, prompt_adapter_file
from backend.api.errors import ConfigError, Unsupported
from backend.api.tensor import TensorData

MAX_HELD = 32  # adapters, and below their bytes together
MAX_HELD_BYTES = 256 << 20
_TYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


class _Held(NamedTuple):
    stamp: tuple[int, int, int]  # time, size and inode of the file; a file with another stamp is read again
    table: TensorData


class PromptAdapters:
    """Reads adapters, and holds the latest. For any thread."""

    def __init__(self) -> None:
        self._held: OrderedDict[str, _Held] = OrderedDict()
        self._lock = threading.Lock()

    def table(self, directory: str) -> TensorData:
        """The rows, float32. Raises ConfigError, and Unsupported for another kind of adapter."""
        file = prompt_adapter_file(Path(directory))
        found = file.stat()
        stamp = (found.st_mtime_ns, found.st_size, found.st_ino)
        with self._lock:
            held = self._held.get(directory)
            if held is not None and held.stamp == stamp:
                self._held.move_to_end(directory)
                return held.table
        table = read_table(Path(directory))
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


def named_table(name: str, known: Mapping[str, str], adapters: PromptAdapters) -> TensorData:
    """The rows of an adapter that a request names. Raises Unsupported for a name that is not known, or cannot be read."""
    if name not in known:
        shown_names = ", ".join(each[:80] for each in list(known)[:10]) or "none"
        raise Unsupported(
            f"prompt_adapter_name is {name[:80]!r}, there are {shown_names}; name one of them, or leave prompt_adapter_name out"
        )
    try:
        return adapters.table(known[name])
    except ConfigError as error:
        raise Unsupported(f"prompt adapter {name[:80]!r}: {error.message}") from None


def read_table(directory: Path) -> TensorData:
    """Raises ConfigError and Unsupported."""
    import numpy as np  # not needed by programs without prompt adapters

    shape, file = check_prompt_adapter(directory), prompt_adapter_file(directory)
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
    return TensorData("float32", shape, rows.tobytes())
