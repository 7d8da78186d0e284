"""Requests as clients send them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tests.serving.fake_triton import InferenceRequest

MODEL_DIRECTORY = Path(__file__).resolve().parents[2] / "models" / "default"


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


def tokenizer_with_bos(directory: Path, bos_id: int) -> str:
    """Write the default model's tokenizer to a new directory, with the token `bos_id` in front of each text."""
    directory.mkdir()
    tokenizer = json.loads((MODEL_DIRECTORY / "tokenizer.json").read_text())
    token = next(entry["content"] for entry in tokenizer["added_tokens"] if entry["id"] == bos_id)
    first, rest = {"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [first, rest],
        "pair": [first, rest, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {token: {"id": token, "ids": [bos_id], "tokens": [token]}},
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    return str(directory)
