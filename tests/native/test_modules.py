"""Norms, MLPs and mixtures of experts in one native call, for modules that other code calls."""

from __future__ import annotations

from ctypes import CDLL

import pytest
import torch
from torch import Tensor, nn

from kernels.cpu.attention import Scratch
from kernels.cpu.linear import PackedLinear
from kernels.cpu.memory import Arena
from kernels.cpu.modules import NativeMixture, NativeRmsNorm


@pytest.mark.parametrize("dtype, most", [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)], ids=str)
@pytest.mark.parametrize("rows", [1, 70])
def test_norms_are_those_of_torch(kernels: CDLL, rows: int, dtype: torch.dtype, most: float) -> None:
    x, weight = torch.randn(rows, 100).to(dtype), torch.randn(100)
    own = NativeRmsNorm(kernels, Scratch(kernels), weight, 1e-5, threads=2)(x)
    expected = nn.functional.rms_norm(x.float(), (100,), weight, 1e-5)
    assert own.dtype == dtype and (own.float() - expected).abs().max() <= most * expected.abs().max()


@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize("tokens", [1, 9, 150])  # of 150, an expert has enough to compute whole panels
def test_experts_are_added_with_their_weights(kernels: CDLL, is_gated: bool, tokens: int) -> None:
    rng = torch.Generator().manual_seed(tokens)
    hidden, inner, count = 96, 64, 3
    ups = [torch.randn((2 if is_gated else 1) * inner, hidden, generator=rng) / 8 for _ in range(count)]
    downs = [torch.randn(hidden, inner, generator=rng) / 8 for _ in range(count)]
    packed = [
        tuple(PackedLinear.of_floats(kernels, Arena(), each) for each in pair) for pair in zip(ups, downs, strict=True)
    ]
    mixture = NativeMixture(kernels, Scratch(kernels), packed, "gelu", is_gated, threads=2)
    x, weights = torch.randn(tokens, hidden, generator=rng), torch.rand(tokens, 2, generator=rng)
    chosen = torch.stack(
        [torch.randperm(count + 1, generator=rng)[:2] for _ in range(tokens)]
    )  # the last one does not exist

    def one(token: int, expert: int) -> Tensor:
        y = ups[expert] @ x[token]
        y = nn.functional.gelu(y[:inner]) * y[inner:] if is_gated else nn.functional.gelu(y)
        return downs[expert] @ y

    expected = torch.zeros(tokens, hidden)
    for token in range(tokens):
        for expert, weight in zip(chosen[token].tolist(), weights[token], strict=True):
            expected[token] += one(token, expert) * weight if expert < count else 0
    own = mixture(x, chosen, weights)
    assert (own - expected).abs().max() <= 1e-5 * expected.abs().max().clamp(min=1)
    assert torch.equal(mixture(x[-1:], chosen[-1:], weights[-1:]), own[-1:])  # whatever stands beside a token


def test_experts_of_different_sizes_are_refused(kernels: CDLL) -> None:
    def layer(n: int, k: int) -> PackedLinear:
        return PackedLinear.of_floats(kernels, Arena(), torch.zeros(n, k))

    unequal, unfit = [(layer(64, 32), layer(32, 32)), (layer(64, 32), layer(32, 64))], [(layer(64, 32), layer(32, 64))]
    for experts, told in ((unequal, "products of 2 forms"), (unfit, "do not fit together")):
        with pytest.raises(ValueError, match=told):
            NativeMixture(kernels, Scratch(kernels), experts, "silu", True, threads=1)
