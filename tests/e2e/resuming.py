"""Clients that come back with what they have had, after the end of their server."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from tritonclient.utils import InferenceServerException

from tests.e2e.wire import TokenClient, ids_of

PATIENCE_S = 240.0  # for a server to be back on a busy machine
POLL_S = 0.2


def tokens_over_ends(
    grpc_url: str, prompt: list[int], num_tokens: int, on_token: Callable[[], None] = lambda: None, **inputs: Any
) -> list[tuple[Any, ...]]:
    """Ids, sum and all log-probabilities so far of each response of a stream of one sequence, whoever has sent it."""
    found: list[tuple[Any, ...]] = []
    deadline = time.monotonic() + PATIENCE_S
    while True:
        had = resume_inputs(found) if found else {}
        try:
            with TokenClient(grpc_url) as client:
                for result in client.start(prompt, num_tokens, streaming=True, **inputs, **had):
                    scores = (result.as_numpy(name) for name in ("cum_log_probs", "output_log_probs"))
                    found.append(
                        (ids_of(result), *(None if each is None else each.ravel().tolist() for each in scores))
                    )
                    on_token()
            return found
        except InferenceServerException as error:
            assert time.monotonic() < deadline, error
            assert "resume" not in str(error) and "INVALID" not in str(error), error
            time.sleep(POLL_S)


def resume_inputs(found: list[tuple[Any, ...]]) -> dict[str, Any]:
    """The tensors that say what has come."""
    had: dict[str, Any] = {"resume_output_ids": [[token for ids, *_ in found for token in ids]]}
    if found[-1][2] is not None:
        had["resume_log_probs"] = np.array([found[-1][2]], np.float32)
    return had
