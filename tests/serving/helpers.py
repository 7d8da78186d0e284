"""Requests as clients send them."""

from __future__ import annotations

import numpy as np

from tests.serving.fake_triton import InferenceRequest


def ints(*values: int) -> np.ndarray:
    """Returns [B, 1], one value per row."""
    return np.array(values, np.int32).reshape(-1, 1)


def bools(*values: bool) -> np.ndarray:
    return np.array(values, bool).reshape(-1, 1)


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32).reshape(-1, 1)


def uint64(*values: int) -> np.ndarray:
    return np.array(values, np.uint64).reshape(-1, 1)


def strings(*rows: str | bytes | list[str]) -> np.ndarray:
    """Returns [B, n], one list (or one string) per row."""
    lists = [row if isinstance(row, list) else [row] for row in rows]
    array = np.empty((len(lists), len(lists[0]) if lists else 0), dtype=object)
    for n, row in enumerate(lists):
        array[n, :] = [text.encode() if isinstance(text, str) else text for text in row]
    return array


def token_inputs(prompts: list[list[int]], max_tokens: int = 4, **extra: np.ndarray) -> dict[str, np.ndarray]:
    ids = np.zeros((len(prompts), max(map(len, prompts), default=0)), np.int32)
    for n, prompt in enumerate(prompts):
        ids[n, : len(prompt)] = prompt
    inputs = {
        "input_ids": ids,
        "input_lengths": ints(*map(len, prompts)),
        "request_output_len": ints(*[max_tokens] * len(prompts)),
    }
    return {**inputs, **extra}


def token_request(
    prompts: list[list[int]], max_tokens: int = 4, request_id: str = "", **extra: np.ndarray
) -> InferenceRequest:
    return InferenceRequest(token_inputs(prompts, max_tokens, **extra), request_id)


def streamed(
    prompts: list[list[int]], max_tokens: int = 4, request_id: str = "", **extra: np.ndarray
) -> InferenceRequest:
    return token_request(prompts, max_tokens, request_id, streaming=bools(*[True] * len(prompts)), **extra)
