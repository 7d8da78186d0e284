"""Sampling parameters of each slot: numbers in two tables with a row per slot, and the lists that the tables point to.

A slot's parameters change only in `set_row`, which replaces all of them. The columns of the tables are FloatColumn and
IntColumn of kernels/cpu/sampling.py, which reads them on a CPU; the torch path reads them on any device.

The random counter of the next token is num_sampled_before + outputs so far = counter base + known tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from backend.api.sampling import SamplingConfig
from backend.core.step import NewRow, SlotId
from kernels.common.transfer import place
from kernels.cpu.sampling import FloatColumn, IntColumn, Mode
from kernels.sampling import decayed_top_p

MIN_TEMPERATURE = 1.2e-38  # smallest normal float32; lower temperatures leave only the most likely tokens anyway
DEFAULT_TOP_P_MIN = 1e-6
UNKNOWN = -1  # `plain_from` of a slot without a row
NEVER = (
    1 << 62
)  # more known tokens than any row reaches; stands for "never" in `plain_from`, for "always" in `special_until`


class TopPDecay(NamedTuple):
    """How top_p changes with the output; see kernels.sampling.decayed_top_p."""

    top_p: float  # the initial value
    decay: float
    least: float
    reset_id: int  # -1 = none


class SlotOptions(Struct, frozen=True):
    """A row's options for the choice of its tokens, and the sparse additions to its logits (tensors on the device)."""

    is_greedy: bool = True
    is_filtered: bool = False  # top-k, top-p or min-p
    has_penalties: bool = False
    top_k: int = 0  # 1 .. vocab
    num_prompt_tokens: int = 0
    min_tokens: int = 0
    end_ids: Tensor | None = None  # [ends] int64
    bias: tuple[Tensor, Tensor] | None = None  # ids [entries] int64, values [entries] float32
    words: tuple[Tensor, Tensor] | None = None  # bad words [words, width] int64 aligned to the right, lengths [words]
    n_sigma: float = 0.0  # top-n-sigma of a row that samples; 0 = off
    ngram: int = 0  # no run of so many tokens may occur twice; 0 = off
    decay: TopPDecay | None = None
    return_log_probs: bool = False
    top_log_probs: int = 0
    is_guided: bool = False  # GuidedRows masks its logits

    @property
    def wants_log_probs(self) -> bool:
        return self.return_log_probs or self.top_log_probs > 0

    def top_p_after(self, tokens: Tensor) -> Tensor:
        """top_p behind all known tokens [known] int64, as a float64 scalar. The row's top_p must decay."""
        assert self.decay is not None  # the caller has looked
        return decayed_top_p(tokens[self.num_prompt_tokens :], *self.decay)

    @property
    def special_until(self) -> int:
        """The row needs Kind.SPECIAL (changed logits, or log-probabilities) while it has fewer known tokens than this."""
        if (
            self.has_penalties
            or self.bias
            or self.words
            or self.ngram
            or self.n_sigma
            or self.decay
            or self.wants_log_probs
            or self.is_guided
        ):
            return NEVER
        return 0 if self.end_ids is None else self.num_prompt_tokens + self.min_tokens

    @property
    def plain_from(self) -> int:
        """From this number of known tokens on, the row needs nothing but the id of the model's greatest logit."""
        return self.special_until if self.is_greedy else NEVER


class SlotParameters:
    """The parameters of all slots. Values are not checked here: the limits were checked when the request was accepted.

    On the host are floats [num_slots, FloatColumn] float64, ints [num_slots, IntColumn] int64, and, each [num_slots]:
    plain_from, special_until    those of SlotOptions; plain_from is UNKNOWN for a slot without a row. They are lists because
                                 every step reads them, and numpy's code is out of the CPU's caches after a model step
    log_prob_widths              alternatives that the row asks for; -1 if it asks for no log-probabilities
    is_greedy                    whether the row takes its greatest logit
    The tensors in `options` are on the device.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.floats = torch.zeros(num_slots, len(FloatColumn), dtype=torch.float64)
        self.ints = torch.zeros(num_slots, len(IntColumn), dtype=torch.int64)
        self.is_greedy = np.ones(num_slots, dtype=bool)
        self.plain_from = [UNKNOWN] * num_slots
        self.special_until = [0] * num_slots
        self.log_prob_widths = np.full(num_slots, -1)
        self.options = [SlotOptions()] * num_slots  # options of a slot without a row are never read

    def set_row(self, row: NewRow) -> None:
        """Replace all parameters of `row.slot`."""
        config = row.sampling
        top_k = min(config.top_k or self.vocab_size, self.vocab_size)
        top_p = _value(config.top_p, 1.0)
        min_p = _value(config.min_p, 0.0)
        options = SlotOptions(
            is_greedy=config.is_greedy,
            is_filtered=top_k < self.vocab_size or top_p < 1.0 or min_p > 0.0 or config.decays_top_p,
            has_penalties=config.has_penalties,
            top_k=top_k,
            num_prompt_tokens=row.num_prompt_tokens,
            min_tokens=config.min_tokens or 0,
            end_ids=self._ids(row.end_ids) if row.end_ids and config.min_tokens else None,
            bias=self._bias(config.logit_bias) if config.logit_bias else None,
            words=self._words(row.bad_words) if any(row.bad_words) else None,
            n_sigma=0.0 if config.is_greedy else max(_value(config.top_n_sigma, 0.0), 0.0),
            ngram=config.no_repeat_ngram_size or 0,
            decay=_decay(config, top_p) if config.decays_top_p and not config.is_greedy else None,
            return_log_probs=row.return_log_probs,
            top_log_probs=min(row.top_log_probs, self.vocab_size),
            is_guided=row.is_guided,
        )
        seed = config.seed or 0
        seed -= (1 << 64) if seed >= 1 << 63 else 0
        base = row.num_sampled_before - row.num_prompt_tokens
        temperature = max(_value(config.temperature, 1.0), MIN_TEMPERATURE)
        self.floats[row.slot] = torch.tensor([temperature, top_p, min_p, *_penalties(config)], dtype=torch.float64)
        self.ints[row.slot] = torch.tensor([top_k, seed, base, row.num_prompt_tokens, _mode(options), *_lists(options)])
        self.options[row.slot] = options
        self.plain_from[row.slot] = options.plain_from
        self.special_until[row.slot] = options.special_until
        self.is_greedy[row.slot] = options.is_greedy
        self.log_prob_widths[row.slot] = options.top_log_probs if options.wants_log_probs else -1

    def decay_top_p(self, slots: list[SlotId], token_ids: Tensor, num_tokens: list[int]) -> None:
        """Bring `floats` up to date for the next token of each slot. token_ids [num_slots, max_seq_len] is only read."""
        for slot, known in zip(slots, num_tokens):
            if self.options[slot].decay is not None:
                self.floats[slot, FloatColumn.TOP_P] = self.options[slot].top_p_after(token_ids[slot, :known])

    def _ids(self, ids: tuple[int, ...] | list[int] | list[list[int]]) -> Tensor:
        return place(np.array(ids, dtype=np.int64), self.device)

    def _bias(self, bias: dict[int, float]) -> tuple[Tensor, Tensor]:
        return self._ids(list(bias)), place(np.array(list(bias.values()), dtype=np.float32), self.device)

    def _words(self, words: list[list[int]]) -> tuple[Tensor, Tensor]:
        words = [word for word in words if word]
        width = max(map(len, words))
        table = [[0] * (width - len(word)) + word for word in words]
        return self._ids(table), self._ids([len(word) for word in words])


def _value(value: float | None, default: float) -> float:
    return default if value is None else value


def _decay(config: SamplingConfig, top_p: float) -> TopPDecay:
    least = _value(config.top_p_min, DEFAULT_TOP_P_MIN)
    reset_id = -1 if config.top_p_reset_ids is None else config.top_p_reset_ids
    return TopPDecay(top_p, _value(config.top_p_decay, 1.0), least, reset_id)


def _penalties(config: SamplingConfig) -> tuple[float, float, float]:
    return (
        _value(config.repetition_penalty, 1.0),
        _value(config.presence_penalty, 0.0),
        _value(config.frequency_penalty, 0.0),
    )


def _mode(options: SlotOptions) -> int:
    return (
        Mode.GREEDY * options.is_greedy
        | Mode.FILTERED * options.is_filtered
        | Mode.PENALTIES * options.has_penalties
        | Mode.LOG_PROBS * options.wants_log_probs
    )


def _lists(options: SlotOptions) -> list[int]:
    """The columns of IntColumn from MIN_TOKENS on: sizes and addresses of the lists, which live as long as `options`."""
    ends, (bias_ids, bias_values) = options.end_ids, options.bias or (None, None)
    words, lengths = options.words or (None, None)
    return [
        options.min_tokens,
        *(_size(ends), _address(ends)),
        *(_size(bias_ids), _address(bias_ids), _address(bias_values)),
        *(_size(lengths), 0 if words is None else words.shape[1], _address(words), _address(lengths)),
        options.top_log_probs,
        options.ngram,
    ]


def _size(values: Tensor | None) -> int:
    return 0 if values is None else len(values)


def _address(values: Tensor | None) -> int:
    return 0 if values is None else values.data_ptr()
