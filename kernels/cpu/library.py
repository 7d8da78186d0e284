"""Loads the native kernels and declares their functions."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p

from kernels.cpu import build
from kernels.cpu.structs import (
    AttentionStruct,
    BatchStruct,
    KVLayout,
    LinearStruct,
    ModelStruct,
    NormStruct,
    ScreenStruct,
)

# name -> (result, arguments)
_FUNCTIONS = {
    "everbatch_lanes": (c_int64, []),
    "everbatch_packed_bytes": (c_int64, [c_int64, c_int64, c_int32, c_int64]),
    "everbatch_groups": (c_int64, [c_int64, c_int64]),
    "everbatch_pack": (None, [c_void_p, c_int64, c_int64, c_int32, c_int64, c_void_p, c_int32]),
    "everbatch_pack_super": (None, [*[c_void_p] * 5, c_int64, c_int64, c_int32, c_void_p, c_int32]),
    "everbatch_linear": (None, [POINTER(LinearStruct), c_void_p, c_int64, c_int32, c_void_p, c_int32]),
    "everbatch_round": (None, [c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_int32]),
    "everbatch_screen": (None, [POINTER(LinearStruct), POINTER(ScreenStruct), c_int32]),
    "everbatch_read": (c_int64, [c_void_p, c_int64, c_int32, c_int32]),
    "everbatch_norm": (None, [c_int32, c_void_p, POINTER(NormStruct), c_int64, c_int64, c_float, c_void_p]),
    "everbatch_activate": (None, [c_int32, c_int32, c_void_p, c_int64, c_int64, c_void_p]),
    "everbatch_quantize": (None, [c_void_p, c_int64, c_int64, c_void_p, c_void_p]),
    "everbatch_quantize_int4": (None, [c_void_p, c_int64, c_int64, c_void_p, c_void_p]),
    "everbatch_kv_block_bytes": (c_int64, [POINTER(KVLayout)]),
    "everbatch_new_workspace": (c_void_p, []),
    "everbatch_free_workspace": (None, [c_void_p]),
    "everbatch_step": (c_int64, [POINTER(ModelStruct), POINTER(BatchStruct), c_void_p]),
    "everbatch_attend": (c_int64, [POINTER(AttentionStruct), POINTER(BatchStruct), *[c_void_p] * 5]),
}


def load_kernels(
    isa: str | None = None, progress: Callable[[str], None] | None = None, sanitize: bool = False
) -> build.NativeLibrary:
    """Like build.load, and declares the functions of native/step.cpp, attend.cpp and parts.cpp, so that Python can call them."""
    library = build.load(isa, progress, sanitize)
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
