"""A matrix in the blocks of a GGUF type: `encode`.

    Q4_0, Q5_0   groups of 32   w = d q              d a float16
    Q5_1         groups of 32   w = d q - e      d and e float16
    Q8_0         groups of 32   w = d q, its scale from the largest number
    Q6_K         groups of 16   w = d s q            d a float16 of 256 columns, s int8
    Q4_K, Q5_K   groups of 32   w = d s q - e m      d and e float16 of 256 columns, s and m 6 bits

The search minimises the sum of c (w - w')^2, where the count c of a number grows with it, and with the importance of its column:
for each group several scales are tried, each is replaced by that of least squares for the numbers it gives, and the best one is
kept. Where scales are rounded themselves, their neighbours are tried too. The idea is that of llama.cpp's ggml-quants.c; other
types are encoded by llama.cpp's own package, gguf. Layouts: backend/models/gguf_blocks.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray
from torch import Tensor

from backend.api.errors import ConfigError

Array = NDArray[Any]
AT_ONCE = 1 << 18  # numbers that a thread searches at a time
COLUMNS = 256  # a super-block has so many
_LARGEST = 65504.0  # the greatest float16
_PARTS = [part / 10 for part in range(-10, 11, 2)]
_NEIGHBOURS = (0, -1, 1)
_FALLBACK = {Type.Q4_K: Type.Q5_0, Type.Q5_K: Type.Q5_1, Type.Q6_K: Type.Q8_0}


def fitting(kind: Type, columns: int) -> Type:
    """The type in which rows of so many columns are stored: `kind`, or llama.cpp's choice where they are no whole blocks."""
    if kind in _FALLBACK and columns % COLUMNS:
        kind = _FALLBACK[kind]
    return Type.F16 if columns % gguf.GGML_QUANT_SIZES[kind][0] else kind


def encode(w: Tensor, kind: Type, importance: Tensor | None = None) -> Array:
    """w [n, k] of any float type, as F32 and F16 [n, k] or as bytes [n, bytes of a row].

    importance [k] is positive, None: that of all columns is the same. k is a multiple of the type's columns. Raises ConfigError
    for numbers that are not finite, or too large for the type.
    """
    if not w.isfinite().all():
        raise ConfigError("a weight is no finite number; fetch the checkpoint again")
    if kind not in (Type.F32, Type.BF16) and w.abs().max() > _LARGEST:
        raise ConfigError("a weight is larger than 65504, the greatest of a float16; use --type BF16")
    if kind is Type.F32:
        return w.float().numpy()
    done = _with_threads(_run_of(kind, importance), w.split(max(1, AT_ONCE // w.shape[1])))
    return np.concatenate(done)


def _run_of(kind: Type, importance: Tensor | None) -> Callable[[Tensor], Array]:
    """Makes bytes of some rows."""
    if kind not in _ENCODERS:
        return lambda rows: gguf.quants.quantize(rows.float().contiguous().numpy(), kind)
    encoder = _ENCODERS[kind]
    some = None if importance is None else importance.float().view(-1, encoder.group)

    def run(rows: Tensor) -> Array:
        x = rows.float().unflatten(1, (-1, encoder.group))
        made: Array = encoder.run(x, _counts(x, some)).view(len(rows), -1).numpy()
        return made

    return run


def _with_threads(run: Callable[[Tensor], Array], parts: Sequence[Tensor]) -> list[Array]:
    """A thread for each CPU, in which torch makes none: for arrays of this size that is many times as fast."""
    num_threads = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(num_threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return list(pool.map(run, parts))


def _counts(x: Tensor, importance: Tensor | None) -> Tensor:
    """How often the squared error of each number of rows counts: like x, [n, k / group, group]."""
    counts = (x.square() + 2 * x.square().mean((1, 2), keepdim=True)).sqrt()
    return counts if importance is None else counts * importance


class _Fit(NamedTuple):
    """For each group [n, groups]."""

    scale: Tensor
    minimum: Tensor  # it is taken away, and never negative
    error: Tensor


def _with_minima(x: Tensor, c: Tensor, most: int) -> _Fit:
    """The best scales and minima of numbers x [n, groups, size] that become 0 .. most."""
    low, high = x.amin(2).clamp(max=0), x.amax(2)
    span = torch.where(high > low, high - low, 1)
    sum_c, sum_x, square = c.sum(2), (c * x).sum(2), (c * x * x).sum(2)
    plain = (-sum_x / torch.where(sum_c > 0, sum_c, 1)).clamp(min=0)  # all numbers are 0
    best = _Fit(torch.zeros_like(low), plain, square + 2 * plain * sum_x + plain * plain * sum_c)
    for part in _PARTS:
        q = ((x - low[:, :, None]) * ((most + part) / span)[:, :, None]).round_().clamp_(0, most)
        cq = c * q
        sum_q, sum_qq, sum_xq = cq.sum(2), (cq * q).sum(2), (cq * x).sum(2)
        determinant = sum_c * sum_qq - sum_q * sum_q
        is_line = determinant > 1e-6 * sum_c * sum_qq  # not all of q are one number
        safe = torch.where(is_line, determinant, 1)
        scale = (sum_c * sum_xq - sum_x * sum_q) / safe
        minimum = (sum_q * sum_xq - sum_qq * sum_x) / safe
        has_minimum = is_line & (minimum >= 0)
        scale = torch.where(has_minimum, scale, sum_xq / torch.where(sum_qq > 0, sum_qq, 1))
        minimum = torch.where(has_minimum, minimum, 0)
        error = square - 2 * scale * sum_xq + 2 * minimum * sum_x
        error += scale * scale * sum_qq - 2 * scale * minimum * sum_q + minimum * minimum * sum_c
        is_better = error < best.error
        best = _Fit(*(torch.where(is_better, new, old) for new, old in zip((scale, minimum, error), best)))
    return best


def _signed(x: Tensor, c: Tensor, most: int) -> Tensor:
    """The best scales [n, groups], with a sign, of numbers x [n, groups, size] that become -most .. most - 1."""
    largest = x.gather(2, x.abs().argmax(2, keepdim=True))
    inverse = -1 / torch.where(largest != 0, largest, 1)
    cx = c * x
    best, scale = torch.zeros_like(largest[:, :, 0]), torch.zeros_like(largest[:, :, 0])
    for part in _PARTS:
        q = (x * (inverse * (most + part))).round_().clamp_(-most, most - 1)
        with_x, with_itself = (cx * q).sum(2), (c * q * q).sum(2)
        explained = with_x * with_x / torch.where(with_itself > 0, with_itself, 1)
        scale = torch.where(explained > best, with_x / torch.where(with_itself > 0, with_itself, 1), scale)
        best = torch.maximum(best, explained)
    return scale


def _half(x: Tensor) -> Tensor:
    """The nearest float16, none of them infinite."""
    return x.clamp(-_LARGEST, _LARGEST).half()


def _inverse(x: Tensor) -> Tensor:
    return torch.where(x != 0, 1 / torch.where(x != 0, x, 1), 0)


def _rounded(x: Tensor, scale: Tensor, offset: Tensor, least: int, most: int) -> Tensor:
    """(x + offset) / scale in whole numbers."""
    return ((x + offset) * _inverse(scale)).round_().clamp_(least, most)


def _flat(x: Tensor, c: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Numbers of groups of 32 -> (their scales as bytes [n, groups, 2], q + most uint8 [n, groups, 32])."""
    scale = _half(_signed(x, c, most))
    q = _rounded(x, scale.float()[:, :, None], torch.zeros(()), -most, most - 1) + most
    return _bytes(scale[:, :, None]), q.to(torch.uint8)


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def _q4_0(x: Tensor, c: Tensor) -> Tensor:
    scale, q = _flat(x, c, 8)
    return torch.cat([scale, _nibbles(q)], 2)


def _q8_0(x: Tensor, c: Tensor) -> Tensor:
    """llama.cpp's: the largest number becomes 127, and halves are rounded away from 0."""
    scale = x.abs().amax(2, keepdim=True) / 127
    q = x * _inverse(scale)
    whole = (q.abs() + 0.5).floor_().copysign_(q).to(torch.int8)
    return torch.cat([_bytes(_half(scale)), _bytes(whole)], 2)


def _q5_0(x: Tensor, c: Tensor) -> Tensor:
    scale, q = _flat(x, c, 16)
    return torch.cat([scale, _fifth_bits(q), _nibbles(q & 15)], 2)


def _q5_1(x: Tensor, c: Tensor) -> Tensor:
    fit = _with_minima(x, c, 31)
    d, e = (_half(each[:, :, None]) for each in (fit.scale, fit.minimum))
    q = _rounded(x, d.float(), e.float(), 0, 31).to(torch.uint8)
    return torch.cat([_bytes(d), _bytes(-e), _fifth_bits(q), _nibbles(q & 15)], 2)


def _fifth_bits(q: Tensor) -> Tensor:
    """[..., 32] -> the fifth bits of all, [..., 4] bytes."""
    bits: Tensor = (q >> 4).unflatten(2, (4, 8)) << torch.arange(8, dtype=torch.uint8)
    return bits.sum(3, dtype=torch.uint8)


def _nibbles(q: Tensor) -> Tensor:
    """[..., 2 n] -> the first half in the low bits of [..., n] bytes, the second one in the high bits."""
    first, second = q.chunk(2, -1)
    return first | second << 4


def _q6_k(x: Tensor, c: Tensor) -> Tensor:
    """Groups of 16 -> [n, blocks, 210]."""
    x, c = (each.unflatten(1, (-1, 16)).flatten(0, 1) for each in (x, c))  # [blocks, 16 groups, 16]
    scale = _signed(x, c, 32)
    extreme = scale.gather(1, scale.abs().argmax(1, keepdim=True))
    d = _half(extreme / -128)
    s = _rounded(scale, d.float(), torch.zeros(()), -128, 127)
    zero = torch.zeros(())
    best, chosen, q = torch.full_like(s, torch.inf), s, torch.zeros_like(x)
    for step in _NEIGHBOURS:
        tried = (s + step).clamp(-128, 127)
        whole = (d.float() * tried)[:, :, None]
        numbers = _rounded(x, whole, zero, -32, 31)
        error = (c * (whole * numbers - x).square()).sum(2)
        is_better = error < best
        best, chosen = torch.where(is_better, error, best), torch.where(is_better, tried, chosen)
        q = torch.where(is_better[:, :, None], numbers, q)
    numbers = (q + 32).to(torch.uint8).view(-1, 2, 4, 32)
    low = _nibbles(numbers.flatten(2) & 15).flatten(1)
    high = ((numbers >> 4) << torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]).sum(2, dtype=torch.uint8)
    return torch.cat([low, high.flatten(1), _bytes(chosen.to(torch.int8)), _bytes(d)], 1)


def _k_with_minima(x: Tensor, c: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Groups of 32 -> (d, e and the packed scales of blocks [blocks, 16], q uint8 [blocks, 8, 32])."""
    x, c = (each.unflatten(1, (-1, 8)).flatten(0, 1) for each in (x, c))
    fit = _with_minima(x, c, most)
    d, e = (_half(each.amax(1, keepdim=True) / 63) for each in (fit.scale, fit.minimum))
    zero = torch.zeros(())
    s, m = (_rounded(each, unit.float(), zero, 0, 63) for each, unit in ((fit.scale, d), (fit.minimum, e)))
    best, chosen, q = torch.full_like(s, torch.inf), (s, m), torch.zeros_like(x)
    for of_s, of_m in product(_NEIGHBOURS, _NEIGHBOURS):
        tried = (s + of_s).clamp(0, 63), (m + of_m).clamp(0, 63)
        scale, offset = ((unit.float() * each)[:, :, None] for unit, each in zip((d, e), tried))
        numbers = _rounded(x, scale, offset, 0, most)
        error = (c * (scale * numbers - offset - x).square()).sum(2)
        is_better = error < best
        best = torch.where(is_better, error, best)
        chosen = torch.where(is_better, tried[0], chosen[0]), torch.where(is_better, tried[1], chosen[1])
        q = torch.where(is_better[:, :, None], numbers, q)
    s, m = (each.to(torch.uint8) for each in chosen)
    low, middle = (each[:, :4] | each[:, 4:] >> 4 << 6 for each in (s, m))
    packed = torch.cat([_bytes(d), _bytes(e), low, middle, s[:, 4:] & 15 | (m[:, 4:] & 15) << 4], 1)
    return packed, q.to(torch.uint8)


def _q4_k(x: Tensor, c: Tensor) -> Tensor:
    packed, q = _k_with_minima(x, c, 15)
    return torch.cat([packed, _in_pairs(q)], 1)


def _q5_k(x: Tensor, c: Tensor) -> Tensor:
    packed, q = _k_with_minima(x, c, 31)
    high = (q >> 4 << torch.arange(8, dtype=torch.uint8)[:, None]).sum(1, dtype=torch.uint8)
    return torch.cat([packed, high, _in_pairs(q & 15)], 1)


def _in_pairs(q: Tensor) -> Tensor:
    """Groups [blocks, 8, 32] of four bits -> [blocks, 128]: two groups share their bytes."""
    return _nibbles(q.view(-1, 4, 64)).flatten(1)


class _Encoder(NamedTuple):
    group: int
    run: Callable[[Tensor, Tensor], Tensor]  # numbers and counts [n, groups, group] -> bytes


_ENCODERS = {
    Type.Q4_0: _Encoder(32, _q4_0),
    Type.Q5_0: _Encoder(32, _q5_0),
    Type.Q5_1: _Encoder(32, _q5_1),
    Type.Q8_0: _Encoder(32, _q8_0),
    Type.Q4_K: _Encoder(32, _q4_k),
    Type.Q5_K: _Encoder(32, _q5_k),
    Type.Q6_K: _Encoder(16, _q6_k),
}
