"""Rotary tables: cos and sin of every position, computed once. Frequencies follow transformers' `rope_type`s."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from backend.architectures.description import QueryScaling, RopeConfig

RotaryTables = tuple[Tensor, Tensor]  # (cos, sin), each float32 [max_seq_len, rotary_dim / 2]


def inverse_frequencies(rope: RopeConfig, rotary_dim: int) -> Tensor:
    """Radians per position of each rotated pair, float32 [rotary_dim / 2]."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    inv_freq = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return inv_freq / rope.factor
    if rope.kind == "factors":
        return inv_freq / torch.tensor(rope.factors)
    if rope.kind == "llama3":
        return _llama3(inv_freq, rope)
    return inv_freq


def rotary_tables(rope: RopeConfig, head_dim: int, num_positions: int, device: torch.device) -> RotaryTables:
    """(cos, sin), each float32 [num_positions, rotary_dim / 2]; a RopeConfig without a rotary_dim rotates all of a head."""
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(rope, rope.rotary_dim or head_dim))
    return angles.cos().to(device), angles.sin().to(device)


def query_scales(scaling: QueryScaling, num_positions: int, device: torch.device) -> Tensor:
    """The factors of the queries of each position, float32 [num_positions]."""
    steps = torch.arange(num_positions, dtype=torch.int64) // scaling.original_max_position
    return (1 + scaling.beta * torch.log1p(steps.float())).to(device)


def _llama3(inv_freq: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1's scaling: long wavelengths are stretched by `factor`, short ones kept, a smooth ramp between."""
    wavelength = 2 * math.pi / inv_freq
    longest = rope.original_max_position / rope.low_freq_factor
    shortest = rope.original_max_position / rope.high_freq_factor
    turns = rope.original_max_position / wavelength
    ramp = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = (1 - ramp) * inv_freq / rope.factor + ramp * inv_freq
    scaled = torch.where(wavelength > longest, inv_freq / rope.factor, inv_freq)
    is_medium = ~(wavelength < shortest) & ~(wavelength > longest)
    return torch.where(is_medium, smooth, scaled)
