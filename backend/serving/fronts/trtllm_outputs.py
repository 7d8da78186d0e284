"""Outputs of the TensorRT-LLM wire. All arrays have a leading batch dimension of 1 and one beam, except for text: its
clients expect one dimension there, [1].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from backend.api import PerfMetrics
from backend.api.response import TopLogProb
from backend.serving.news import News, TextReporter, TokenReporter
from backend.serving.outputs import Arrays, SeparateOutput, text_array
from backend.text.stream import TextStream


class RowSettings(NamedTuple):
    """How a row answers; read from the request."""

    streaming: bool = False
    num_input_tokens: int = 0
    batch_index: int | None = None  # None: the request has one row
    return_num_input_tokens: bool = False
    return_num_output_tokens: bool = False


def token_output(settings: RowSettings, prompt_ids: list[int]) -> SeparateOutput:
    """A row of tensorrt_llm. `prompt_ids` are put in front of each response: only a row that does not stream has any."""

    def render(told: Sequence[News]) -> Arrays:
        news = told[0]
        ids = prompt_ids + news.ids
        return [
            ("output_ids", np.array(ids, np.int32).reshape(1, 1, -1)),
            ("sequence_length", np.array([[len(ids)]], np.int32)),
            *_common_arrays(settings, news),
        ]

    return SeparateOutput([TokenReporter(settings.streaming)], render)


def text_output(
    settings: RowSettings, stream: TextStream, prefix: str = "", accumulate: bool = False, every_token: bool = False
) -> SeparateOutput:
    """A row of ensemble or tensorrt_llm_bls; the arguments are those of TextReporter."""

    def render(told: Sequence[News]) -> Arrays:
        news = told[0]
        arrays: Arrays = [("text_output", text_array([news.text]))]
        if news.finish is not None and news.finish.openai_name is not None:
            arrays.append(("finish_reason", text_array([news.finish.openai_name])))
        return arrays + _common_arrays(settings, news)

    reporter = TextReporter(
        stream, streaming=settings.streaming, prefix=prefix, accumulate=accumulate, every_token=every_token
    )
    return SeparateOutput([reporter], render)


def _common_arrays(settings: RowSettings, news: News) -> Arrays:
    """The outputs that tokens and text share."""
    arrays: Arrays = []
    if news.log_probs is not None:
        arrays.append(("cum_log_probs", np.array([[news.cum_log_prob]], np.float32)))
        arrays.append(("output_log_probs", np.array([[news.log_probs]], np.float32)))
    if news.top_log_probs is not None:
        arrays.extend(_top_arrays(news.top_log_probs))
    if settings.batch_index is not None:
        arrays.append(_number("batch_index", settings.batch_index))
    if settings.return_num_input_tokens:
        arrays.append(_number("num_input_tokens", settings.num_input_tokens))
    if settings.return_num_output_tokens:
        arrays.append(_number("num_output_tokens", len(news.ids)))
    if news.perf is not None:
        arrays.extend(_perf_arrays(news.perf))
    return arrays


def _number(name: str, value: float, dtype: type[np.generic] = np.int32) -> tuple[str, NDArray[Any]]:
    return name, np.array([[value]], dtype)


def _top_arrays(positions: list[list[TopLogProb]]) -> Arrays:
    """Each [1, tokens, n]: the most likely tokens of each position, and their log-probabilities."""
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
        _number("kv_cache_alloc_total_blocks", perf.num_new_blocks + perf.num_reused_blocks),
        _number("arrival_time_ns", perf.arrival_ns, np.int64),
        _number("first_scheduled_time_ns", perf.first_scheduled_ns, np.int64),
        _number("first_token_time_ns", perf.first_token_ns, np.int64),
        _number("last_token_time_ns", perf.last_token_ns, np.int64),
        _number("acceptance_rate", 0.0, np.float32),  # no speculation in this version
        _number("total_accepted_draft_tokens", 0),
        _number("total_draft_tokens", 0),
        _number("num_cached_tokens", perf.num_cached_tokens),
        _number("num_context_tokens", perf.num_context_tokens),
        _number("num_recomputed_tokens", perf.num_recomputed_tokens),
    ]
