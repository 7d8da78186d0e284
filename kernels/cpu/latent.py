"""Latent attention of a layer, for native steps (native/latent.h)."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kernels.cpu.linear import PackedLinear
from kernels.cpu.structs import PANEL, LatentStruct, LinearStruct, NormStruct


class NativeLatent(NamedTuple):
    """Attention whose keys and values follow from a latent. Norms are float32.

    The layer's qkv yields queries, or what `queries` reads, and rank + rotated numbers [hidden]; the model has one KV head, of
    rotated + rank numbers.
    """

    rank: int
    rotated: int
    plain: int
    value_dim: int
    keys: PackedLinear  # [heads * rank, plain]
    values: PackedLinear  # [heads * value_dim, rank]
    norm: Tensor  # [rank]
    eps: float
    queries: PackedLinear | None = None  # [heads * (plain + rotated), numbers that it reads]
    query_norm: Tensor | None = None  # as many numbers


def latent_struct(latent: NativeLatent) -> LatentStruct:
    """Raises ValueError for sizes that the kernels do not take."""
    if latent.rank % PANEL or latent.value_dim % PANEL:
        raise ValueError(
            f"a latent of {latent.rank} numbers and values of {latent.value_dim} are given, the native kernels take multiples of "
            f"{PANEL}"
        )
    return LatentStruct(
        *(latent.rank, latent.rotated, latent.plain, latent.value_dim),
        LinearStruct() if latent.queries is None else latent.queries.struct,
        latent.keys.struct,
        latent.values.struct,
        NormStruct(None if latent.query_norm is None else latent.query_norm.data_ptr()),
        NormStruct(latent.norm.data_ptr()),
        latent.eps,
    )
