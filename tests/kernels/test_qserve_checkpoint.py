"""QServe's stored layout: against its authors' packer, against its definition, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from kernels import w4a8
from kernels.common import qserve_checkpoint as layout
from tests.kernels.numbers import random_tensor

# qweight.flatten()[at:at + 24] of q[r, c] = (7 r + 3 c + r c // 5) % 16, 64 rows and 128 columns, by DeepCompressor 0.1.0.
PACKED = {
    0: [0, 99, -58, 41, -120, -4, 113, -11, 48, -109, -10, 89, 65, -58, 74, -49, -116, -1, 82, -75, 122, -1, 99, -24],
    2500: [
        -103,
        -123,
        -127,
        126,
        29,
        -8,
        -45,
        -66,
        47,
        43,
        24,
        20,
        -100,
        119,
        81,
        60,
        122,
        119,
        99,
        111,
        -103,
        115,
        94,
        57,
    ],
}


def half_scales(weight: w4a8.Weight4A8) -> w4a8.Weight4A8:
    """The weight with scales that float16 holds."""
    return weight._replace(scale=weight.scale.half().float())


@pytest.fixture(params=[True, False], ids=["per group", "per channel"])
def weight(request: pytest.FixtureRequest) -> w4a8.Weight4A8:
    return half_scales(w4a8.quantize(random_tensor(96, 384), request.param))


def test_bytes_are_those_of_the_authors_packer() -> None:
    rows, columns = torch.arange(64)[:, None], torch.arange(128)
    q = ((7 * rows + 3 * columns + rows * columns // 5) % 16).to(torch.uint8)
    qweight = layout._tiles(q)
    assert qweight.shape == (64, 64) and qweight.dtype == torch.int8
    for at, expected in PACKED.items():
        assert qweight.flatten()[at : at + 24].tolist() == expected


def test_a_byte_holds_the_weights_that_its_place_in_the_tile_says() -> None:
    q = torch.randint(0, 16, (64, 256), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    qweight = layout._tiles(q).view(torch.uint8).flatten()
    for at in range(0, len(qweight), 37):
        tile, byte = divmod(at, 512)
        row, column = 32 * (tile // 8), 32 * (tile % 8)
        row += 8 * (byte >> 2 & 1) + (byte >> 6)
        column += 16 * (byte >> 3 & 1) + 4 * (byte >> 4 & 3) + (byte & 3)
        assert qweight[at] == q[row, column] + 16 * q[row + 16, column]


def test_a_layer_is_read_as_it_was_written(weight: w4a8.Weight4A8) -> None:
    tensors = layout.to_qserve(weight)
    for read, written in zip(layout.from_qserve(**tensors), weight, strict=True):
        assert read is written is None or (read.dtype == written.dtype and torch.equal(read, written))


def test_the_tensors_of_groups_are_in_the_order_of_lanes() -> None:
    weight = half_scales(w4a8.quantize(random_tensor(64, 256), True))
    tensors = layout.to_qserve(weight)
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {
        "qweight": torch.int8, "s1_scales": torch.float16, "s2_scales": torch.int8, "s2_zeros": torch.int8,
    }  # fmt: skip
    order = [0, 8, 16, 24, 1, 9, 17, 25, 2]
    assert torch.equal(tensors["s2_scales"][:, :9], weight.group_scales[:, order])
    assert torch.equal(tensors["s2_scales"][:, 32:41], weight.group_scales[:, [32 + at for at in order]])
    zeros = -(weight.zeros.int() * weight.group_scales.int())
    assert torch.equal(tensors["s2_zeros"][:, :9].int(), zeros[:, order])


def test_zeros_of_channels_are_scaled() -> None:
    weight = half_scales(w4a8.quantize(random_tensor(32, 128), False))
    tensors = layout.to_qserve(weight)
    assert torch.equal(tensors["s1_szeros"], (weight.zeros[0] * weight.scale).half())


def test_zeros_times_scales_beyond_int8_wrap_around() -> None:
    """240 = 15 * 16 is stored as 16."""
    zeros, scales = torch.full((1, 32), 15, dtype=torch.uint8), torch.full((1, 32), 16, dtype=torch.int8)
    packed = w4a8.pack(torch.full((32, 128), 9, dtype=torch.uint8), 128)
    tensors = layout.to_qserve(w4a8.Weight4A8(packed, torch.ones(32), scales, zeros))
    assert (tensors["s2_zeros"] == 16).all()
    assert torch.equal(layout.from_qserve(**tensors).zeros, zeros)


def test_a_row_of_zeros_is_read() -> None:
    w = random_tensor(32, 128)
    w[3] = 0
    assert not w4a8.dequantize(layout.from_qserve(**layout.to_qserve(w4a8.quantize(w, False))))[3].any()


@pytest.mark.parametrize("n, k", [(40, 128), (32, 160)])
def test_tiles_that_are_not_whole_are_refused(n: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"tiles of 32 and columns in groups of 128, this one is {n} x {k}: pad it"):
        layout.from_qserve(torch.zeros(n, k // 2, dtype=torch.int8), torch.ones(n).half(), torch.ones(n).half())


def group_tensors(scale: int, zero: int, q: int) -> dict[str, torch.Tensor]:
    """The tensors of a layer in which all numbers are the same."""
    return {
        "qweight": torch.full((32, 64), q * 17, dtype=torch.uint8).view(torch.int8),
        "s1_scales": torch.ones(32).half(),
        "s2_scales": torch.full((1, 32), scale, dtype=torch.int8),
        "s2_zeros": torch.full((1, 32), -scale * zero).to(torch.int8),
    }


@pytest.mark.parametrize(
    "scale, zero, q, message",
    [
        (17, 7, 7, "a group's scale is 17, not within 1..16"),
        (0, 0, 0, "a group's scale is 0, not within 1..16"),
        (16, 0, 8, "is 128, not within -128..127: such a layer cannot be represented"),
        (16, 9, 0, "is -144, not within -128..127"),
    ],
)
def test_weights_that_leave_int8_are_refused(scale: int, zero: int, q: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layout.from_qserve(**group_tensors(scale, zero, q))


def test_zeros_that_are_no_whole_numbers_are_refused() -> None:
    tensors = group_tensors(5, 3, 3)
    tensors["s2_zeros"][0, 7] = -14
    with pytest.raises(ValueError, match="not multiples"):
        layout.from_qserve(**tensors)
    tensors = layout.to_qserve(half_scales(w4a8.quantize(random_tensor(32, 128), False)))
    tensors["s1_szeros"][5] += 0.5 * tensors["s1_scales"][5]
    with pytest.raises(ValueError, match="off a whole number"):
        layout.from_qserve(**tensors)


def test_groups_in_deepcompressors_order_are_refused() -> None:
    tensors = layout.to_qserve(w4a8.quantize(random_tensor(128, 1024), True))
    for name in ("s2_scales", "s2_zeros"):
        in_order = layout._in_order(tensors[name])
        tensors[name] = in_order.unflatten(1, (-1, 2, 2, 8)).transpose(3, 4).flatten(1)
    with pytest.raises(ValueError, match="QServe's order of rows"):
        layout.from_qserve(**tensors)


def test_other_groups_and_missing_tensors_are_refused() -> None:
    tensors = group_tensors(5, 3, 3)
    with pytest.raises(ValueError, match=r"not \(1, 32\): groups must have 128 columns"):
        layout.from_qserve(**tensors | {"s2_scales": torch.ones(2, 32, dtype=torch.int8)})
    with pytest.raises(ValueError, match="has neither"):
        layout.from_qserve(tensors["qweight"], tensors["s1_scales"])
