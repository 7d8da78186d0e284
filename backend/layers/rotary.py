"""Rotary tables: cos and sin of every position, computed once. Frequencies follow transformers' `rope_type`s.

    default    theta^(-2i / d) for the pair i of d rotated dimensions
    linear     divided by a factor
    dynamic    default here: it differs beyond max_position_embeddings only, and no sequence gets there
    llama3     long wavelengths are stretched by a factor, short ones kept, with a smooth ramp between
    yarn       the same with a ramp over the pairs, and cos and sin have a factor (Peng et al., arXiv:2309.00071)
    longrope   each pair has a divisor of its own, and cos and sin have a factor (Ding et al., arXiv:2402.13753)
    factors    each pair has a divisor of its own (GGUF files)

longrope has two lists of divisors, for short and for long contexts. transformers changes from one to the other when a sequence
grows, so that keys of one sequence are rotated in two ways. Here the greatest length that the server takes decides once, for all
positions of all sequences: a token's result does not depend on how long its sequence, or another one, is or will be.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from backend.architectures.description import QueryScaling, RopeConfig

RotaryTables = tuple[Tensor, Tensor]  # (cos, sin), each float32 [max_seq_len, rotary_dim / 2]


def inverse_frequencies(rope: RopeConfig, head_dim: int, num_positions: int = 0) -> Tensor:
    """Radians per position of each rotated pair, float32 [rotary_dim / 2], on a server of `num_positions` positions."""
    rotary_dim = rope.rotary_dim or head_dim
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    inv_freq = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return inv_freq / rope.factor
    if rope.kind == "factors":
        return inv_freq / torch.tensor(rope.factors)
    if rope.kind == "longrope":
        factors = rope.factors if num_positions > rope.original_max_position else rope.short_factors
        return 1.0 / (torch.tensor(factors) * rope.theta**exponents)
    if rope.kind == "llama3":
        return _llama3(inv_freq, rope)
    if rope.kind == "yarn":
        return _yarn(rope.theta**exponents, rope, rotary_dim)
    return inv_freq


def rotary_tables(rope: RopeConfig, head_dim: int, num_positions: int, device: torch.device) -> RotaryTables:
    """(cos, sin), each float32 [num_positions, rotary_dim / 2]."""
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(rope, head_dim, num_positions))
    cos, sin = angles.cos(), angles.sin()
    if rope.attention_factor != 1.0:
        cos, sin = cos * rope.attention_factor, sin * rope.attention_factor
    return cos.to(device), sin.to(device)


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


def _yarn(wavelengths: Tensor, rope: RopeConfig, rotary_dim: int) -> Tensor:
    """Pairs that turn often within the positions of the first training are kept, those that hardly turn are stretched.

    wavelengths: positions per radian of each pair, [rotary_dim / 2]. Every operation is transformers', to the last bit.
    """

    def pair_of(turns: float) -> float:
        """The pair, as a fraction, that turns so often."""
        return rotary_dim * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    if first == last:
        last += 0.001  # no division by zero
    kept = 1 - ((torch.arange(rotary_dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    return 1.0 / (rope.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept
