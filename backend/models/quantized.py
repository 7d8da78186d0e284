"""Quantised checkpoints: the part that the readers of all formats share.

A reader (compressed_tensors.py, awq.py, gptq.py, qoq.py) parses config.json's quantization_config into a `QuantizedLayers`.
That object reads the tensors of a projection, without loss, into a form that linear layers take (backend/layers/linear.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from backend.api.errors import ConfigError
from backend.layers.linear import QuantizedWeight
from backend.models.tensors import TensorSource
from kernels.common import super_blocks
from kernels.common.super_blocks import SuperBlocks
from kernels.w4a8 import Weight4A8
from kernels.w4a16 import GROUPS, SYMMETRIC_ZERO, Weight4

Scheme = Literal["int8", "w8a8", "w4a16", "w4a8", "mxfp4"]
Held = QuantizedWeight | Weight4 | Weight4A8 | SuperBlocks | Tensor
Part = TypeVar("Part", QuantizedWeight, Weight4, Weight4A8, SuperBlocks, Tensor)


class QuantizedLayers(ABC):
    """How a checkpoint's quantised linear layers are stored. Immutable."""

    scheme: Scheme
    marker: ClassVar[str]  # NAME + marker is a tensor of every quantised projection NAME, and of no other

    @abstractmethod
    def take(self, source: TensorSource, name: str, n: int, k: int) -> Held:
        """The projection `name` of n outputs and k inputs. Raises ConfigError."""


def kernel_group(name: str, group: int | None, k: int) -> tuple[int, int]:
    """Cut a stored group (None: a whole row) into groups that the 4-bit kernels take: (their columns, their number).

    All of the smaller groups share the stored scale. Raises ConfigError when no such size divides it.
    """
    stored = group or k
    if k % stored:
        raise ConfigError(f"{name} has {k} columns, no multiple of its quantisation group of {stored}")
    size = next((size for size in GROUPS if stored % size == 0), None)
    if size is None:
        raise ConfigError(
            f"{name} has 4-bit weights with a scale for each {stored} columns, a multiple of {min(GROUPS)} is supported; "
            f"use a float checkpoint"
        )
    return size, stored // size


def nibbles(words: Tensor) -> Tensor:
    """int32 [rows, columns] -> uint8 [rows, columns, 8], 0..15, low bits first."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    return (words[:, :, None] >> shifts & 15).to(torch.uint8)


def stack(parts: Sequence[Held]) -> Held:
    """Stack projections with equal columns as one layer. This is exact, because every row has its own scales."""
    first = parts[0]
    if isinstance(first, QuantizedWeight):
        return stack_int8(_all_of(QuantizedWeight, parts))
    if isinstance(first, Weight4):
        return _stack_4_bits(first, _all_of(Weight4, parts))
    if isinstance(first, Tensor):
        return torch.cat(_all_of(Tensor, parts))
    if isinstance(first, SuperBlocks):
        return super_blocks.stack(_all_of(SuperBlocks, parts))
    return _stack_4_bits_for_int8(_all_of(Weight4A8, parts))


def stack_int8(parts: list[QuantizedWeight]) -> QuantizedWeight:
    """Projections of one format, group and number of columns as one layer."""
    minima = [part.minimum for part in parts if part.minimum is not None]
    return parts[0]._replace(
        q=torch.cat([part.q for part in parts]),
        scale=torch.cat([part.scale for part in parts]),
        minimum=torch.cat(minima) if minima else None,
    )


def _stack_4_bits(first: Weight4, parts: list[Weight4]) -> Weight4:
    zeros = _side_by_side([part.zeros for part in parts])
    if zeros is not None and (zeros == SYMMETRIC_ZERO).all():  # kernels need not read zeros that are all symmetric
        zeros = None
    packed, scales = torch.cat([part.packed for part in parts]), torch.cat([part.scales for part in parts], 1)
    return Weight4(packed, scales, zeros, first.group)


def _stack_4_bits_for_int8(parts: list[Weight4A8]) -> Weight4A8:
    return Weight4A8(
        torch.cat([part.packed for part in parts]),
        torch.cat([part.scale for part in parts]),
        _side_by_side([part.group_scales for part in parts]),
        torch.cat([part.zeros for part in parts], 1),
    )


def _side_by_side(tables: list[Tensor | None]) -> Tensor | None:
    """Tables [groups, n] as one [groups, sum of n]; None if the projections have none."""
    present = [table for table in tables if table is not None]
    assert len(present) in (0, len(tables)), (
        "some projections of a layer have a table of zeros or scales, others have none"
    )
    return torch.cat(present, 1) if present else None


def _all_of(kind: type[Part], parts: Sequence[Held]) -> list[Part]:
    """`parts`, which are all of one kind: a checkpoint has one format."""
    made = [part for part in parts if isinstance(part, kind)]
    assert len(made) == len(parts), "the projections of a layer are quantised in several formats"
    return made
