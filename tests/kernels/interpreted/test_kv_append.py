"""The Triton kernel that rotates the heads and writes the KV pool, against its reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels import kv_append as kernel
from kernels.common.kv_format import KV_FORMATS, QuantizedPool, dequantize_rows, plain_pool, unpack, write_cells
from kernels.common.kv_rotation import rotated_key, rotated_query
from tests.kernels.numbers import DTYPES, assert_near, random_tensor

SEQ_LEN = 40
BLOCKS = 6
QUANTISED = [name for name, format in KV_FORMATS.items() if format.is_quantised]
STEP = 1.9736328125  # a float16 whose float32 reciprocal is a little low


class Batch:
    """A batch of random tokens at random positions and cells. Every third pads."""

    def __init__(
        self, tokens: int, heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype = torch.float32
    ) -> None:
        generator = torch.Generator().manual_seed(tokens)
        self.heads, self.kv_heads, self.head_dim, self.block_size = heads, kv_heads, head_dim, block_size
        self.qkv = random_tensor(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
        self.positions = torch.randint(SEQ_LEN, (tokens,), generator=generator)
        angles = 3 * random_tensor(SEQ_LEN, head_dim // 2)
        self.cos, self.sin = angles.cos(), angles.sin()
        self.interleaved = False
        self.query_scales: Tensor | None = None
        self.key_shift: Tensor | None = None
        self.cells = torch.randperm(BLOCKS * block_size, generator=generator)[:tokens]
        self.real = torch.arange(tokens) % 3 != 2
        self.cells[~self.real] = -1
        self.positions[~self.real] = 2**50  # must not be used as an index

    def plain_pool(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return random_tensor(BLOCKS, self.block_size, 2, self.kv_heads, self.head_dim, dtype=dtype, seed=1)

    def quantized_pool(self, kv: str) -> tuple[QuantizedPool, Tensor]:
        """Returns its layout, and a pool of random bytes."""
        layout = QuantizedPool(self.block_size, self.kv_heads, self.head_dim, KV_FORMATS[kv])
        generator = torch.Generator().manual_seed(sum(layout.format))
        return layout, torch.randint(256, (BLOCKS, layout.block_bytes), generator=generator, dtype=torch.uint8)

    def rotate(self, rotary_dim: int, interleaved: bool) -> None:
        """Rotate the leading dimensions only, or none."""
        self.interleaved = interleaved
        self.cos, self.sin = (table[:, : rotary_dim // 2] if rotary_dim else None for table in (self.cos, self.sin))

    def append(self, pool: Tensor, layout: QuantizedPool | None = None, **norms: Tensor | float) -> Tensor:
        return self._call(kernel.kv_append, pool, layout, norms)

    def reference(self, pool: Tensor, layout: QuantizedPool | None = None, **norms: Tensor | float) -> Tensor:
        return self._call(kernel.reference, pool, layout, norms)

    def _call(
        self,
        function: Callable[..., Tensor],
        pool: Tensor,
        layout: QuantizedPool | None,
        norms: dict[str, Tensor | float],
    ) -> Tensor:
        view = layout.view(pool) if layout else plain_pool(pool)
        given = self.qkv, self.positions, self.cos, self.sin, self.cells, view
        settings = dict(interleaved=self.interleaved, query_scales=self.query_scales, key_shift=self.key_shift)
        return function(*given, **norms, **settings)

    def place(self) -> tuple[Tensor, Tensor]:
        cells = self.cells[self.real]
        return cells // self.block_size, cells % self.block_size

    def values(self) -> Tensor:
        return self.qkv.unflatten(1, (-1, self.head_dim))[:, -self.kv_heads :]

    def written_as(self, pool: Tensor, layout: QuantizedPool, plain: Tensor) -> Tensor:
        """Returns `pool` with quantize_rows of what `plain` holds in the batch's cells, keys rotated."""
        pool = pool.clone()
        keys, values = plain[self.place()].unbind(1)
        write_cells(layout.view(pool), *self.place(), rotated_key(keys, self.key_shift), values)
        return pool


def assert_like_the_reference(batch: Batch, pool: Tensor, **norms: Tensor | float) -> None:
    expected = pool.clone()
    q, expected_q = batch.append(pool, **norms), batch.reference(expected, **norms)
    assert q.dtype == batch.qkv.dtype and q.shape == expected_q.shape
    assert_near(q[batch.real], expected_q[batch.real])
    assert_near(pool[batch.place()], expected[batch.place()])
    assert torch.equal(pool[batch.place()][:, 1], batch.values()[batch.real].to(pool.dtype))
    pool[batch.place()] = expected[batch.place()]
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", kernel.CASES)
def test_heads_are_rotated_and_cells_written_and_no_others(case: tuple[int, ...], dtype: torch.dtype) -> None:
    batch = Batch(*case, dtype=dtype)
    assert_like_the_reference(batch, batch.plain_pool(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", kernel.CASES[:3])
def test_heads_are_normalised_before_they_are_rotated(case: tuple[int, ...], dtype: torch.dtype) -> None:
    batch = Batch(*case, dtype=dtype)
    q_norm, k_norm = (random_tensor(batch.head_dim, dtype=dtype, seed=seed) for seed in (5, 6))
    assert_like_the_reference(batch, batch.plain_pool(dtype), q_norm=q_norm, k_norm=k_norm, eps=0.1)


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("rotary_dim, interleaved", kernel.ROPES)
def test_some_dimensions_are_rotated_in_pairs_of_either_layout(
    rotary_dim: int, interleaved: bool, has_norms: bool
) -> None:
    batch = Batch(7, 9, 3, 96, 16)
    batch.rotate(rotary_dim, interleaved)
    norms = {name: random_tensor(96, seed=seed) for name, seed in (("q_norm", 5), ("k_norm", 6))} if has_norms else {}
    assert_like_the_reference(batch, batch.plain_pool(), **norms)


def test_queries_are_scaled_by_their_positions_and_keys_are_not() -> None:
    batch = Batch(*kernel.CASES[1])
    pool, scaled_pool = batch.plain_pool(), batch.plain_pool()
    plain = batch.append(pool)
    batch.query_scales = 1 + torch.arange(SEQ_LEN) / 8
    assert_like_the_reference(batch, batch.plain_pool())
    scaled, real = batch.append(scaled_pool), batch.real
    assert_near(scaled[real], plain[real] * batch.query_scales[batch.positions[real], None, None])
    assert torch.equal(pool, scaled_pool)


@pytest.mark.parametrize("kv", QUANTISED)
@pytest.mark.parametrize("rotary_dim, interleaved", kernel.ROPES)
def test_a_quantised_pool_holds_keys_of_every_rotation(rotary_dim: int, interleaved: bool, kv: str) -> None:
    batch = Batch(4, 2, 1, 96, 16)
    batch.rotate(rotary_dim, interleaved)
    plain = batch.plain_pool()
    batch.append(plain)
    layout, pool = batch.quantized_pool(kv)
    expected = batch.written_as(pool, layout, plain)
    batch.append(pool, layout)
    assert torch.equal(pool, expected)


def test_one_of_the_norms_may_be_absent() -> None:
    batch = Batch(*kernel.CASES[1])
    assert_like_the_reference(batch, batch.plain_pool(), q_norm=random_tensor(64))
    assert_like_the_reference(batch, batch.plain_pool(), k_norm=random_tensor(64))


@pytest.mark.parametrize("kv", QUANTISED)
@pytest.mark.parametrize("case", kernel.CASES)
def test_a_quantised_pool_has_exactly_what_quantize_rows_makes_of_rotated_keys_and_of_values(
    case: tuple[int, ...], kv: str
) -> None:
    batch = Batch(*case)
    plain = batch.plain_pool()
    q_of_plain = batch.append(plain)
    layout, pool = batch.quantized_pool(kv)
    expected = batch.written_as(pool, layout, plain)
    assert not torch.equal(pool, expected)
    q = batch.append(pool, layout)
    assert torch.equal(q[batch.real], rotated_query(q_of_plain[batch.real]))
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("kv", KV_FORMATS)
@pytest.mark.parametrize("case", kernel.CASES)
def test_keys_lack_the_shift_of_their_head_in_a_quantised_pool_and_only_there(case: tuple[int, ...], kv: str) -> None:
    batch = Batch(*case)
    plain = batch.plain_pool()
    batch.append(plain)
    batch.key_shift = 5 * random_tensor(batch.kv_heads, batch.head_dim, seed=7)
    layout, pool = (None, batch.plain_pool()) if kv == "auto" else batch.quantized_pool(kv)
    expected = plain if layout is None else batch.written_as(pool, layout, plain)
    batch.append(pool, layout)
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("kv", QUANTISED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_quantised_pool_is_like_the_references(dtype: torch.dtype, kv: str) -> None:
    batch = Batch(*kernel.CASES[4], dtype=dtype)
    norms = {"q_norm": random_tensor(128, seed=5), "k_norm": random_tensor(128, seed=6)}
    layout, pool = batch.quantized_pool(kv)
    expected = pool.clone()
    q, expected_q = batch.append(pool, layout, **norms), batch.reference(expected, layout, **norms)
    assert_near(q[batch.real], expected_q[batch.real])
    block, offset = batch.place()
    params, expected_params = (layout.view(x).params[block, offset] for x in (pool, expected))
    assert_near(params, expected_params)
    for (data, bits), (expected_data, _) in zip(layout.view(pool).sides, layout.view(expected).sides, strict=True):
        codes, expected_codes = (unpack(x[block, offset], bits).int() for x in (data, expected_data))
        assert (codes - expected_codes).abs().max() <= 1  # a tie may fall either way
        assert (codes != expected_codes).float().mean() < 0.01


def extreme_values(head_dim: int, bits: int) -> Tensor:
    rows = random_tensor(10, head_dim)
    rows[0] = 0
    rows[1] = 0.1  # float16 is below it
    rows[2] = 0.3  # float16 is above it
    rows[3] = 1000 + 1e-3 * rows[3]
    rows[4] *= 65504 / rows[4].abs().max()
    rows[5] *= 3e38 / rows[5].abs().max()
    rows[6] = -1e5
    rows[7] *= 1e-7
    rows[8, 1:] = 0
    most = (1 << bits) - 1
    rows[9] = (torch.arange(head_dim) % most + 0.5) * STEP  # ties; times 1 / STEP, most fall short
    rows[9, 0], rows[9, -1] = 0, most * STEP
    return rows


@pytest.mark.parametrize("kv", QUANTISED)
def test_extreme_values_are_quantised_as_quantize_rows_does(kv: str) -> None:
    batch = Batch(15, 1, 1, 96, 16)  # 96: a program's columns beyond the head are no values of it
    assert batch.real.sum() == 10
    batch.qkv[batch.real, -96:] = extreme_values(96, KV_FORMATS[kv].value_bits)
    plain = batch.plain_pool()
    batch.append(plain)
    layout, pool = batch.quantized_pool(kv)
    expected = batch.written_as(pool, layout, plain)
    batch.append(pool, layout)
    assert torch.equal(pool, expected)
    block, offset = batch.place()
    view = layout.view(pool)
    params = view.params[block, offset, 1, 0]
    assert params.isfinite().all()
    found = dequantize_rows(unpack(view.values[block, offset, 0], view.format.value_bits), params[:, 0], params[:, 1])
    assert not found[0].any()
    assert (found[1] - 0.1).abs().max() < 1e-6
    assert torch.equal(found[[2, 6]], torch.tensor([0.3, -65504])[:, None].half().float().expand(2, 96))
    assert params[9].tolist() == [STEP, 0]


@pytest.mark.parametrize("kv", KV_FORMATS)
def test_a_batch_that_only_pads_writes_nothing(kv: str) -> None:
    batch = Batch(*kernel.CASES[1])
    batch.cells.fill_(-1)
    batch.positions.fill_(-(2**50))
    layout, pool = (None, batch.plain_pool()) if kv == "auto" else batch.quantized_pool(kv)
    before = pool.clone()
    batch.append(pool, layout)
    assert torch.equal(pool, before)


def views() -> dict[str, Tensor]:
    """name -> a pool of the shape of CASES[1], whose strides are not those of a contiguous one."""
    return {
        "one of several layers": random_tensor(BLOCKS, 3, 16, 2, 2, 64)[:, 1],
        "sides first": random_tensor(2, BLOCKS, 16, 2, 64).permute(1, 2, 0, 3, 4),
        "heads first": random_tensor(2, BLOCKS, 2, 16, 64).permute(1, 3, 2, 0, 4),
        "longer heads": random_tensor(BLOCKS, 16, 2, 2, 80)[..., 3:67],
    }


@pytest.mark.parametrize("name", views())
def test_a_pool_may_have_any_strides(name: str) -> None:
    batch, pool = Batch(*kernel.CASES[1]), views()[name]
    contiguous = pool.clone(memory_format=torch.contiguous_format)
    batch.append(pool)
    batch.append(contiguous)
    assert torch.equal(pool, contiguous)


@pytest.mark.parametrize("kv", QUANTISED)
def test_a_quantised_pool_may_be_one_of_several_layers(kv: str) -> None:
    batch = Batch(*kernel.CASES[1])
    layout, pool = batch.quantized_pool(kv)
    layers = torch.stack((pool, pool, pool), dim=1)
    batch.append(layers[:, 1], layout)
    expected = torch.stack((pool, pool, pool), dim=1)
    batch.append(pool, layout)
    expected[:, 1] = pool
    assert torch.equal(layers, expected)


def test_qkv_may_be_a_part_of_a_wider_matrix() -> None:
    batch = Batch(*kernel.CASES[1])
    pool, expected = batch.plain_pool(), batch.plain_pool()
    expected_q = batch.append(expected)
    batch.qkv = torch.cat((batch.qkv, batch.qkv), dim=1)[:, : batch.qkv.shape[1]]
    assert torch.equal(batch.append(pool)[batch.real], expected_q[batch.real])
    assert torch.equal(pool, expected)


def test_cells_beyond_32_bits() -> None:
    batch = Batch(2, 4, 2, 64, 16)
    small, expected = batch.plain_pool()[:1], batch.plain_pool()[:1]
    batch.cells = torch.tensor([3, 9])
    batch.append(expected)
    batch.cells = batch.cells + torch.tensor([2**31, 2**35])
    batch.append(small.expand(2**32, *small.shape[1:]))  # every block is the first
    assert torch.equal(small, expected)


@pytest.mark.parametrize("kv", QUANTISED)
def test_blocks_beyond_the_first_2_gib(kv: str) -> None:
    batch = Batch(2, 4, 2, 64, 16)
    layout, expected = batch.quantized_pool(kv)
    stride = 2**30 + 64  # fits 32 bits; twice as much does not
    memory = torch.empty(2 * stride + layout.block_bytes, dtype=torch.uint8)  # most of it is never touched
    pool = memory.as_strided((3, layout.block_bytes), (stride, 1))
    pool.copy_(expected[:3])
    batch.cells = torch.tensor([35, 20])
    batch.append(pool, layout)
    batch.append(expected, layout)
    assert torch.equal(pool, expected[:3])


@pytest.mark.parametrize("case", kernel.CASES)
def test_the_reference_writes_each_token_to_its_cell_and_nothing_else(case: tuple[int, ...]) -> None:
    batch = Batch(*case)
    pool = batch.plain_pool()
    expected = pool.clone()
    batch.positions.fill_(0)
    batch.cos[0], batch.sin[0] = 1, 0
    q = batch.reference(pool)
    parts = batch.qkv[batch.real].unflatten(1, (-1, batch.head_dim))
    query, key, value = parts.split((batch.heads, batch.kv_heads, batch.kv_heads), dim=1)
    for cell, *sides in zip(batch.cells[batch.real].tolist(), key, value, strict=True):
        expected[divmod(cell, expected.shape[1])] = torch.stack(sides)
    assert torch.equal(pool, expected)
    assert torch.equal(q[batch.real], query) and not q[~batch.real].any()
