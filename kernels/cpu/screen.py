"""Screen: an int8 copy of lm_head that shows which logits may be the greatest (native/screen.h)."""

from __future__ import annotations

from ctypes import CDLL, byref

import torch

from kernels.cpu.linear import PackedLinear
from kernels.cpu.memory import Arena
from kernels.cpu.structs import INT8, PANEL, W8A8, LinearStruct, ScreenStruct

GROUP = 32  # columns that share a scale, as native/screen.h requires


class Screen:
    """The screen of a layer with float weights and no bias. native/step.cpp reads its `struct`."""

    def __init__(self, library: CDLL, lm_head: PackedLinear):
        """Raises ValueError for a layer that cannot be screened."""
        if not self.fits(lm_head):
            raise ValueError("lm_head has int8 weights or a bias; only float weights without a bias are screened")
        n, k = lm_head.shape
        arena = Arena()
        self.packed = arena.empty(library.everbatch_packed_bytes(n, k, W8A8, GROUP))
        columns = -(-n // PANEL) * PANEL
        self.scales = arena.empty(2 * self.packed.numel() // GROUP).view(torch.bfloat16)
        self.error, self.norm = (arena.empty(4 * columns).view(torch.float32) for _ in range(2))  # [columns]
        linear = LinearStruct(self.packed.data_ptr(), self.scales.data_ptr(), None, None, None, n, k, W8A8, GROUP)
        self.struct = ScreenStruct(linear, self.error.data_ptr(), self.norm.data_ptr())
        library.everbatch_screen(byref(lm_head.struct), byref(self.struct), torch.get_num_threads())

    @staticmethod
    def fits(lm_head: PackedLinear) -> bool:
        """True if a layer can be screened."""
        return lm_head.struct.format < INT8 and not lm_head.struct.bias

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.packed, self.scales, self.error, self.norm))
