"""Binding of native/sampling.cpp: one call chooses the tokens of all rows of a step. The reference is kernels/sampling.py.

Guarantees, for float32 logits without NaN:

- The greedy choice, the changes to logits (sparse additions, penalties), the random number, and everything that follows from
  the integer weights (top-k, top-p, min-p, the draw, the order among equal weights) equal the reference, bit for bit.
- The weights are floor(2^40 softmax), as in the reference, but exp, the sum and the quotient are rounded differently: with
  q = (x - max x) / temperature in float32, as in the reference, a weight w lies within 1 + 2^-18 w of 2^40 softmax(q). (The
  weights of torch's float32 softmax were measured to be off by up to 2^-16.7 w.) So a token can differ from the reference's only
  if the random number, or a filter's limit, lies that close to the boundary between two tokens.
- A row's result is the same, bit for bit, in any batch, on any number of threads, and with any instruction set.
- Log-probabilities are within 1e-6 of the exact ones; they are -inf for a NaN, and if the row has no finite logit.
- A row without any finite logit gets the last token of the vocabulary when it samples, token 0 when it is greedy.

The logits are unchanged after the call.
"""

from __future__ import annotations

from ctypes import CDLL, POINTER, Structure, byref, c_float, c_int64, c_void_p
from dataclasses import dataclass
from enum import IntEnum, IntFlag

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class FloatColumn(IntEnum):
    """Columns of the float64 table, which has a row for each slot."""

    TEMPERATURE = 0  # at least the smallest normal float32
    TOP_P = 1
    MIN_P = 2
    REPETITION = 3
    PRESENCE = 4
    FREQUENCY = 5


class IntColumn(IntEnum):
    """Columns of the int64 table, which has a row for each slot. The address of an empty list is 0."""

    TOP_K = 0  # 1 .. vocab
    SEED = 1  # a uint64 as two's complement
    COUNTER_BASE = 2  # the random counter is this plus the number of known tokens
    NUM_PROMPT = 3
    MODE = 4  # flags of Mode
    MIN_TOKENS = 5
    NUM_ENDS = 6
    ENDS = 7  # address of [ends] int64: masked while known - NUM_PROMPT < MIN_TOKENS
    NUM_BIAS = 8
    BIAS_IDS = 9  # address of [bias] int64
    BIAS_VALUES = 10  # address of [bias] float32
    NUM_WORDS = 11
    WORD_WIDTH = 12
    WORDS = 13  # address of [words, width] int64, aligned to the right
    WORD_LENGTHS = 14  # address of [words] int64, 1 .. width
    TOP_LOG_PROBS = 15
    NGRAM = 16  # no run of so many tokens may occur twice; 0 = off


class Mode(IntFlag):
    GREEDY = 1
    FILTERED = 2  # top-k, top-p or min-p
    PENALTIES = 4
    LOG_PROBS = 8


@dataclass(slots=True)
class NativeLogProbs:
    """Natural logarithms of softmax over the unchanged logits. Only the entries of rows that ask for them are filled in."""

    chosen: NDArray[np.float32]  # [count]
    top: NDArray[np.float32]  # [count, width], falling
    top_ids: NDArray[np.int64]  # [count, width]

    @classmethod
    def empty(cls, count: int, width: int) -> NativeLogProbs:
        shape = (count, width)
        return cls(
            np.empty(count, dtype=np.float32), np.empty(shape, dtype=np.float32), np.empty(shape, dtype=np.int64)
        )

    def addresses(self) -> tuple[int, int, int]:
        return self.chosen.ctypes.data, self.top.ctypes.data, self.top_ids.ctypes.data


class _Samples(Structure):
    _fields_ = [
        ("logits", c_void_p),
        ("num_logits", c_int64),
        ("stride", c_int64),
        ("vocab", c_int64),
        ("floats", c_void_p),
        ("ints", c_void_p),
        ("num_slots", c_int64),
        ("token_ids", c_void_p),
        ("max_seq_len", c_int64),
        ("count", c_int64),
        ("rows", c_void_p),
        ("slots", c_void_p),
        ("num_tokens", c_void_p),
        ("chosen", c_void_p),
        ("log_probs", c_void_p),
        ("top_log_probs", c_void_p),
        ("top_ids", c_void_p),
        ("top_width", c_int64),
        ("threads", c_int64),
    ]


class NativeSampling:
    """Calls the two sampling functions of a loaded library."""

    def __init__(self, library: CDLL):
        self._sample = library.everbatch_sample
        self._sample.argtypes, self._sample.restype = [POINTER(_Samples)], c_int64
        self._weights = library.everbatch_sampling_weights
        self._weights.argtypes, self._weights.restype = [c_void_p, c_int64, c_float, c_void_p], c_int64

    def sample(
        self,
        logits: Tensor,  # [num_logits, vocab] float32
        samples: NDArray[np.int64],  # [3, count]: row of the logits, slot, known tokens of each sample
        floats: Tensor,  # [num_slots, FloatColumn] float64
        ints: Tensor,  # [num_slots, IntColumn] int64
        token_ids: Tensor,  # [num_slots, max_seq_len] int64
        top_width: int | None = None,  # most alternatives that a row asks for; None: no row asks for log-probabilities
    ) -> tuple[NDArray[np.int64], NativeLogProbs | None]:
        """Choose a token for each sample, on up to torch.get_num_threads() threads, one row to a thread.

        Returns the tokens [count], and with `top_width` the log-probabilities. Raises ValueError for tensors of another kind, a
        row or slot that does not exist, or a negative length; MemoryError when memory runs out.
        """
        for tensor, dtype in ((logits, torch.float32), (token_ids, torch.int64), (floats, torch.float64)):
            if tensor.dtype != dtype or tensor.device.type != "cpu" or tensor.stride(1) != 1:
                raise ValueError(
                    f"a tensor of {tensor.dtype} on {tensor.device} with strides {tensor.stride()} came where {dtype} on the "
                    f"CPU with contiguous rows is allowed; convert it first"
                )
        samples = np.ascontiguousarray(samples, dtype=np.int64)
        count = samples.shape[1]
        chosen = np.empty(count, dtype=np.int64)
        log_probs = None if top_width is None else NativeLogProbs.empty(count, top_width)
        first, row_bytes = samples.ctypes.data, count * samples.itemsize
        batch = _Samples(
            logits.data_ptr(), logits.shape[0], logits.stride(0), logits.shape[1],
            floats.data_ptr(), ints.data_ptr(), floats.shape[0],
            token_ids.data_ptr(), token_ids.stride(0),
            count, first, first + row_bytes, first + 2 * row_bytes, chosen.ctypes.data,
            *((None, None, None) if log_probs is None else log_probs.addresses()), top_width or 0,
            torch.get_num_threads(),
        )  # fmt: skip
        status = self._sample(byref(batch))
        if status > 0:
            row, slot, known = samples[:, status - 1].tolist()
            raise ValueError(
                f"sample {status - 1} has row {row}, slot {slot} and {known} tokens; "
                f"there are {logits.shape[0]} rows and {floats.shape[0]} slots"
            )
        if status < 0:
            raise MemoryError(f"no memory for sampling {count} rows of {logits.shape[1]} logits; use a smaller batch")
        return chosen, log_probs

    def weights(self, logits: Tensor, temperature: float) -> Tensor:
        """Integer weights [vocab] int64 of one row [vocab] float32; zeros without a finite logit. For tests."""
        out = torch.zeros(len(logits))
        self._weights(logits.data_ptr(), len(logits), temperature, out.data_ptr())
        return out.to(torch.int64)
