"""Weights in llama.cpp's blocks (native/super_blocks.h) against float64, exact integers and their sizes in llama.cpp's files."""

from __future__ import annotations

from ctypes import CDLL

import gguf
import pytest
import torch
from torch import Tensor

from backend.api.checkpoint.gguf import TYPES
from backend.architectures.gguf.held import held_bits
from backend.models.gguf_blocks import as_super_blocks
from backend.worker.native_tier import PackLinears
from kernels.common.super_blocks import FORMS, NL, Kind, SuperBlocks, floats, stack
from kernels.cpu.isa import AMX_EMULATED
from tests.model.gguf_files import random_blocks
from tests.native.harness import threads
from tests.native.test_linear import DTYPES, as_the_kernels_quantise, assert_product, random_tensor

KINDS = list(FORMS)
STORED: list[Kind] = [kind for kind in KINDS if "mix" not in kind]
SIGNED = (-62, -52, -44, -36, -28, -20, -12, -4, 4, 12, 20, 28, 36, 44, 52, 127)


def random_weight(kind: Kind, n: int, k: int, seed: int = 0) -> SuperBlocks:
    """Any numbers that the files can hold; some of the float16 are subnormal, as those of small weights are."""
    rng, form = torch.Generator().manual_seed(seed), FORMS[kind]
    groups, blocks = k // form.group, k // (form.columns if form.is_super else form.group)
    dtype = form.dtype
    scale = (torch.rand(n, blocks, generator=rng) * (1e-4 if form.is_super else 1e-2)).to(dtype)
    minimum = (random_tensor(rng, n, blocks) * 1e-3).to(dtype)
    least = -128 if kind in ("Q3_K", "Q6_K", "VALUES_16", "VALUES_32") else 0
    return SuperBlocks(
        kind,
        torch.randint(2**form.bits, (n, k), generator=rng, dtype=torch.uint8),
        torch.randint(least, 128, (n, groups), generator=rng, dtype=torch.int8) if form.is_super else None,
        torch.randint(128, (n, groups), generator=rng, dtype=torch.uint8)
        if form.is_super and form.has_minima
        else None,
        scale,
        minimum if form.has_minima else None,
        SIGNED if form.values == () else form.values or NL,
        0.25 if form.values == () else 1.0,
    )


def numbers(weight: SuperBlocks) -> Tensor:
    """What q stands for, without scales and minima; int64."""
    if weight.form.values is not None:
        return torch.tensor(weight.values)[weight.q.long()]
    return weight.q.long() - weight.form.centre


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_the_product_of_what_its_blocks_stand_for(
    kernels: CDLL, isa: str, kind: Kind, dtype: torch.dtype
) -> None:
    """Rows of 1 to 33: vectors, and tiles of AMX. 2,304 columns are two pieces of a panel where many rows share it."""
    rng, columns = torch.Generator().manual_seed(1), FORMS[kind].columns
    cases = [(1, 33, columns), (5, 70, 3 * columns), (33, 32, 768)] + [(33, 40, 2304)] * (isa != AMX_EMULATED)
    for rows, n, k in cases:
        x, weight = random_tensor(rng, rows, k).to(dtype), random_weight(kind, n, k)
        bias = random_tensor(rng, n) if n % 2 else None
        layer = PackLinears(kernels)(weight, bias)
        values = as_the_kernels_quantise(kernels, x.float(), FORMS[kind].group)
        assert_product(layer(x), values, floats(weight).double(), bias, (kind, rows, n, k))


@pytest.mark.parametrize("rows", [1, 4, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_sums_of_the_largest_numbers_are_exact(kernels: CDLL, isa: str, kind: Kind, rows: int) -> None:
    """Scales and minima are 1, and activations integers whose groups have 127 as the greatest, so that their scale is 1.

    256 columns of at most 127 * 128 sum up to 4.2 million, below the 2^24 up to which float32 sums are exact. The first row
    has only 127 and the second only -127, beside columns of only the greatest and only the least q.
    """
    weight, form = random_weight(kind, 40, 256)._replace(unit=1.0), FORMS[kind]
    weight.q[0], weight.q[1] = 2**form.bits - 1, 0
    for table in weight.tables[1:]:
        if table is not None:
            table.fill_(1)
    x = torch.randint(-127, 128, (rows, 256), generator=torch.Generator().manual_seed(2))
    x[:, :: form.group] = 127
    x[0] = 127
    if rows > 1:
        x[1] = -127
    expected = x @ (numbers(weight) - int(form.has_minima)).T
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


# Bits of a weight in llama.cpp's files, and here: scales and minima of 4 or 6 bits have a byte each, values 64 bytes of a block.
BITS: dict[Kind, tuple[float, float]] = {
    "Q4_0": (4.5, 4.5),
    "Q4_1": (5, 5),
    "Q5_0": (5.5, 5.5),
    "Q5_1": (6, 6),
    "Q8_0": (8.5, 8.5),
    "IQ4_NL": (4.5, 4.5),
    "MXFP4": (4.25, 4.5),
    "Q2_K": (2.625, 3.125),
    "Q3_K": (3.4375, 3.5625),
    "Q4_K": (4.5, 4.625),
    "Q5_K": (5.5, 5.625),
    "Q6_K": (6.5625, 6.5625),
    "TERNARY": (2.0625, 2.3125),
    "VALUES_32": (4.25, 4.375),
    "VALUES_16": (4.25, 4.625),
    "k mix": (7, 7.125),
    "mix 32": (10, 10),
    "mix 16": (12, 12),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_takes_the_bits_of_the_file_and_those_that_pack_scales_there(best_kernels: CDLL, kind: Kind) -> None:
    n, k = 512, 1024
    layer = PackLinears(best_kernels)(random_weight(kind, n, k), None)
    assert layer.num_bytes * 8 == n * k * BITS[kind][1] >= n * k * BITS[kind][0]


@pytest.mark.parametrize(
    "types",
    [
        *([kind.name] for kind in TYPES.values() if kind.size > 1),
        ["Q4_K", "Q6_K"],
        ["Q2_K", "TQ2_0"],
        ["Q5_0", "Q8_0"],
        ["IQ4_XS", "Q5_K"],
        ["IQ2_S", "Q4_K"],
    ],
    ids="+".join,
)
def test_doctor_and_the_page_say_what_types_of_files_take(best_kernels: CDLL, types: list[str]) -> None:
    raw = [torch.from_numpy(random_blocks((512, 1024), gguf.GGMLQuantizationType[kind])) for kind in types]
    parts = [as_super_blocks(blocks, kind) for blocks, kind in zip(raw, types)]
    layer = PackLinears(best_kernels)(stack(parts), None)
    assert layer.num_bytes * 8 == len(types) * 512 * 1024 * held_bits(set(types))


@pytest.mark.parametrize(
    "kinds, mixed",
    [
        (("Q4_K", "Q6_K", "Q5_K", "Q2_K", "Q3_K", "TERNARY"), "k mix"),
        (("Q4_1", "Q8_0", "IQ4_NL"), "mix 32"),
        (("Q4_0", "Q5_0"), "mix 32"),
        (("VALUES_32", "Q5_K"), "mix 32"),
        (("VALUES_16", "Q4_K", "Q5_1"), "mix 16"),
        (("VALUES_32", "VALUES_32"), "VALUES_32"),
        (("Q4_K", "Q4_K"), "Q4_K"),
    ],
)
def test_rows_of_several_kinds_are_one_layer(best_kernels: CDLL, kinds: tuple[Kind, ...], mixed: Kind) -> None:
    parts = [random_weight(kind, 35, 512, seed) for seed, kind in enumerate(kinds)]
    whole = stack(parts)
    assert whole.kind == mixed
    assert torch.equal(floats(whole), torch.cat([floats(part) for part in parts]))
    x = random_tensor(torch.Generator().manual_seed(5), 3, 512)
    values: Tensor = as_the_kernels_quantise(best_kernels, x, FORMS[mixed].group)
    assert_product(PackLinears(best_kernels)(whole, None)(x), values, floats(whole).double(), None, mixed)


def test_rows_with_other_values_are_mixed() -> None:
    first = random_weight("VALUES_32", 5, 256)
    parts = [first, first._replace(values=NL), first._replace(unit=0.125)]
    whole = stack(parts)
    assert whole.kind == "mix 32" and torch.equal(floats(whole), torch.cat([floats(part) for part in parts]))


@pytest.mark.parametrize("kind, columns", [("Q6_K", 256), ("Q4_1", 32)])
def test_rows_that_are_no_whole_blocks_are_refused(best_kernels: CDLL, kind: Kind, columns: int) -> None:
    weight = random_weight(kind, 4, 256)._replace(q=torch.zeros(4, 80, dtype=torch.uint8))
    with pytest.raises(ValueError, match=f"the weight has 80 columns, blocks of {kind} have {columns}"):
        PackLinears(best_kernels)(weight, None)
