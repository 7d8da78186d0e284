"""Embeddings of texts by the Triton model `embedding`: MOST_ROWS of them in a request, one request after the other."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

from client.checks import check_texts, check_timeout, check_value
from client.errors import ClientError
from client.retry import Retry
from client.settings import Settings

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MODEL = "embedding"
MOST_ROWS = 64  # that Triton takes in one request
Tensors = dict[str, tuple[str, list[Any]]]  # name -> its type, and a value for each row


class Inferring(Protocol):
    """The part of a transport that is used here."""

    def infer(
        self, model: str, tensors: Tensors, parameters: dict[str, str | int], timeout_s: float
    ) -> dict[str, list[Any]]: ...


def embed(
    transport: Inferring,
    settings: Settings,
    texts: Iterable[str],
    dimensions: int | None,
    normalize: bool | None,
    timeout_s: float | None,
) -> NDArray[np.float32]:
    """float32 [texts, dimensions]. Raises TypeError and ValueError that name the argument, and ClientError."""
    import numpy as np

    given = check_texts("texts", texts)
    if not given:
        raise ValueError("texts is empty; give at least one text")
    patience = settings.timeout_s if timeout_s is None else timeout_s
    check_timeout(patience)
    options = {"dimensions": ("INT32", dimensions), "normalize": ("BOOL", normalize)}
    same = {
        name: (kind, check_value(name, kind, value)) for name, (kind, value) in options.items() if value is not None
    }
    deadline = time.monotonic() + patience
    rows: list[float] = []
    for start in range(0, len(given), MOST_ROWS):
        part = given[start : start + MOST_ROWS]
        tensors: Tensors = {name: (kind, [value] * len(part)) for name, (kind, value) in same.items()}
        rows += _vectors(transport, settings, {"text_input": ("BYTES", list(part)), **tensors}, deadline)
    return np.array(rows, np.float32).reshape(len(given), -1)


def _vectors(transport: Inferring, settings: Settings, tensors: Tensors, deadline: float) -> list[float]:
    """The numbers of all rows. The request is sent again after UNAVAILABLE, as `retry` says."""
    retry: Retry = settings.retry
    for attempt in range(retry.attempts):
        remaining_s = max(0.001, deadline - time.monotonic())
        parameters: dict[str, str | int] = {"timeout": int(remaining_s * 1e6)}
        if settings.namespace:
            parameters["cache_salt"] = settings.namespace
        try:
            return transport.infer(MODEL, tensors, parameters, remaining_s)["embedding"]
        except ClientError as error:
            pause_s = retry.pause_s(attempt, error)
            if pause_s is None or time.monotonic() + pause_s >= deadline:
                raise
        time.sleep(pause_s)
    raise AssertionError("the last attempt returns or raises")
