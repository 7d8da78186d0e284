"""PackedLinear: a linear layer of the native tier, whose weights are stored as panels (native/tiles.h)."""

from __future__ import annotations

from ctypes import CDLL, byref

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.common.quantize import row_slices
from kernels.common.rounding import GROUP, VALUES, Rounded, form_of, stored
from kernels.common.super_blocks import FORMS, SuperBlocks
from kernels.cpu.memory import Arena
from kernels.cpu.structs import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    INT8,
    PANEL,
    ROTATED,
    SUPER_BLOCKS,
    W4A8,
    W8A8,
    LinearStruct,
)

_FLOAT_FORMATS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
# The dtypes of inputs that each format takes; quantised ones take both.
_INPUTS = {FLOAT32: [torch.float32], BFLOAT16: [torch.bfloat16], FLOAT16: [torch.float32]}
_GROUPS = {number: FORMS[kind].group for kind, number in SUPER_BLOCKS.items()}


class PackedLinear:
    """Callable: x [tokens, k] -> [tokens, n] in x's dtype. The reference is torch's F.linear of the same values."""

    takes_int8 = False  # the native kernels quantise activations themselves

    def __init__(self, library: CDLL, held: tuple[Tensor | None, ...], struct: LinearStruct):
        self._library = library
        self._held = held  # kept alive, because `struct` points to them
        self.threads: int | None = None  # threads of a call; None: torch's number at that time
        self._takes = _INPUTS.get(struct.format, [torch.float32, torch.bfloat16])
        self.struct = struct

    @classmethod
    def of_parts(
        cls, library: CDLL, parts: tuple[Tensor | None, ...], n: int, k: int, kind: int, group: int
    ) -> PackedLinear:
        """A layer of `parts`, data, scales, zeros and bias, as another layer has them; they stay where they are.

        Raises ValueError for parts that such a layer cannot have.
        """
        sizes = _sizes(library, n, k, kind, group)
        found = [None if part is None else part.nbytes for part in parts]
        needed = [True, INT8 <= kind <= ROTATED, False, False]
        if any(own != size and (own is not None or need) for own, size, need in zip(found, sizes, needed, strict=True)):
            raise ValueError(f"the parts have {found} bytes, a layer of {n} rows and {k} columns has {sizes}")
        return cls(library, parts, LinearStruct(*map(_pointer, parts), n, k, kind, group))

    @classmethod
    def of_floats(cls, library: CDLL, arena: Arena, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        """Packs weight [n, k] float32 or bfloat16, on the CPU; it may be freed afterwards.

        A float32 weight all of whose numbers are float16's is held in float16: half the memory, and results of the same bits.
        """
        if weight.dtype == torch.float32 and _is_float16(weight):
            weight = weight.half()
        return cls._pack(library, arena, weight, _FLOAT_FORMATS[weight.dtype], 0, None, bias)

    @classmethod
    def of_int8(
        cls,
        library: CDLL,
        arena: Arena,
        weight: Tensor,
        scales: Tensor,
        group: int,
        bias: Tensor | None,
        quantize_activations: bool,
        is_rotated: bool = False,
    ) -> PackedLinear:
        """Packs weight [n, k] int8 and scales [n, ceil(k / group)] exact in bfloat16; group is 32 or a multiple of 64.

        `is_rotated`: the weight is one of kernels/common/rotation.py, and group divides k; activations are quantised.
        """
        _check_group(group)
        if is_rotated:
            _check_rotated(weight.shape[1], group)
        kind = ROTATED if is_rotated else W8A8 if quantize_activations else INT8
        return cls._pack(library, arena, weight, kind, group, scales, bias)

    @classmethod
    def of_four_bits(
        cls,
        library: CDLL,
        arena: Arena,
        weight: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        group: int,
        bias: Tensor | None,
    ) -> PackedLinear:
        """Packs weight [n, k] uint8, 0..15, which stands for scales times

            weight - 8                  None is given
            weight - zeros              zeros [n, ceil(k / group)] uint8, 0..16

        scales [n, ceil(k / group)] are exact in bfloat16; group is 32 or a multiple of 64. Activations are quantised in
        groups of 32.
        """
        _check_group(group)
        return cls._pack(library, arena, weight, W4A8, group, scales, bias, zeros)

    @classmethod
    def of_super_blocks(
        cls, library: CDLL, arena: Arena, weight: SuperBlocks, bias: Tensor | None, columns: int | None = None
    ) -> PackedLinear:
        """Packs blocks without loss. Activations are quantised in groups of the weight's size.

        columns: inputs of the layer, where the last block has fewer than it could.
        """
        kind, group, (n, k) = SUPER_BLOCKS[weight.kind], weight.form.group, weight.q.shape
        if k % weight.form.columns or not 0 <= k - (columns or k) < weight.form.columns:
            raise ValueError(
                f"the weight has {k} columns, blocks of {weight.kind} have {weight.form.columns}; use another form"
            )
        tables = [None if table is None else table.contiguous() for table in weight.tables]
        tables.append(torch.tensor(weight.values, dtype=torch.int8))
        packed = arena.empty(library.everbatch_packed_bytes(n, k, kind, group))
        library.everbatch_pack_super(
            *map(_pointer, tables), weight.unit, n, k, kind, packed.data_ptr(), torch.get_num_threads()
        )
        held = packed, None, None, _by_columns(bias, n)
        return cls.of_parts(library, held, n, columns or k, kind, group)

    @classmethod
    def _pack(
        cls,
        library: CDLL,
        arena: Arena,
        weight: Tensor,
        kind: int,
        group: int,
        scales: Tensor | None,
        bias: Tensor | None,
        zeros: Tensor | None = None,
    ) -> PackedLinear:
        n, k = weight.shape
        weight = weight.contiguous()
        packed = arena.empty(library.everbatch_packed_bytes(n, k, kind, group))
        threads = torch.get_num_threads()
        library.everbatch_pack(weight.data_ptr(), n, k, kind, group, packed.data_ptr(), threads)
        groups = library.everbatch_groups(k, group)
        packed_scales = None if scales is None else _by_panels(arena, scales, groups, torch.bfloat16)
        if zeros is not None:
            zeros = _by_panels(arena, zeros, groups, torch.uint8)
        held = packed, packed_scales, zeros, _by_columns(bias, n)
        return cls.of_parts(library, held, n, k, kind, group)

    @property
    def parts(self) -> tuple[Tensor | None, ...]:
        """Data, scales, zeros and bias, packed as native/linear.h has them."""
        return self._held

    @property
    def shape(self) -> tuple[int, int]:
        return self.struct.n, self.struct.k

    @property
    def operand(self) -> tuple[int, int, int]:
        """The form of its inputs (native/rows.h): columns, format and group. Layers with the same one read the same rows."""
        format = FLOAT32 if self.struct.format == FLOAT16 else self.struct.format
        return self.struct.k, format, self.struct.group

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._held if tensor is not None)

    def __call__(self, x: Tensor) -> Tensor:
        """x must be of a dtype that the layer's format takes. Raises TypeError or ValueError."""
        if x.dtype not in self._takes:
            raise TypeError(f"x is {x.dtype}, this layer takes {' or '.join(map(str, self._takes))}; convert x")
        if x.shape[-1] != self.struct.k:
            raise ValueError(f"x has {x.shape[-1]} columns, this layer takes {self.struct.k}")
        rows = x.reshape(-1, x.shape[-1]).float().contiguous()
        out = torch.empty(rows.shape[0], self.struct.n)
        self._library.everbatch_linear(
            byref(self.struct),
            rows.data_ptr(),
            rows.shape[0],
            x.dtype.itemsize,
            out.data_ptr(),
            self.threads or torch.get_num_threads(),
        )
        return out.to(x.dtype).view(*x.shape[:-1], self.struct.n)


class RoundToBlocks:
    """kernels/common/rounding.py's `round_weight` by native/rounding.cpp: the same, but for sums in another order."""

    def __init__(self, library: CDLL) -> None:
        self._library = library
        self._values = torch.tensor(VALUES, dtype=torch.int8)

    def __call__(self, w: Tensor, name: str, importance: Tensor | None = None) -> Rounded:
        n, columns = w.shape
        form, groups = form_of(name), -(-columns // GROUP)
        k = groups * GROUP
        q, scale = torch.empty(n, k, dtype=torch.int8), torch.empty(n, groups)
        minimum = torch.empty(n, groups) if form.has_minima else None
        counts = F.pad(torch.ones(columns) if importance is None else importance.float(), (0, k - columns))
        threads = torch.get_num_threads()
        table = None if form.values is None else self._values.data_ptr()
        for rows in row_slices(n, k):
            part = F.pad(w[rows].float(), (0, k - columns)).contiguous()
            found = scale[rows], None if minimum is None else minimum[rows]
            given, kept = (part.data_ptr(), len(part), k, table, 2**form.bits - 1), [*map(_pointer, found)]
            self._library.everbatch_best_ranges(*given, counts.data_ptr(), *kept, threads)
            for each in found:
                if each is not None:
                    each.copy_(stored(each))
            self._library.everbatch_round(*given, *kept, q[rows].data_ptr(), threads)
        return Rounded(q[:, :columns], scale, minimum)


class RotateInBlocks:
    """kernels/common/rotation.py's `rotate` by native/rotation.h: the same bits."""

    def __init__(self, library: CDLL) -> None:
        self._library = library

    def __call__(self, x: Tensor) -> Tensor:
        rows, out = x.float().contiguous(), torch.empty(x.shape)
        self._library.everbatch_rotate(rows.data_ptr(), *rows.shape, out.data_ptr(), torch.get_num_threads())
        return out


def _sizes(library: CDLL, n: int, k: int, kind: int, group: int) -> list[int]:
    """Bytes of the parts that a layer may have. Raises ValueError for a format that there is not."""
    if (
        kind not in (*range(ROTATED + 1), *_GROUPS)
        or (kind in _GROUPS and group != _GROUPS[kind])
        or (kind == ROTATED and k % (group or 1))
        or (kind >= INT8 and group not in (16, 32) and (group < 64 or group % 64))
    ):
        raise ValueError(f"there is no format {kind} with groups of {group}")
    columns = -(-n // PANEL) * PANEL
    groups = library.everbatch_groups(k, group) if kind >= INT8 else 0
    return [library.everbatch_packed_bytes(n, k, kind, group), 2 * groups * columns, groups * columns, 4 * columns]


def _is_float16(weight: Tensor) -> bool:
    """True if float16 holds every number of a float32 weight exactly. Infinity counts as one that it does not hold."""
    for rows in row_slices(*weight.shape):
        half = weight[rows].half()
        if not (half.isfinite().all() and torch.equal(half.float(), weight[rows])):
            return False
    return True


def _check_rotated(columns: int, group: int) -> None:
    if group < 64 or group % 64 or columns % group:
        raise ValueError(
            f"groups of {group} of {columns} columns cannot be rotated; use a multiple of 64 that divides them"
        )


def _check_group(group: int) -> None:
    if group != 32 and group % 64:
        raise ValueError(f"group is {group}, the native kernels take 32 or a multiple of 64")


def _by_columns(bias: Tensor | None, n: int) -> Tensor | None:
    """A bias [n] in float32, with zeros behind its end up to whole panels."""
    if bias is None:
        return None
    return torch.zeros(-(-n // PANEL) * PANEL).index_copy_(0, torch.arange(n), bias.float())


def _by_panels(arena: Arena, table: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """A table [n, up to `groups`] of scales or zero points as [panels, groups, PANEL], with zeros behind its end."""
    n, stored = table.shape
    panels = -(-n // PANEL)
    padded = torch.zeros(panels * PANEL, groups, dtype=dtype)
    padded[:n, :stored] = table
    made = arena.empty(padded.nbytes).view(dtype).view(panels, groups, PANEL)
    return made.copy_(padded.view(panels, PANEL, groups).transpose(1, 2))


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
