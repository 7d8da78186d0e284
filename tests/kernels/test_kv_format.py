"""The quantised keys and values: what a row loses, what extreme rows become, and where a pool holds them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kernels.common import kv_format
from kernels.common.kv_format import (
    KV_FORMATS,
    PLAIN,
    KVFormat,
    PlainPool,
    QuantizedPool,
    dequantize_rows,
    pack,
    plain_pool,
    quantize_rows,
    read_cells,
    unpack,
    unpacking,
    write_cells,
)
from tests.kernels.numbers import random_tensor

BITS = [8, 4]


def round_trip(x: Tensor, bits: int) -> Tensor:
    return dequantize_rows(*quantize_rows(x, bits))


def assert_as_near_as_promised(x: Tensor, bits: int) -> None:
    q, scale, least = quantize_rows(x, bits)
    limit = scale.float() * 0.501 + least.float().abs() / 2048 + 2**-17
    error = (dequantize_rows(q, scale, least) - x.float()).abs().amax(1)
    assert (error <= limit).all(), f"{error.tolist()}, limits {limit.tolist()}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows, head_dim, bits", kv_format.CASES)
def test_a_row_comes_back_within_half_a_step(rows: int, head_dim: int, bits: int, dtype: torch.dtype) -> None:
    x = (random_tensor(rows, head_dim) * torch.logspace(-2, 3, rows)[:, None]).to(dtype)
    q, scale, least = quantize_rows(x, bits)
    assert (q.dtype, scale.dtype, least.dtype) == (torch.uint8, torch.float16, torch.float16)
    assert (q.amin(1) == 0).all() and (q.amax(1) == 2**bits - 1).all()  # the whole range is used
    assert_as_near_as_promised(x, bits)


def test_the_values_are_those_of_the_formula() -> None:
    x = torch.tensor([[-1.0, 0.0, 0.49, 0.5, 1.5, 2.5, 13.0, 14.0], [3.0, 3.5, 4.0, 5.0, 6.0, 9.0, 12.0, 18.0]])
    q, scale, least = quantize_rows(x, 4)
    assert scale.tolist() == [1.0, 1.0] and least.tolist() == [-1.0, 3.0]
    assert q.tolist() == [[0, 1, 1, 2, 3, 4, 14, 15], [0, 1, 1, 2, 3, 6, 9, 15]]  # ties go up


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("value", [0.0, 1.0, -2.5, 0.1, 0.3, -0.1, -0.3, 1000.1, -7e-8, 65504.0])
def test_constant_rows_come_back(value: float, bits: int) -> None:
    x = torch.full((2, 64), value)
    q, scale, least = quantize_rows(x, bits)
    assert (scale >= 0).all()
    assert (round_trip(x, bits) - x).abs().max() <= abs(value) / 2048 + 2**-25
    if x.half().float().equal(x):
        assert not q.any() and not scale.any() and torch.equal(round_trip(x, bits), x)


@pytest.mark.parametrize("bits", BITS)
def test_rows_that_hardly_vary_lose_no_more_than_float16_does(bits: int) -> None:
    assert_as_near_as_promised(100 + 1e-4 * random_tensor(40, 64), bits)
    assert_as_near_as_promised(-3000 + 0.1 * random_tensor(40, 64), bits)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("size", [1e-45, 1e-30, 1e-8, 1e-6])
def test_rows_of_next_to_nothing_come_back_as_next_to_nothing(size: float, bits: int) -> None:
    x = size * random_tensor(5, 64).clamp(-3, 3)
    assert (round_trip(x, bits) - x).abs().max() <= min(2**-16, 10 * size)


@pytest.mark.parametrize("bits", BITS)
def test_the_whole_range_of_float16_comes_back(bits: int) -> None:
    x = random_tensor(3, 64)
    x *= 65504 / x.abs().amax(1, keepdim=True)
    x[0, :2] = torch.tensor([-65504.0, 65504.0])
    assert_as_near_as_promised(x, bits)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("size", [65519.0, 65520.0, 1e6, 1e20, 3e38, torch.inf])
def test_what_float16_cannot_hold_is_cut_and_stays_finite(size: float, bits: int) -> None:
    x = random_tensor(4, 64)
    x[0, 3], x[1, 5] = size, -size
    x[2, 7], x[2, 8] = size, -size
    x[3] = -size
    q, scale, least = quantize_rows(x, bits)
    found = dequantize_rows(q, scale, least)
    assert scale.isfinite().all() and least.isfinite().all() and found.isfinite().all()
    assert (found[0, 3] >= 65000) and (found[2, 7] >= 65000)  # the largest stay the largest
    assert (found[[1, 2], [5, 8]] == -65504).all() and (found[3] == -65504).all()


@pytest.mark.parametrize("bits", BITS)
def test_rows_do_not_share_anything(bits: int) -> None:
    x = random_tensor(9, 64)
    alone = torch.cat([round_trip(x[row : row + 1], bits) for row in range(9)])
    assert torch.equal(round_trip(x, bits), alone)


def test_an_int4_byte_holds_one_number_of_each_half() -> None:
    q = torch.tensor([[1, 2, 3, 15, 8, 0, 7, 15]], dtype=torch.uint8)
    assert pack(q, 4).tolist() == [[0x81, 0x02, 0x73, 0xFF]]
    assert pack(q, 8).tolist() == q.tolist()


@pytest.mark.parametrize("bits", BITS)
def test_unpacking_undoes_packing(bits: int) -> None:
    q = torch.randint(1 << bits, (3, 5, 96), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    packed = pack(q, bits)
    assert packed.shape == (3, 5, 96 * bits // 8) and packed.dtype == torch.uint8
    assert torch.equal(unpack(packed, bits), q)


def test_every_pair_of_numbers_has_a_byte_of_its_own() -> None:
    low, high = torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")
    q = torch.stack((low.flatten(), high.flatten()), dim=1).to(torch.uint8)
    assert len(pack(q, 4).unique()) == 256
    assert torch.equal(unpack(pack(q, 4), 4), q)


LAYOUTS = [
    QuantizedPool(16, 8, 128, KVFormat(8, 8)),
    QuantizedPool(64, 8, 128, KVFormat(4, 4)),
    QuantizedPool(4, 3, 80, KVFormat(8, 4)),
    QuantizedPool(1, 1, 8, KVFormat(4, 4)),
    QuantizedPool(64, 8, 128, KVFormat(8, 4)),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_data_and_params_lie_where_the_format_says(layout: QuantizedPool) -> None:
    pool = torch.zeros(3, layout.block_bytes, dtype=torch.uint8)
    view = layout.view(pool)
    block, head, side, offset = 2, layout.kv_heads - 1, 1, layout.block_size - 1
    row = (head * 2 + side) * layout.block_size + offset
    view.keys[block, offset, head, -1] = 200
    view.values[block, offset, head, -1] = 201
    view.params[block, offset, side, head] = torch.tensor([1.0, -2.0])
    key, value = (layout.block_size * layout.head_dim * bits // 8 for bits in layout.format)  # bytes of those of a head
    place = layout.kv_heads * (key + value) + row * 4
    expected = torch.zeros_like(pool)
    expected[2, head * (key + value) + key - 1] = 200
    expected[2, (head + 1) * (key + value) - 1] = 201
    expected[2, place : place + 4] = torch.tensor([0x00, 0x3C, 0x00, 0xC0])  # little endian
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_data_and_params_are_the_whole_block_without_overlap(layout: QuantizedPool) -> None:
    pool = torch.zeros(2, layout.block_bytes, dtype=torch.uint8)
    view = layout.view(pool)
    view.keys.add_(1)
    view.values.add_(1)
    view.params.view(torch.uint8).add_(1)
    assert (pool == 1).all()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_pool_of_a_layer_may_be_a_view_of_a_larger_one(layout: QuantizedPool) -> None:
    layers = torch.zeros(3, 5, layout.block_bytes, dtype=torch.uint8)
    view = layout.view(layers[:, 2])
    view.keys.fill_(7)
    view.values.fill_(7)
    view.params.fill_(1.5)
    assert layers[:, 2, : layout.data_bytes].eq(7).all()
    assert layout.view(layers[:, 2].clone()).params.eq(1.5).all()
    assert not layers[:, [0, 1, 3, 4]].any()


def test_sizes_are_those_of_the_promise() -> None:
    """int8 has 1/2, int4 1/4 of a 16-bit pool's bytes, both together 3/8, and 4 bytes for each row."""
    rows = 64 * 8 * 2
    for name, row_bytes in {"int8": 128, "int4": 64, "k8v4": 96}.items():
        assert QuantizedPool(64, 8, 128, KV_FORMATS[name]).block_bytes == rows * (row_bytes + 4)


@pytest.mark.parametrize("kv", [name for name, format in KV_FORMATS.items() if format.is_quantised])
def test_what_is_written_to_cells_is_read_from_them(kv: str) -> None:
    layout = QuantizedPool(block_size=4, kv_heads=2, head_dim=64, format=KV_FORMATS[kv])
    pool = layout.view(torch.zeros(3, layout.block_bytes, dtype=torch.uint8))
    blocks, cells = torch.arange(12) // 4, torch.arange(12) % 4
    written = [random_tensor(12, 2, 64, seed=seed) for seed in range(2)]
    write_cells(pool, blocks, cells, *written)
    for x, found, bits in zip(written, read_cells(pool, blocks, cells), layout.format, strict=True):
        assert torch.equal(found.float().flatten(0, 1), round_trip(x.flatten(0, 1), bits))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_word_is_the_scale_and_above_it_the_least_and_strides_lead_to_both(layout: QuantizedPool) -> None:
    pool = layout.view(torch.arange(3 * layout.block_bytes).to(torch.uint8).view(3, -1))
    assert pool.words.data_ptr() == pool.params.data_ptr()
    halves = pool.params.view(torch.int16).int()
    assert torch.equal(pool.words, halves[..., 1] << 16 | halves[..., 0] & 0xFFFF)
    (block, token, side, head, of_value), of_words = pool.strides[:5], pool.strides[5:]
    start = pool.keys.storage_offset() + side
    of_values = pool.keys.as_strided(pool.values.shape, (block, of_value, head, 1), start)
    assert (block, token, head, 1) == pool.keys.stride() and of_words == pool.words.stride()
    assert torch.equal(of_values, pool.values)
    assert (pool.head_dim, pool.format) == (layout.head_dim, layout.format)


def test_a_plain_pool_is_its_values() -> None:
    memory = random_tensor(3, 4, 2, 5, 16, dtype=torch.bfloat16)
    pool = plain_pool(memory[..., 2:10])
    assert pool.keys.data_ptr() == memory[..., 2:].data_ptr() and pool.keys.shape == (3, 4, 5, 8)
    assert torch.equal(pool.values, memory[:, :, 1, :, 2:10])
    assert (pool.params, pool.words, pool.head_dim, pool.format) == (None, None, 8, PLAIN)
    assert pool.strides == (640, 160, 80, 16, 160, 0, 0, 0, 0)
    with pytest.raises(ValueError, match="lie together"):
        plain_pool(memory[..., ::2])


def halves(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Words [n] -> [n, 2] of their 16-bit floats, the low one first."""
    return torch.stack((words, words >> 16), dim=1).to(torch.int16).view(dtype)


def permuted(a: Tensor, b: Tensor, selector: int) -> Tensor:
    """prmt: byte i of the result is that of the eight of a and b which digit i of the selector names."""
    both = a | b << 32
    return sum((both >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i for i in range(4))


def run_ptx(text: str, words: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Runs the text on each word (torch.int64, below 2^32) and returns its outputs $0, $1, ..."""
    instructions = [line.strip().rstrip(";") for line in text.splitlines()[1:-1] if ".reg" not in line]
    outputs = text.count("prmt") if "fma" not in text else text.count("fma")
    registers = {f"${outputs}": words}
    for instruction in instructions:
        opcode, operands = instruction.split(maxsplit=1)
        target, *sources = operands.split(", ")
        a, *rest = (torch.full_like(words, int(each, 0)) if each[0].isdigit() else registers[each] for each in sources)
        if opcode == "prmt.b32":
            result = permuted(a, rest[0], int(sources[2], 0))
        elif opcode == "fma.rn.bf16x2":
            x, y, z = (halves(each, dtype).double() for each in (a, *rest))
            exact = x * y + z
            assert torch.equal(exact.to(dtype).double(), exact)
            low, high = exact.to(dtype).view(torch.int16).long().unbind(1)
            result = low & 0xFFFF | (high & 0xFFFF) << 16
        else:
            simple = {"mov.b32": lambda a: a, "not.b32": lambda a: ~a, "and.b32": torch.bitwise_and}
            shifts = {"shr.b32": torch.bitwise_right_shift, "shl.b32": torch.bitwise_left_shift}
            result = (simple | shifts)[opcode](a, *rest)
        registers[target] = result & 0xFFFFFFFF
    return [registers[f"${i}"] for i in range(outputs)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", BITS)
def test_what_a_gpu_makes_of_four_bytes_are_their_numbers_and_the_bias(bits: int, dtype: torch.dtype) -> None:
    bytes_ = torch.stack(
        [(torch.arange(256) * odd + odd) % 256 for odd in (1, 3, 77, 251)], dim=1
    )  # each at each place
    words = sum(bytes_[:, i] << 8 * i for i in range(4))
    asm, bias = unpacking(dtype, bits, compiled=True)
    outputs = run_ptx(asm, words, dtype)
    found = torch.cat([halves(each, dtype) for each in outputs], dim=1).double()
    expected = torch.cat((bytes_ & 15, bytes_ >> 4), dim=1) if bits == 4 else bytes_
    assert torch.equal(found, expected.double() + bias)


def test_numbers_for_float32_queries_are_converted_without_a_bias() -> None:
    assert unpacking(torch.float32, 4, compiled=True) == unpacking(torch.float32, 8, compiled=True) == (None, 0)


@pytest.mark.feature("004-22")
def test_the_same_memory_holds_nearly_twice_the_tokens_in_int8_and_four_times_in_int4() -> None:
    plain = PlainPool(64, 8, 128, torch.bfloat16)
    size = math.prod(plain.block_shape) * plain.dtype.itemsize
    for kv, times in (("int8", 2), ("int4", 4), ("k8v4", 8 / 3)):
        assert 0.94 * times <= size / QuantizedPool(64, 8, 128, KV_FORMATS[kv]).block_bytes < times
