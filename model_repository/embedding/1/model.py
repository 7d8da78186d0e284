"""The model.py of every Triton model: hands it over to backend/serving. config.pbtxt says which model it is (`role`)."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any


def _find_backend() -> None:
    """Put the directory that holds `backend/` on sys.path: EVERBATCH_BACKEND_PATH, else the nearest above this file."""
    for root in (os.environ.get("EVERBATCH_BACKEND_PATH"), *Path(os.path.realpath(__file__)).parents):
        if root and Path(root, "backend", "serving").is_dir():
            sys.path.insert(0, str(root))
            return


class TritonPythonModel:
    """Triton's Python backend calls its methods on the stub's main thread."""

    def initialize(self, args: dict[str, str]) -> None:
        _find_backend()
        from backend.serving.assembly import load_model  # late: an import of this file alone stays cheap

        self._server = load_model(args)

    def execute(self, requests: list[Any]) -> None:
        self._server.execute(requests)

    def is_ready(self) -> bool:
        return self._server.is_ready()

    def finalize(self) -> None:
        self._server.finalize()
