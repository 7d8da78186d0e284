"""Logits post-processors that tests name by import path, as an engine process does."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def force_42(request_id: int, logits: Tensor, token_ids: Any, stream: int, client_id: int | None) -> None:
    logits.fill_(-1e9)
    logits[..., 42] = 0.0


def force_42_of_all(
    request_ids: list[int], logits: list[Tensor], token_ids: Any, stream: int, client_ids: list[int | None]
) -> None:
    for request_id, of_one in zip(request_ids, logits, strict=True):
        force_42(request_id, of_one, None, stream, None)
