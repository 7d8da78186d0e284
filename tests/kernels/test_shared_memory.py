"""Every entry of the tables of tiles fits every device that uses it, the ones with 99 KiB for a thread block among them."""

from __future__ import annotations

import pytest

from kernels.common.triton_runtime import architecture_of
from tests.kernels.shared_memory import DEVICES, SHARED_LIMIT, SHARED_OF_DEVICE, Product, products


@pytest.mark.feature("003-69", "003-70")
@pytest.mark.parametrize("product", list(products()), ids=lambda product: f"{product.name}-{product.architecture}")
def test_tiles_fit_every_device_that_uses_their_table(product: Product) -> None:
    for device in DEVICES[product.architecture]:
        assert product.shared_bytes <= SHARED_OF_DEVICE[device], f"of {product.architecture}, on {device}"


@pytest.mark.feature("003-70")
@pytest.mark.parametrize("num_stages, fits", [(4, True), (5, False)])
def test_what_is_a_stage_too_long_for_99_kib_is_found_where_163_would_do(num_stages: int, fits: bool) -> None:
    """Tiles of 128 x 128 x 128 bytes: 96 KiB with four stages, and 128 with five, which still fits an A100."""
    product = Product("w8a8", 80, (128 + 128) * 128, num_stages)
    assert product.shared_bytes <= SHARED_OF_DEVICE[80]
    assert (product.shared_bytes <= SHARED_LIMIT[80]) is fits


@pytest.mark.parametrize("device", SHARED_OF_DEVICE)
def test_each_device_uses_the_table_that_is_checked_against_it(device: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class OnDevice:
        device = "cuda"

    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: divmod(device, 10))
    monkeypatch.setattr("kernels.common.triton_runtime.INTERPRETED", False)
    table = architecture_of(OnDevice(), DEVICES)
    assert device in DEVICES[table]
