"""The peers of a linear layer: torch's own products of the same shape, on random numbers of their own."""

from __future__ import annotations

from typing import Any, Never

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.case import Peer

FP8 = "_scaled_mm fp8"
MAX_TINYGEMM = 256  # rows: it is made for few
INNER_K_TILES = 8


def _tokens(inputs: Any) -> int:
    return len(inputs.x) if isinstance(inputs.x, Tensor) else len(inputs.x.q)


def _device(inputs: Any) -> torch.device:
    return inputs.weight[0].device


def _make_cublas(inputs: Any) -> tuple[Tensor, Tensor]:
    device = _device(inputs)
    x = torch.randn(_tokens(inputs), inputs.k, device=device).bfloat16()
    return x, torch.randn(inputs.n, inputs.k, device=device).bfloat16()


def _make_int_mm(inputs: Any) -> tuple[Tensor, Tensor]:
    return inputs.x.q, inputs.weight[0].T


def _make_scaled_mm(inputs: Any) -> tuple[Tensor, ...]:
    x, weight = (part.to(torch.float8_e4m3fn) for part in _make_cublas(inputs))
    device = x.device
    return x, weight.T, torch.rand(len(x), 1, device=device), torch.rand(1, len(weight), device=device)


def _scaled_mm(given: tuple[Tensor, ...]) -> Tensor:
    x, weight, scale_x, scale_w = given
    return torch._scaled_mm(x, weight, scale_a=scale_x, scale_b=scale_w, out_dtype=torch.bfloat16)


def _make_tinygemm(inputs: Any) -> tuple[Tensor, ...]:
    n, k, device = inputs.n, inputs.k, _device(inputs)
    packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=device)
    weight = torch.ops.aten._convert_weight_to_int4pack(packed, INNER_K_TILES)
    scales = torch.rand(k // 128, n, 2, device=device).bfloat16()
    return torch.randn(_tokens(inputs), k, device=device).bfloat16(), weight, scales


def _tinygemm(given: tuple[Tensor, ...]) -> Tensor:
    x, weight, scales = given
    return torch.ops.aten._weight_int4pack_mm(x, weight, 128, scales)


def _refuse(inputs: Any) -> Never:
    raise ValueError(f"it is made for few rows, at most {MAX_TINYGEMM} here")


CUBLAS = Peer("cuBLAS bf16", lambda given: F.linear(*given), _make_cublas)
INT_MM = Peer("_int_mm", lambda given: torch._int_mm(*given), _make_int_mm)
SCALED_MM = Peer(FP8, _scaled_mm, _make_scaled_mm)


def tinygemm(m: int) -> Peer:
    return Peer("tinygemm int4", _tinygemm, _make_tinygemm if m <= MAX_TINYGEMM else _refuse)
