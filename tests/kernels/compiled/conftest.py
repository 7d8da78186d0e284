"""Kernels compiled for GPUs that are not here. Only in a process of its own: tests/kernels/triton_child.py starts it."""

from kernels.common.triton_runtime import AVAILABLE, INTERPRETED

collect_ignore_glob = [] if AVAILABLE and not INTERPRETED else ["test_*.py"]
