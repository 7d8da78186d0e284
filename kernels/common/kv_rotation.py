"""How keys are made easy to quantise, on every tier and in any KVFormat, and what the queries that meet them become.

    k' = H (k - shift) / f          q' = H q / g          q' . k' = q . k - q . shift

Keys have dimensions that are far from the others, in each token the same ones, and these decide the scale of the whole head.

The rotation H is Hadamard's matrix (kernels/common/rotation.py), which spreads them over all numbers of the head (QuaRot:
Ashkboos et al., 2024). It is its own inverse but for the factor f g, so that no score changes; f and g are powers of two, and
lose nothing. H turns blocks: b neighbours of the first half of the head, and the b of the second half that lie half a head
behind, for the greatest power of two b that divides a half. In a head of 64 or 128 that is all of it, in one of 96 it is 16
and 16.

The shift is a vector of each kv head that all keys lack alike: the scores of a query then differ by the same number, which its
softmax does not see. There is one where keys have a bias (Qwen2): the mean over positions of the rotated bias, which is most of
the bias in pairs of dimensions that turn slowly, and nothing in those that turn fast. Where a score's own size matters (a soft
cap, a sink), or where keys are normed after the bias, there is none.

Values stay as they are. Rotated too they lost a little less (docs/quantisation.md), and results would have to be turned back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.common.triton_runtime import jit, tl

KV_NUMBERS = 2  # counts up when a quantised pool comes to hold other numbers for the same tokens
SHIFT_POSITIONS = 4096  # over so many the rotated bias is averaged


def rounds_of(head_dim: int) -> tuple[int, int]:
    """How often H adds and subtracts: within a half, and in all. A head of odd length stays as it is."""
    if head_dim % 2:
        return 0, 0
    half = head_dim // 2
    within = (half & -half).bit_length() - 1
    return within, within + 1


def factors_of(head_dim: int) -> tuple[float, float]:
    """The factors of H q and of H k."""
    rounds = rounds_of(head_dim)[1]
    return 0.5 ** (rounds // 2), 0.5 ** (rounds - rounds // 2)


def rotate(x: Tensor, factor: float) -> Tensor:
    """H x * factor of x [..., head_dim] float32, in the order of additions of native/rotation.h."""
    within, rounds = rounds_of(x.shape[-1])
    if rounds == 0:
        return x
    for power in range(within):
        a, b = x.unflatten(-1, (-1, 2, 1 << power)).unbind(-2)
        x = torch.stack((a + b, a - b), -2).flatten(-3)
    a, b = x.chunk(2, -1)
    return torch.cat((a + b, a - b), -1) * factor


def rotated_query(query: Tensor) -> Tensor:
    """query [..., head_dim] float32."""
    return rotate(query, factors_of(query.shape[-1])[0])


def rotated_key(key: Tensor, shift: Tensor | None = None) -> Tensor:
    """key [..., kv_heads, head_dim] float32; shift [kv_heads, head_dim] float32."""
    return rotate(key if shift is None else key - shift, factors_of(key.shape[-1])[1])


def mean_of_rotated(bias: Tensor, frequencies: Tensor, factor: float = 1.0, interleaved: bool = False) -> Tensor:
    """The mean of bias [kv_heads, head_dim] as positions 0 .. SHIFT_POSITIONS - 1 rotate it, float32.

    frequencies: radians a position of each rotated pair, [rotary_dim / 2]; factor: of cos and sin.
    """
    rotary_dim, angles = 2 * len(frequencies), frequencies.double().to(bias.device)
    turned, rest = bias.double().split((rotary_dim, bias.shape[1] - rotary_dim), 1)
    a, b = (turned[:, ::2], turned[:, 1::2]) if interleaved else turned.chunk(2, 1)
    # The mean of e^(i p angle) over p < n is e^(i (n - 1) angle / 2) sin(n angle / 2) / (n sin(angle / 2)).
    whole, step = SHIFT_POSITIONS * angles / 2, (angles / 2).sin()
    length = torch.where(step.abs() > 1e-12, whole.sin() / (SHIFT_POSITIONS * step), 1.0) * factor
    cos, sin = (length * (whole - angles / 2).cos(), length * (whole - angles / 2).sin())
    pairs = a * cos - b * sin, b * cos + a * sin
    mean = torch.stack(pairs, 2).flatten(1) if interleaved else torch.cat(pairs, 1)
    return torch.cat((mean, rest), 1).float().contiguous()


@jit
def turned_halves(
    a,  # float32 [GROUP, HALF_BLOCK]: the heads' first halves
    b,  # like a: their second halves
    ROUNDS: tl.constexpr,
    FACTOR: tl.constexpr,
    GROUP: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    """H x * FACTOR, whose ROUNDS are those within a half."""
    for power in tl.static_range(ROUNDS):
        a = _turned_once(a, 1 << power, GROUP, HALF_BLOCK)
        b = _turned_once(b, 1 << power, GROUP, HALF_BLOCK)
    return (a + b) * FACTOR, (a - b) * FACTOR


@jit
def _turned_once(
    x,  # float32 [GROUP, HALF_BLOCK]
    DISTANCE: tl.constexpr,
    GROUP: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    """Puts the sum and the difference of two numbers DISTANCE apart into their places."""
    pairs = tl.reshape(x, (GROUP, HALF_BLOCK // (2 * DISTANCE), 2, DISTANCE))
    a, b = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), (GROUP, HALF_BLOCK))
