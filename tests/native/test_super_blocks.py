"""Super-blocks of llama.cpp (native/super_blocks.h) against float64, exact integers and their sizes in llama.cpp's files."""

from __future__ import annotations

from ctypes import CDLL

import pytest
import torch
from torch import Tensor

from backend.worker.native_tier import PackLinears
from kernels.common.super_blocks import COLUMNS, GROUP, Kind, SuperBlocks, floats, stack
from kernels.cpu.isa import AMX_EMULATED
from tests.native.harness import threads
from tests.native.test_linear import DTYPES, as_the_kernels_quantise, assert_product, random_tensor

KINDS: list[Kind] = ["Q4_K", "Q5_K", "Q6_K", "mixed"]
BITS: dict[Kind, int] = {"Q4_K": 4, "Q5_K": 5, "Q6_K": 6, "mixed": 6}


def random_weight(kind: Kind, n: int, k: int, seed: int = 0) -> SuperBlocks:
    """Any numbers that the files can hold; some of the float16 are subnormal, as those of small weights are."""
    rng = torch.Generator().manual_seed(seed)
    groups, blocks = k // GROUP[kind], k // COLUMNS
    least = 0 if kind in ("Q4_K", "Q5_K") else -128
    q = torch.randint(2 ** BITS[kind], (n, k), generator=rng, dtype=torch.uint8)
    scales = torch.randint(least, 128, (n, groups), generator=rng, dtype=torch.int8)
    scale = (torch.rand(n, blocks, generator=rng) * 1e-4).half()
    if kind == "Q6_K":
        return SuperBlocks(kind, q, scales, None, scale, None)
    minima = torch.randint(128, (n, groups), generator=rng, dtype=torch.uint8)
    return SuperBlocks(kind, q, scales, minima, scale, (random_tensor(rng, n, blocks) * 1e-3).half())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_the_product_of_what_its_super_blocks_stand_for(
    kernels: CDLL, isa: str, kind: Kind, dtype: torch.dtype
) -> None:
    """Rows of 1 to 33: vectors, and tiles of AMX. 2,304 columns are two pieces of a panel where many rows share it."""
    rng = torch.Generator().manual_seed(1)
    cases = [(1, 33, 256), (5, 70, 512), (33, 32, 768)] + [(33, 40, 2304)] * (isa != AMX_EMULATED)
    for rows, n, k in cases:
        x, weight = random_tensor(rng, rows, k).to(dtype), random_weight(kind, n, k)
        bias = random_tensor(rng, n) if n % 2 else None
        layer = PackLinears(kernels)(weight, bias)
        values = as_the_kernels_quantise(kernels, x.float(), GROUP[kind])
        assert_product(layer(x), values, floats(weight).double(), bias, (kind, rows, n, k))


@pytest.mark.parametrize("rows", [1, 4, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_sums_of_the_largest_numbers_are_exact(kernels: CDLL, isa: str, kind: Kind, rows: int) -> None:
    """Scales and minima are 1, and activations integers whose groups have 127 as the greatest, so that their scale is 1.

    256 columns of at most 127 * 127 sum up to 4.1 million, below the 2^24 up to which float32 sums are exact. The first row
    has only 127 and the second only -127, beside columns of only the greatest and only the least q.
    """
    weight = random_weight(kind, 40, COLUMNS)
    weight.q[0], weight.q[1] = 2 ** BITS[kind] - 1, 0
    for table in (weight.scales, weight.minima, weight.scale, weight.minimum):
        if table is not None:
            table.fill_(1)
    x = torch.randint(-127, 128, (rows, COLUMNS), generator=torch.Generator().manual_seed(2))
    x[:, :: GROUP[kind]] = 127
    x[0] = 127
    if rows > 1:
        x[1] = -127
    centre, minimum = (0 if BITS[kind] < 6 else 32), int(weight.minimum is not None)
    expected = x @ (weight.q.long() - centre - minimum).T
    assert torch.equal(PackLinears(kernels)(weight, None)(x.float()).long(), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_the_number_of_rows_and_threads_changes_no_bit(kernels: CDLL, isa: str, kind: Kind) -> None:
    """A pass serves up to 512 rows; AMX takes vectors up to 4 rows and tiles beyond."""
    n, k, most = (33, 256, 40) if isa == AMX_EMULATED else (130, 512, 530)
    x, layer = (
        random_tensor(torch.Generator().manual_seed(4), most, k),
        PackLinears(kernels)(random_weight(kind, n, k), None),
    )
    whole = layer(x)
    for count in (1, 4, 5, 6, 7, 13, 40):
        assert torch.equal(layer(x[:count]), whole[:count])
    assert torch.equal(layer(x[-1:])[0], whole[-1])
    for count in (1, 3):
        with threads(count):
            assert torch.equal(layer(x[:40]), whole[:40])


@pytest.mark.parametrize("kind, bits", [("Q4_K", 4.5), ("Q5_K", 5.5), ("Q6_K", 6.5625), ("mixed", 7)])
def test_a_layer_takes_the_bits_of_the_file_and_the_two_that_pack_scales_there(
    best_kernels: CDLL, kind: Kind, bits: float
) -> None:
    """The files hold scales and minima of 6 bits in 6 bits; here each has a byte, 4 bits more for each 32 columns.

    `mixed` is in no file: 6 bits with two bytes for each 16 columns, and two float16.
    """
    n, k = 512, 1024
    unpacked = 0 if kind == "Q6_K" else 0.125
    layer = PackLinears(best_kernels)(random_weight(kind, n, k), None)
    assert layer.num_bytes * 8 == n * k * (bits + unpacked)


def test_rows_of_all_kinds_are_one_layer(best_kernels: CDLL) -> None:
    parts = [random_weight(kind, 35, 512, seed) for seed, kind in enumerate(("Q4_K", "Q6_K", "Q5_K"))]
    whole = stack(parts)
    assert whole.kind == "mixed"
    assert torch.equal(floats(whole), torch.cat([floats(part) for part in parts]))
    again = stack([parts[0], parts[0]])
    assert again.kind == "Q4_K" and torch.equal(floats(again), floats(parts[0]).repeat(2, 1))
    x = random_tensor(torch.Generator().manual_seed(5), 3, 512)
    values: Tensor = as_the_kernels_quantise(best_kernels, x, GROUP["mixed"])
    assert_product(PackLinears(best_kernels)(whole, None)(x), values, floats(whole).double(), None, "mixed")


def test_rows_that_are_no_whole_super_blocks_are_refused(best_kernels: CDLL) -> None:
    weight = random_weight("Q6_K", 4, 256)._replace(q=torch.zeros(4, 128, dtype=torch.uint8))
    with pytest.raises(ValueError, match="the weight has 128 columns, super-blocks have 256"):
        PackLinears(best_kernels)(weight, None)
