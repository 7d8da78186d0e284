"""The Triton model `tensorrt_llm` takes token ids, answers with token ids, and owns the engine process.

This is a thin adapter; backend/serving does the work.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any


def _find_backend() -> None:
    """Put the directory that holds `backend/` on sys.path.

    That is EVERBATCH_BACKEND_PATH, or else the directory that holds the model repository.
    """
    here = Path(os.path.realpath(__file__)).parent  # this is model_repository/tensorrt_llm/1
    for root in (os.environ.get("EVERBATCH_BACKEND_PATH"), here.parents[2]):
        if root and Path(root, "backend", "serving").is_dir():
            sys.path.insert(0, str(root))
            return


class TritonPythonModel:
    """Triton's Python backend calls its methods on the stub's main thread."""

    def initialize(self, args: dict[str, str]) -> None:
        _find_backend()
        from backend.serving.assembly import load_token_model  # imported late: only now is it on sys.path

        self._server = load_token_model(args)

    def execute(self, requests: list[Any]) -> None:
        self._server.execute(requests)

    def is_ready(self) -> bool:
        return self._server.is_ready()

    def finalize(self) -> None:
        self._server.finalize()
