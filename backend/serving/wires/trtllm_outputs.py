"""Outputs of the TensorRT-LLM wire. Arrays have a leading batch dimension of 1, then a dimension of beams (1 without beams).

Text is [beams], as its clients expect. Shorter beams are padded with -1. Each of several sequences (`num_return_sequences`) has
responses of its own. All beams are in one response; in a stream each response repeats them from their beginnings, because a beam
may become the continuation of another one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from backend.api import PerfMetrics
from backend.api.response import TopLogProb
from backend.core.messages import Delivered
from backend.serving.delivery.outputs import BeamsOutput, Render, SeparateOutput, text_array
from backend.serving.delivery.sequence_output import SequenceOutput, context_logits, generation_logits, kv_state
from backend.serving.work import Arrays, RowOutput
from backend.text.accumulator import OutputDelta
from backend.text.stream import TextStream

PADDING = -1


class RowSettings(NamedTuple):
    """The settings of a row's answer, read from the request."""

    streaming: bool = False
    num_input_tokens: int = 0
    batch_index: int | None = None  # None: the request has one row
    return_num_input_tokens: bool = False
    return_num_output_tokens: bool = False
    num_sequences: int = 1  # names of additional outputs that the request asks for
    has_beams: bool = False
    max_repeated_bytes: int = 0  # bytes of context logits that later responses of a stream may repeat
    delivered: Sequence[Delivered] = ()  # the output so far of each sequence that a client resumes
    delivered_log_probs: Sequence[NDArray[np.float32]] = ()  # the log-probabilities of these tokens


def token_output(settings: RowSettings, prompt_ids: list[int]) -> RowOutput:
    """The output of a row of tensorrt_llm. `prompt_ids` stand in front of the response; empty for a row that streams."""

    so_far = _SoFar(settings)

    def render(deltas: Sequence[OutputDelta]) -> Arrays:
        ids = [prompt_ids + delta.ids for delta in deltas]
        return [
            ("output_ids", _padded(ids, np.int32)),
            ("sequence_length", np.array([[len(beam) for beam in ids]], np.int32)),
            *_common_arrays(settings, deltas, so_far),
            *(
                ("context_phase_params", state[np.newaxis])
                for delta in deltas
                if (state := kv_state(delta)) is not None
            ),
        ]

    return _row_output(settings, lambda: SequenceOutput(streaming=settings.streaming), render)


def text_output(
    settings: RowSettings,
    new_stream: Callable[[], TextStream],
    prefix: str = "",
    accumulate: bool = False,
    every_token: bool = False,
) -> RowOutput:
    """A row of ensemble or tensorrt_llm_bls. `new_stream` makes the stream of one sequence; all else is as in SequenceOutput."""

    def new_sequence() -> SequenceOutput:
        return SequenceOutput(
            new_stream(), streaming=settings.streaming, prefix=prefix, accumulate=accumulate, every_token=every_token
        )

    so_far = _SoFar(settings)

    def render(deltas: Sequence[OutputDelta]) -> Arrays:
        arrays: Arrays = [("text_output", text_array([delta.text for delta in deltas]))]
        ends = [delta.finish.openai_name for delta in deltas if delta.finish is not None]
        names = [name for name in ends if name is not None]
        if names:
            arrays.append(("finish_reason", text_array(names)))
        return arrays + _common_arrays(settings, deltas, so_far)

    return _row_output(settings, new_sequence, render)


class _SoFar:
    """Values that TensorRT-LLM repeats in every response of a stream, for clients that read the last response only.

    They are the log-probabilities of all tokens so far, and the context logits. Context logits may be large, and responses that a
    client does not read stay in the server's memory. So once all sequences together have repeated `max_repeated_bytes`, only the
    last response of each sequence repeats them.
    """

    def __init__(self, settings: RowSettings) -> None:
        self._repeats = settings.streaming and not settings.has_beams  # each response of beams is complete
        self._room = settings.max_repeated_bytes
        self._log_probs = dict(enumerate(settings.delivered_log_probs))
        self._context_logits: dict[int, NDArray[np.float32]] = {}

    def log_probs(self, delta: OutputDelta) -> list[float] | NDArray[np.float32]:
        new = delta.log_probs or []
        if not self._repeats:
            return new
        before = self._log_probs.get(delta.sequence, np.empty(0, np.float32))
        self._log_probs[delta.sequence] = np.append(before, np.array(new, np.float32))
        return self._log_probs[delta.sequence]

    def context_logits(self, delta: OutputDelta) -> NDArray[np.float32] | None:
        if not self._repeats:
            return context_logits(delta)
        new = context_logits(delta)
        if new is not None:
            self._context_logits[delta.sequence] = new
            return new
        known = self._context_logits.get(delta.sequence)
        if known is not None and delta.finish is None:
            self._room -= known.nbytes
        return known if delta.finish is not None or self._room >= 0 else None


def _row_output(settings: RowSettings, new_sequence: Callable[[], SequenceOutput], render: Render) -> RowOutput:
    if settings.has_beams:
        return BeamsOutput(new_sequence, render, streaming=settings.streaming)
    sequences = [new_sequence() for _ in range(settings.num_sequences)]
    for sequence, delivered in zip(sequences, settings.delivered):
        sequence.take_up(delivered.token_ids, delivered.has_ended)
    return SeparateOutput(sequences, render)


def _common_arrays(settings: RowSettings, deltas: Sequence[OutputDelta], so_far: _SoFar) -> Arrays:
    """The outputs that tokens and text share."""
    first = deltas[0]  # all but the log-probabilities come with a single beam only, or are the same for all
    arrays: Arrays = []
    if first.log_probs is not None:
        arrays.append(("cum_log_probs", np.array([[delta.cum_log_prob for delta in deltas]], np.float32)))
        arrays.append(("output_log_probs", _padded([so_far.log_probs(delta) for delta in deltas], np.float32)))
    if first.top_log_probs is not None:
        arrays.extend(_top_arrays(first.top_log_probs))
    if (of_prompt := so_far.context_logits(first)) is not None:
        arrays.append(("context_logits", of_prompt[np.newaxis]))
    of_output = [generation_logits(delta, n if settings.has_beams else 0) for n, delta in enumerate(deltas)]
    if given := [logits for logits in of_output if logits is not None]:
        arrays.append(("generation_logits", _padded_logits(given)))
    if settings.batch_index is not None:
        arrays.append(_number("batch_index", settings.batch_index))
    if settings.num_sequences > 1:
        arrays.append(_number("sequence_index", 0 if settings.has_beams else first.sequence))
    if settings.return_num_input_tokens:
        arrays.append(_number("num_input_tokens", settings.num_input_tokens))
    if settings.return_num_output_tokens:
        arrays.append(_number("num_output_tokens", sum(len(delta.ids) for delta in deltas)))
    if first.perf is not None:
        arrays.extend(_perf_arrays(first.perf))
    return arrays


def _padded_logits(beams: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    """[1, beams, the longest one's length, vocabulary], with zeros behind the end of shorter ones."""
    longest = max(map(len, beams))
    return np.stack([np.pad(logits, ((0, longest - len(logits)), (0, 0))) for logits in beams])[np.newaxis]


def _padded(rows: Sequence[Sequence[float] | NDArray[np.float32]], dtype: type[np.generic]) -> NDArray[Any]:
    """[1, rows, the longest one's length]"""
    if len(rows) == 1:
        return np.array([rows], dtype)
    array = np.full((1, len(rows), max(map(len, rows))), PADDING, dtype)
    for n, row in enumerate(rows):
        array[0, n, : len(row)] = row
    return array


def _number(name: str, value: float, dtype: type[np.generic] = np.int32) -> tuple[str, NDArray[Any]]:
    return name, np.array([[value]], dtype)


def _top_arrays(positions: list[list[TopLogProb]]) -> Arrays:
    """The most likely tokens of each position and their log-probabilities, each [1, tokens, n]."""
    shape = (1, len(positions), len(positions[0]) if positions else 0)
    ids = [entry.token_id for entries in positions for entry in entries]
    log_probs = [entry.log_prob for entries in positions for entry in entries]
    return [
        ("top_log_probs_ids", np.array(ids, np.int32).reshape(shape)),
        ("top_log_probs", np.array(log_probs, np.float32).reshape(shape)),
    ]


def _perf_arrays(perf: PerfMetrics) -> Arrays:
    return [
        _number("kv_cache_alloc_new_blocks", perf.num_new_blocks),
        _number("kv_cache_reused_blocks", perf.num_reused_blocks),
        _number("kv_cache_alloc_total_blocks", perf.num_new_blocks),
        _number("arrival_time_ns", perf.arrival_ns, np.int64),
        _number("first_scheduled_time_ns", perf.first_scheduled_ns, np.int64),
        _number("first_token_time_ns", perf.first_token_ns, np.int64),
        _number("last_token_time_ns", perf.last_token_ns, np.int64),
        _number("acceptance_rate", perf.acceptance_rate, np.float32),
        _number("total_accepted_draft_tokens", perf.num_accepted_draft_tokens),
        _number("total_draft_tokens", perf.num_draft_tokens),
        _number("num_cached_tokens", perf.num_cached_tokens),
        _number("num_context_tokens", perf.num_context_tokens),
        _number("num_recomputed_tokens", perf.num_recomputed_tokens),
    ]
