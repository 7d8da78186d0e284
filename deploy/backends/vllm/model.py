"""The python-based backend `vllm`: models with `backend: "vllm"` and a 1/model.json load as they are, under any name."""

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

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Triton calls it, in a process of its own, unless it runs with --disable-auto-complete-config."""
        _find_backend()
        from backend.serving.vllm_backend import complete_config  # late: an import of this file alone stays cheap

        return complete_config(config)

    def initialize(self, args: dict[str, str]) -> None:
        _find_backend()
        from backend.serving.vllm_backend import load_vllm_model

        self._server = load_vllm_model(args)

    def execute(self, requests: list[Any]) -> None:
        self._server.execute(requests)

    def is_ready(self) -> bool:
        return self._server.is_ready()

    def finalize(self) -> None:
        self._server.finalize()
