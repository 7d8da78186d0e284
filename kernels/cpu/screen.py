"""Screen: an int8 copy of lm_head that shows which logits may be the greatest (native/screen.h)."""

from __future__ import annotations

from ctypes import CDLL, byref

import torch
from torch import Tensor

from kernels.cpu.linear import PackedLinear
from kernels.cpu.memory import Arena
from kernels.cpu.structs import INT8, PANEL, W8A8, LinearStruct, ScreenStruct

GROUP = 32  # columns that share a scale, as native/screen.h requires


class Screen:
    """The screen of a layer with float weights and no bias. native/step.cpp reads its `struct`."""

    def __init__(self, library: CDLL, lm_head: PackedLinear, parts: tuple[Tensor, ...] | None = None):
        """parts: those of an equal screen, which stay where they are; None: it is computed. Raises ValueError for a layer that
        cannot be screened, and for parts of other sizes.
        """
        if not self.fits(lm_head):
            raise ValueError("lm_head has int8 weights or a bias; only float weights without a bias are screened")
        n, k = lm_head.shape
        sizes = self._sizes(library, n, k)
        if parts is not None and [part.nbytes for part in parts] != sizes:
            raise ValueError(f"the parts have {[part.nbytes for part in parts]} bytes, a screen of lm_head has {sizes}")
        arena = Arena()
        self.parts = parts or tuple(arena.empty(size) for size in sizes)
        self.error, self.norm = (part.view(torch.float32) for part in self.parts[2:])  # [columns]
        data, scales, error, norm = (part.data_ptr() for part in self.parts)
        self.struct = ScreenStruct(LinearStruct(data, scales, None, None, n, k, W8A8, GROUP), error, norm)
        if parts is None:
            library.everbatch_screen(byref(lm_head.struct), byref(self.struct), torch.get_num_threads())

    @staticmethod
    def _sizes(library: CDLL, n: int, k: int) -> list[int]:
        """Bytes of the packed weights, their scales in bfloat16, and error and norm of each column in float32."""
        packed, columns = library.everbatch_packed_bytes(n, k, W8A8, GROUP), -(-n // PANEL) * PANEL
        return [packed, 2 * packed // GROUP, 4 * columns, 4 * columns]

    @staticmethod
    def fits(lm_head: PackedLinear) -> bool:
        """True if a layer can be screened."""
        return lm_head.struct.format < INT8 and not lm_head.struct.bias

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self.parts)
