"""Kernels in Triton's interpreter. Only in a process of its own: tests/kernels/triton_child.py starts it."""

from kernels.common.triton_runtime import INTERPRETED

collect_ignore_glob = [] if INTERPRETED else ["test_*.py"]

if INTERPRETED:
    from tests.kernels.interpreter import save_time

    save_time()
