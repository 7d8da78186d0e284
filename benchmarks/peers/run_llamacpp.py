"""Runner of llama.cpp through the C interface that llama-cpp-python binds: batched prefill, batched decode, arg-max in numpy."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path
from typing import Any

from benchmarks.peers.protocol import Load, Timing, serve
from benchmarks.peers.quantize_gguf import tensor_types

_MIN_BATCH_TOKENS = 2048
_CELLS_MULTIPLE = 256  # a context's size is a multiple of this


class LlamaCpp:
    def __init__(self, load: Load) -> None:
        self._api: Any = self._bind()
        self._load = load
        self._context: Any = None
        self._concurrency = 0
        self._api.llama_backend_init()
        self._model = self._api.llama_model_load_from_file(load.model.encode(), self._model_parameters())
        if not self._model:
            raise RuntimeError(f"llama.cpp does not load {load.model}")
        self._vocab_size = self._api.llama_vocab_n_tokens(self._api.llama_model_get_vocab(self._model))
        self._batch_tokens = max(_MIN_BATCH_TOKENS, load.max_length, load.max_concurrency)
        self._batch = self._api.llama_batch_init(self._batch_tokens, 0, 1)
        self.note = tensor_types(Path(load.model))

    def measure(self, prompts: list[list[int]], new: int) -> Timing:
        self._prepare(len(prompts))
        began = time.perf_counter()
        current: list[int] = []
        batch: list[tuple[int, int, int, bool]] = []
        for s, prompt in enumerate(prompts):  # whole prompts in one batch
            batch += [(token, p, s, p == len(prompt) - 1) for p, token in enumerate(prompt)]
            if s + 1 == len(prompts) or len(batch) + len(prompts[s + 1]) > self._batch_tokens:
                self._decode(batch)
                current += [self._best_token(row) for row, (_, _, _, wanted) in enumerate(batch) if wanted]
                batch = []
        all_started = time.perf_counter()
        for step in range(new - 1):
            self._decode([(token, len(prompts[s]) + step, s, True) for s, token in enumerate(current)])
            current = [self._best_token(s) for s in range(len(prompts))]
        ended = time.perf_counter()
        return Timing(all_started - began, ended - all_started, len(prompts) * (new - 1))

    def logits(self, row: list[int]) -> Any:
        """Of a text that is given at once: float32 [length, vocab]."""
        import numpy

        self._prepare(1)
        self._decode([(token, position, 0, True) for position, token in enumerate(row)])
        rows = [self._api.llama_get_logits_ith(self._context, place) for place in range(len(row))]
        return numpy.stack([numpy.ctypeslib.as_array(each, shape=(self._vocab_size,)) for each in rows])

    def _bind(self) -> Any:
        """The functions of llama.h, silenced."""
        import llama_cpp

        self._silence = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._silence, ctypes.c_void_p(0))
        return llama_cpp

    def _model_parameters(self) -> Any:
        parameters = self._api.llama_model_default_params()
        parameters.use_mmap = (
            False  # pages of a file may be dropped while the engine is paused, and are then read from the disk
        )
        return parameters

    def _clear(self) -> None:
        """Forget all sequences."""
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)

    def _prepare(self, concurrency: int) -> None:
        """An empty context for that many sequences."""
        api = self._api
        if concurrency != self._concurrency:
            if self._context:
                api.llama_free(self._context)
            parameters = api.llama_context_default_params()
            cells = -(-self._load.max_length // _CELLS_MULTIPLE) * _CELLS_MULTIPLE
            parameters.n_ctx = concurrency * cells
            parameters.n_seq_max = concurrency
            parameters.n_batch = self._batch_tokens
            parameters.n_threads = parameters.n_threads_batch = self._load.threads
            self._context = api.llama_init_from_model(self._model, parameters)
            if not self._context:
                raise RuntimeError(f"llama.cpp makes no context of {concurrency} sequences of {cells} tokens")
            self._concurrency = concurrency
        self._clear()

    def _decode(self, tokens: list[tuple[int, int, int, bool]]) -> None:
        """Run (token, position, sequence, whether logits are wanted)."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence, wanted) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        status = self._api.llama_decode(self._context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode answered {status} to a batch of {len(tokens)} tokens")

    def _best_token(self, row: int) -> int:
        import numpy

        logits = self._api.llama_get_logits_ith(self._context, row)
        return int(numpy.ctypeslib.as_array(logits, shape=(self._vocab_size,)).argmax())


if __name__ == "__main__":
    serve(LlamaCpp, ["llama-cpp-python"])
