"""The whole native step against the torch tier: random models, random batches, random places."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from ctypes import CDLL
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from backend.layers import attention
from kernels.common.kv_format import KVFormat, KVPool, dequantize_rows, quantize_rows
from kernels.common.kv_rotation import rotated_key, rotated_query
from kernels.common.quantize import dequantize, quantize_activations
from kernels.common.rounding import ROUNDED
from kernels.cpu.isa import AMX_EMULATED, supported_isas
from kernels.kv_append import kv_append
from tests.model.driver import Driver
from tests.native.families import NUM_FAMILIES, VOCAB, Family, Play, random_family
from tests.native.harness import SANITIZE, Format, native_driver, prompt, threads, torch_driver
from tests.weight_formats.checkpoints import ACTIVATIONS, ODD, quantization_config, write_pair
from tools.make_random_model import make_random_model

EXACT = 1e-4  # absolute, of logits of magnitude 1 to 10: the same sums in another order
NO_WORSE = 1.15  # times the torch tier's own distance from float32
NUM_BLOCKS = 130


class Scenes:
    """Plays of random models for one variant, and what the torch tier says to them, found out once for all variants."""

    def __init__(self, families: list[Family]) -> None:
        self._families = families
        self._known: dict[tuple, Tensor] = {}

    def of(self, isa: str, is_narrow: bool) -> list[tuple[int, Play]]:
        """Returns (family, play) pairs. The first four have every head size and ratio. Narrow formats cost torch most."""
        if isa == AMX_EMULATED:
            return [(family, Play(family, 5, 70)) for family in (1, 2)]
        if isa == supported_isas()[0] and SANITIZE not in os.environ:
            families = range(4 if is_narrow else NUM_FAMILIES)
        else:
            families = (1, 3) if is_narrow else range(4)
        num_steps = 4 if SANITIZE in os.environ else 7  # shapes and formats reach memory, not the number of steps
        return [(family, Play(family, num_steps)) for family in families]

    def native(self, kernels: CDLL, family: int, form: Format, play: Play) -> Tensor:
        """Returns the logits of all tokens."""
        return torch.cat(play.run(self.driver(kernels, family, form)))

    def driver(self, kernels: CDLL, family: int, form: Format) -> Driver:
        directory, window, attention = self._families[family]
        options = dict(num_blocks=NUM_BLOCKS, window=window, seed=family)
        return native_driver(directory, kernels, form, 32 << family % 2, attention, **options)

    def torch(self, family: int, form: Format, play: Play) -> Tensor:
        key = (family, form, play)
        if key not in self._known:
            directory, window, attention = self._families[family]
            driver = torch_driver(directory, form, attention=attention, num_blocks=NUM_BLOCKS, window=window, seed=9)
            with rounded_kv(form.kv_format) if form.kv_format.is_quantised else nullcontext():
                self._known[key] = torch.cat(play.run(driver))
        return self._known[key]


@pytest.fixture(scope="session")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    return Scenes([random_family(tmp_path_factory.mktemp(f"family{seed}"), seed) for seed in range(NUM_FAMILIES)])


@contextmanager
def rounded_kv(format: KVFormat) -> Iterator[None]:
    """The torch tier keeps only keys and values that int8 or int4 can hold, as numbers of each token and head are rounded."""

    def append(
        qkv: Tensor,
        positions: Tensor,
        cos: Tensor,
        sin: Tensor,
        cells: Tensor,
        pool: KVPool,
        *norms: object,
        key_shift: Tensor | None = None,
    ) -> Tensor:
        q = kv_append(qkv, positions, cos, sin, cells, pool, *norms)
        place = cells // pool.keys.shape[1], cells % pool.keys.shape[1]
        for (side, _), bits in zip(pool.sides, format, strict=True):
            written = side[place]
            if side is pool.keys:
                written = rotated_key(written.float(), key_shift)
            rows = written.flatten(0, -2)
            if bits == 8:
                rounded = dequantize(*quantize_activations(rows, pool.head_dim), pool.head_dim)
            else:
                rounded = dequantize_rows(*quantize_rows(rows, bits))
            side[place] = rounded.view_as(written).to(side.dtype)
        return rotated_query(q.float()).to(q.dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "kv_append", append)
        yield


def distance(measured: Tensor, expected: Tensor) -> float:
    """Relative to the spread; NaN if anything is."""
    assert measured.shape == expected.shape
    return ((measured - expected).norm() / (expected - expected.mean()).norm()).item()


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_in_float32_logits_are_those_of_the_torch_tier(
    kernels: CDLL, isa: str, scenes: Scenes, quantization: str
) -> None:
    form = Format("float32", quantization)
    for family, play in scenes.of(isa, is_narrow=False):
        expected = scenes.torch(family, form, play)
        assert expected.abs().max() > 1, "logits near zero would prove nothing"
        difference = (scenes.native(kernels, family, form, play) - expected).abs().max()
        assert difference <= EXACT, f"family {family}: {difference:.1e}"


@pytest.mark.parametrize(
    "form",
    [
        Format("bfloat16"),
        Format("bfloat16", "int8"),
        Format("float32", "w8a8"),
        Format("bfloat16", "w8a8"),
        Format("bfloat16", "w4a8"),
        Format("bfloat16", "w6a8"),
        Format("float32", kv="int8"),
        Format("bfloat16", "w8a8", kv="int8"),
        Format("bfloat16", kv="int4"),
        Format("bfloat16", kv="k8v4"),
    ],
    ids=str,
)
def test_narrow_numbers_are_as_near_to_float32_as_the_torch_tier_s(
    kernels: CDLL, isa: str, scenes: Scenes, form: Format
) -> None:
    """Rounding goes other ways (a value between two int8 numbers), so single logits may differ; their distance must not.

    Four bits move these random models far, so that their distance is from the same four bits in float32.
    """
    for family, play in scenes.of(isa, is_narrow=True):
        rounded = form.quantization if form.quantization in ROUNDED else "none"
        exact = Format("float32", rounded, kv=form.kv if form.kv_format.value_bits == 4 else "auto")
        in_float32 = scenes.torch(family, exact, play)
        own = distance(scenes.native(kernels, family, form, play), in_float32)
        of_torch = distance(scenes.torch(family, form, play), in_float32)
        # Rounding of bfloat16 moves a number by whole steps, of which there are 16.
        most = 0.25 if form.kv_format.value_bits == 4 else 0.1
        assert own <= NO_WORSE * of_torch < most, f"family {family}: {own:.4f}, torch tier {of_torch:.4f}"


@pytest.mark.parametrize("kv", ["int4", "k8v4"])
def test_int4_kv_is_that_of_the_torch_tier(kernels: CDLL, isa: str, scenes: Scenes, kv: str) -> None:
    """In float32 the same numbers are rounded to the same 16 steps, but for the few that lie between two of them."""
    form = Format("float32", kv=kv)
    for family, play in scenes.of(isa, is_narrow=True):
        of_torch = scenes.torch(family, form, play)
        assert distance(of_torch, scenes.torch(family, Format("float32"), play)) > 0.05, "rounding must matter"
        own = distance(scenes.native(kernels, family, form, play), of_torch)
        assert own <= 0.01, f"family {family}: {own:.4f}"


def test_a_token_s_most_likely_successor_needs_no_logits(best_kernels: CDLL, scenes: Scenes) -> None:
    """The lowest id among equals, with logits and without."""
    driver = scenes.driver(best_kernels, 0, Format())
    driver.begin(0, prompt(50, VOCAB))
    step = driver.make_step([(0, 50)])
    driver.runner.prepare(step)
    run = partial(driver.runner.tier.run, driver.runner.batch, step.rows, [50], driver.runner.storage.pools)
    greedy, logits = run(True)
    assert greedy.tolist() == logits.argmax(-1).tolist()
    without, none = run(False)
    assert none is None and without.tolist() == greedy.tolist()


def test_of_equal_logits_the_lowest_id_is_taken_by_any_number_of_threads(best_kernels: CDLL, tmp_path: Path) -> None:
    directory = make_random_model(tmp_path, vocab_size=301)
    weights = load_file(directory / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"][:7].repeat(43, 1).contiguous()  # ids 7 apart are equal
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    for count in (1, 2, 3):
        with threads(count):
            driver = native_driver(directory, best_kernels, Format())
            driver.begin(0, prompt(40, 301))
            driver.run(0, [40])
            assert driver.tokens[0][-1] < 7


def test_a_step_without_logits_writes_the_same_kv(best_kernels: CDLL, scenes: Scenes) -> None:
    """The last layer leaves out what no logits are wanted of."""
    whole, chunked = (scenes.driver(best_kernels, 1, Format()) for _ in range(2))
    tokens = prompt(90, VOCAB)
    for driver in (whole, chunked):
        driver.begin(0, tokens)
    expected = whole.run(0, [90])
    for num_tokens in (40, 45):
        step = chunked.make_step([(0, num_tokens)])
        chunked.runner.prepare(step)
        greedy, _ = chunked.runner.tier.run(chunked.runner.batch, step.rows, [0], chunked.runner.storage.pools, False)
        assert len(greedy) == 0
        chunked.computed[0] += num_tokens
    assert torch.equal(chunked.run(0, [5]), expected[85:])


@pytest.mark.parametrize("activations", [None, ACTIVATIONS], ids=["int8", "w8a8"])
def test_layers_of_a_checkpoint_may_differ_in_format(
    best_kernels: CDLL, tmp_path: Path, activations: dict[str, object] | None
) -> None:
    """A checkpoint's list of layers to leave alone may name single ones."""
    section = quantization_config(input_activations=activations)
    directory, floats = write_pair(tmp_path, "llama", section, **ODD)
    weights = load_file(directory / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    del weights[name + "_scale"]
    weights[name] = load_file(floats / "model.safetensors")[name]
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    drivers = (
        native_driver(directory, best_kernels, Format("float32")),
        torch_driver(directory, Format("float32")),
        torch_driver(floats, Format("float32")),
    )
    for driver in drivers:
        driver.begin(0, prompt(70, VOCAB))
    own, of_torch, in_float32 = (driver.run(0, [70]) for driver in drivers)
    if activations is None:
        assert (own - of_torch).abs().max() <= EXACT
    else:
        assert distance(own, in_float32) <= NO_WORSE * distance(of_torch, in_float32) < 0.1
