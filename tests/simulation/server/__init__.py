"""The whole server in one process, with simulated time, threads, sockets, files and processes (docs/design/simulation.md)."""

import sys

from tests.serving import fake_triton

sys.modules.setdefault("triton_python_backend_utils", fake_triton)  # before anything imports backend.serving
