"""Loads the native kernels and declares their functions."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p

from kernels.cpu import build
from kernels.cpu.choices import ChoicesStruct, choose, chosen
from kernels.cpu.structs import (
    AttentionModuleStruct,
    AttentionStruct,
    BatchStruct,
    KVLayout,
    LinearStruct,
    MixtureStruct,
    ModelStruct,
    NormStruct,
    RanksStruct,
    ScreenStruct,
)

# name -> (result, arguments)
_FUNCTIONS = {
    "everbatch_lanes": (c_int64, []),
    "everbatch_choose": (None, [POINTER(ChoicesStruct)]),
    "everbatch_packed_bytes": (c_int64, [c_int64, c_int64, c_int32, c_int64]),
    "everbatch_groups": (c_int64, [c_int64, c_int64]),
    "everbatch_pack": (None, [c_void_p, c_int64, c_int64, c_int32, c_int64, c_void_p, c_int32]),
    "everbatch_pack_super": (None, [*[c_void_p] * 6, c_float, c_int64, c_int64, c_int32, c_void_p, c_int32]),
    "everbatch_linear": (None, [POINTER(LinearStruct), c_void_p, c_int64, c_int32, c_void_p, c_int32]),
    "everbatch_lora": (
        None,
        [c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int64, c_int32, c_void_p, c_int32],
    ),
    "everbatch_best_ranges": (None, [c_void_p, c_int64, c_int64, c_void_p, c_int32, *[c_void_p] * 3, c_int32]),
    "everbatch_round": (None, [c_void_p, c_int64, c_int64, c_void_p, c_int32, *[c_void_p] * 3, c_int32]),
    "everbatch_rotate_heads": (None, [c_void_p, c_int64, c_int64, c_int32]),
    "everbatch_rotate": (None, [c_void_p, c_int64, c_int64, c_void_p, c_int32]),
    "everbatch_screen": (None, [POINTER(LinearStruct), POINTER(ScreenStruct), c_int32]),
    "everbatch_read": (c_int64, [c_void_p, c_int64, c_int32, c_int32]),
    "everbatch_multiply": (c_int64, [c_int32, c_int64, c_int32]),
    "everbatch_norm": (None, [c_int32, c_void_p, POINTER(NormStruct), c_int64, c_int64, c_float, c_void_p]),
    "everbatch_activate": (None, [c_int32, c_int32, c_void_p, c_int64, c_int64, c_void_p]),
    "everbatch_quantize": (None, [c_void_p, c_int64, c_int64, c_void_p, c_void_p]),
    "everbatch_quantize_int4": (None, [c_void_p, c_int64, c_int64, c_void_p, c_void_p]),
    "everbatch_kv_block_bytes": (c_int64, [POINTER(KVLayout)]),
    "everbatch_new_workspace": (c_void_p, []),
    "everbatch_free_workspace": (None, [c_void_p]),
    "everbatch_ranks_bytes": (c_int64, [POINTER(RanksStruct)]),
    "everbatch_hidden_at": (c_int64, [POINTER(RanksStruct), c_int32]),
    "everbatch_lose_rank": (None, [POINTER(RanksStruct), c_int32]),
    "everbatch_new_links": (c_void_p, [c_int32]),
    "everbatch_link_rank": (None, [c_void_p, c_int32, c_int32]),
    "everbatch_free_links": (None, [c_void_p]),
    "everbatch_receive_from_rank": (None, [POINTER(RanksStruct), c_int32]),
    "everbatch_check": (c_int64, [POINTER(ModelStruct), POINTER(BatchStruct)]),
    "everbatch_step": (c_int64, [POINTER(ModelStruct), POINTER(BatchStruct), c_void_p]),
    "everbatch_attend": (c_int64, [POINTER(AttentionStruct), POINTER(BatchStruct), *[c_void_p] * 5]),
    "everbatch_attend_with_products": (
        c_int64,
        [POINTER(AttentionModuleStruct), POINTER(BatchStruct), *[c_void_p] * 5],
    ),
    "everbatch_mix": (
        None,
        [POINTER(MixtureStruct), c_void_p, c_int64, c_void_p, c_void_p, c_int32, c_void_p, c_int32, c_void_p],
    ),
    "everbatch_rms_norm": (
        None,
        [c_void_p, c_float, c_void_p, c_int64, c_int64, c_int32, c_void_p, c_int32, c_void_p],
    ),
}


def load_kernels(
    isa: str | None = None, progress: Callable[[str], None] | None = None, sanitize: bool = False
) -> build.NativeLibrary:
    """Like build.load, and declares the functions of native/step.cpp, modules.cpp and parts.cpp, so that Python can call them.

    They choose for this machine (choices.py). Raises ValueError for an EVERBATCH_CHOICES that cannot be.
    """
    library = build.load(isa, progress, sanitize)
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    choose(library, chosen(library.isa))
    return library
