"""Logits of token rows by llama.cpp itself. Runs in llama.cpp's environment.

python -m benchmarks.peers.llamacpp_logits MODEL.gguf ROWS.npy LOGITS.npy --threads N

ROWS [rows, length] integers, each a text of its own -> LOGITS [rows, length, vocab] float32.
"""

from __future__ import annotations

import argparse
import ctypes
from pathlib import Path
from typing import Any

import llama_cpp
import numpy
from numpy.typing import NDArray


class Model:
    """A GGUF model with one context of one sequence."""

    def __init__(self, path: Path, length: int, threads: int) -> None:
        self._silence = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._silence, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self._model: Any = llama_cpp.llama_model_load_from_file(
            str(path).encode(), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise SystemExit(f"llama.cpp does not load {path.name}")
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = length
        parameters.n_threads = parameters.n_threads_batch = threads
        self._context: Any = llama_cpp.llama_init_from_model(self._model, parameters)
        if not self._context:
            raise SystemExit(f"llama.cpp makes no context of {length} tokens")
        self._batch = llama_cpp.llama_batch_init(length, 0, 1)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def logits(self, row: NDArray) -> NDArray:
        """row [length] -> [length, vocab] float32."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        batch = self._batch
        batch.n_tokens = len(row)
        for position, token in enumerate(row.tolist()):
            batch.token[position], batch.pos[position], batch.logits[position] = token, position, True
            batch.n_seq_id[position], batch.seq_id[position][0] = 1, 0
        status = llama_cpp.llama_decode(self._context, batch)
        if status != 0:
            raise SystemExit(f"llama_decode answered {status} to {len(row)} tokens")
        values = llama_cpp.llama_get_logits(self._context)
        return numpy.ctypeslib.as_array(values, shape=(len(row), self.vocab_size)).copy()


def main() -> None:
    parser = argparse.ArgumentParser(description="Logits of token rows by llama.cpp.")
    parser.add_argument("model", type=Path)
    parser.add_argument("rows", type=Path)
    parser.add_argument("logits", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    rows = numpy.load(arguments.rows)
    model = Model(arguments.model, rows.shape[1], arguments.threads)
    numpy.save(arguments.logits, numpy.stack([model.logits(row) for row in rows]))


if __name__ == "__main__":
    main()
