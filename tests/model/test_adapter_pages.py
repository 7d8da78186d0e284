"""Adapters in pages: how large pages and caches are, what an adapter takes, and in which portions memory is taken."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from backend.api.config.schema import KvCacheConfig, LoraSection, ModelConfigSection
from backend.architectures.description import ModelConfig
from backend.core.step import ModelInfo, PreparedAdapter, StepInput
from backend.kvcache.adapters import AdapterCache
from backend.models import loader
from backend.models.lora import Layers, parts_of, places
from backend.worker.adapter_pages import AdapterPages, PagePool
from backend.worker.adapters import CopyStreams, DeviceAdapters, make_stacks
from backend.worker.loaded_model import LoadedModel
from kernels.common.adapter import Part
from kernels.cpu.lora import PackedAdapter
from tests.model.tiers import TORCH, TierCase

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def base(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("llama2")


def load(base: Path, tier: TierCase = TORCH, **lora: int) -> LoadedModel:
    section = ModelConfigSection(dtype="float32", kernels=tier.kernels, device="cpu", num_threads=1)
    cpu = torch.device("cpu")
    return LoadedModel(
        loader.open_directory(base), section, KvCacheConfig(), cpu, lora=LoraSection(enabled=True, **lora)
    )


def layers_of(config: ModelConfig, rank: int, modules: tuple[str, ...] = MODULES, seed: int = 1) -> Layers:
    torch.manual_seed(seed)
    made: Layers = [{} for _ in range(config.num_layers)]
    for layer in made:
        for name in modules:
            place = places(config)[name]
            part = Part(place.first, torch.randn(rank, place.k), torch.randn(place.n, rank), 0.5)
            layer.setdefault(place.linear, []).append(part)
    return made


def num_pages(loaded: LoadedModel, rank: int, modules: tuple[str, ...] = MODULES) -> int:
    weights, num_bytes, device_bytes = loaded.pack(layers_of(loaded.config, rank, modules))
    assert num_bytes == device_bytes and num_bytes % loaded.pages.page_bytes == 0
    return num_bytes // loaded.pages.page_bytes


@pytest.mark.feature("001-39")
def test_an_adapter_of_the_page_s_rank_fills_one_page(base: Path, tier: TierCase) -> None:
    """And of n times that rank at most n. A small highest rank makes the room for a projection that is not divided small."""
    loaded = load(base, tier)
    assert all(num_pages(loaded, rank) <= -(-rank // 8) for rank in (1, 7, 9, 24, 40, 64))
    assert num_pages(loaded, 8) == 1 and num_pages(loaded, 16, ("q_proj", "v_proj")) == 1
    assert [num_pages(load(base, tier, max_rank=16), rank) for rank in (1, 8, 16)] == [1, 1, 2]
    assert [num_pages(load(base, tier, max_rank=16, page_rank=16), rank) for rank in (8, 16)] == [1, 1]
    if tier is TORCH:
        widths = {name: place.n + place.k for name, place in places(loaded.config).items()}
        whole = 8 * loaded.config.num_layers * sum(widths[name] for name in MODULES)
        assert loaded.pages.page_bytes == 4 * (whole + 64 * max(widths.values()))


@pytest.mark.feature("001-40")
def test_a_page_holds_one_projection_of_the_highest_rank_however_small_it_was_meant_to_be(
    base: Path, tier: TierCase
) -> None:
    loaded = load(base, tier, page_rank=1, max_rank=64)
    assert loaded.pages.page_bytes >= 64 * loaded.lora_module_bytes
    assert num_pages(loaded, 64) > 1
    fused = places(loaded.config)["qkv"]
    whole: Layers = [{"qkv": [Part(0, torch.ones(64, fused.k), torch.ones(fused.n, 64), 1.0)]}]
    whole += [{} for _ in range(loaded.config.num_layers - 1)]
    assert loaded.pack(whole)[1] == loaded.pages.page_bytes


@pytest.mark.feature("001-37", "001-38")
def test_module_layers_are_rows_of_rank_one_and_caches_are_whole_pages(base: Path) -> None:
    """Rows for two adapters of rank 8 on the host, for one on the device; one row more is a page more."""
    loaded = load(base)
    widest = max(place.n + place.k for place in places(loaded.config).values())
    assert loaded.lora_module_bytes == 4 * widest
    page = loaded.pages.page_bytes
    info = ModelInfo("m", 10, 10, device="cpu", lora_module_bytes=loaded.lora_module_bytes, lora_page_bytes=page)
    rows = page // loaded.lora_module_bytes  # of one page

    def pages(host: int, device: int) -> tuple[int, int]:
        section = LoraSection(enabled=True, host_module_layers=host, device_module_layers=device)
        held = AdapterCache(section, info)
        assert held.host.capacity % page == 0 and held.device.capacity % page == 0
        return held.host.capacity // page, held.device.capacity // page

    assert pages(2 * rows, rows) == (2, 1)
    assert pages(2 * rows + 1, rows + 1) == (3, 2)
    assert pages(1, 1) == (1, 1)


@pytest.mark.feature("001-44")
def test_memory_is_taken_in_blocks_of_pages_and_used_again(base: Path, tier: TierCase) -> None:
    loaded = load(base, tier, host_pages_per_block=3)
    pool = loaded.pages
    held = [loaded.pack(layers_of(loaded.config, 8, seed=seed)) for seed in range(3)]
    assert (pool.num_blocks, pool.num_free) == (1, 0)
    held.append(loaded.pack(layers_of(loaded.config, 16)))
    assert (pool.num_blocks, pool.num_free) == (2, 1)
    del held[0], held[-1]
    gc.collect()
    assert pool.num_free == 4
    held += [loaded.pack(layers_of(loaded.config, 8, seed=seed)) for seed in range(10, 14)]
    assert (pool.num_blocks, pool.num_free) == (2, 0)


def test_an_adapter_in_used_pages_is_what_it_was_and_its_neighbours_stay(base: Path) -> None:
    """Adapters come and go in one block, and each has its own numbers while it is held."""
    loaded = load(base, host_pages_per_block=4)
    held: dict[int, tuple[Layers, Layers]] = {}
    for seed in range(12):
        wanted = layers_of(loaded.config, (3, 8, 11)[seed % 3], seed=seed)
        packed = loaded.pack(wanted)[0]
        assert isinstance(packed, list)
        held[seed] = wanted, packed
        del packed
        held.pop(seed - 2, None)
        for given, there in held.values():
            for one, other in zip(parts_of(given), parts_of(there), strict=True):
                assert torch.equal(one.a, other.a) and torch.equal(one.b, other.b)
                assert (one.first, one.scale) == (other.first, other.scale)
    assert loaded.pages.num_blocks <= 2


def test_packed_weights_in_pages_are_those_outside() -> None:
    pool = PagePool(1 << 16, 2)
    pages = AdapterPages(pool)
    query = Part(40, torch.randn(5, 70), torch.randn(33, 5), 2.0)
    layers: Layers = [{"qkv": [query], "out": [Part(0, torch.randn(3, 64), torch.randn(70, 3), 1.0)]}]
    inside, outside = PackedAdapter(layers, torch.bfloat16, pages.hold), PackedAdapter(layers, torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(inside._held, outside._held, strict=True))
    at, end = pages._pages[0].data_ptr(), pages._pages[0].data_ptr() + pool.page_bytes
    assert all(at <= each.data_ptr() < end and each.data_ptr() % 64 == 0 for each in inside._held)


@pytest.mark.feature("001-45")
def test_a_device_s_memory_grows_by_blocks_of_pages(base: Path) -> None:
    """In blocks of 24 pages, each of which has room for three adapters, and in blocks that hold less than one."""
    loaded = load(base)
    one = make_stacks(loaded.model, 64).bytes_per_adapter
    for block_bytes, places_after in ((24 * (one // 8), [3, 3, 3, 6]), (one // 2, [1, 2, 3, 4])):
        stacks = make_stacks(loaded.model, 64, block_bytes)
        seen = []
        for seed in range(4):
            stacks.put(layers_of(loaded.config, 2, seed=seed))
            seen.append(len(stacks._ranks))
        assert seen == places_after


def step(*adapters: PreparedAdapter, out: tuple[str, ...] = ()) -> StepInput:
    return StepInput(1, 0, adapters_in=adapters, adapters_out=out)


def prepared(content: str) -> PreparedAdapter:
    return PreparedAdapter(content, 8, 10, 10, content)


@pytest.mark.feature("001-42")
@pytest.mark.parametrize("num_workers", [1, 3])
def test_so_many_workers_copy_at_once_and_all_is_there_before_the_step(num_workers: int) -> None:
    """Copies meet at a barrier, which opens only for as many as there are workers."""
    together = threading.Barrier(num_workers)
    threads: set[str] = set()
    copied: list[tuple[int, str]] = []

    def copy(place: int, adapter: PreparedAdapter) -> None:
        together.wait(timeout=30)
        threads.add(threading.current_thread().name)
        copied.append((place, adapter.content))

    places_left = iter(range(9))
    device: DeviceAdapters[int] = DeviceAdapters(lambda adapter: next(places_left), copy=copy, num_workers=num_workers)
    device.update(step(*map(prepared, "abcdef")))
    assert sorted(copied) == [(index, content) for index, content in enumerate("abcdef")]
    assert len(threads) == num_workers and all(name.startswith("everbatch-ensure-adapters") for name in threads)
    device.update(step(prepared("a"), prepared("b")))
    assert len(copied) == 6, "what is there is not copied again"


def test_a_copy_that_fails_fails_the_step() -> None:
    def copy(place: str, adapter: PreparedAdapter) -> None:
        raise RuntimeError(f"no room for {place}")

    device: DeviceAdapters[str] = DeviceAdapters(lambda adapter: adapter.content, copy=copy)
    with pytest.raises(RuntimeError, match="no room for a"):
        device.update(step(prepared("a")))
    with pytest.raises(RuntimeError, match="no room for a"):
        device.update(step(prepared("a")))


class Stream:
    """A CUDA stream that records what waits for what."""

    def __init__(self, log: list[str], name: str) -> None:
        self._log, self.name = log, name

    def wait_stream(self, other: Stream) -> None:
        self._log.append(f"{self.name} waits for {other.name}")


@pytest.mark.feature("001-43")
def test_copies_take_turns_on_the_streams_between_two_parts_of_the_computing_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []
    names = iter(["first", "second"])

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        log.append(f"on {stream.name}")
        yield

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(log, next(names)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(log, "computing"))
    monkeypatch.setattr(torch.cuda, "stream", on)
    streams = CopyStreams(torch.device("cuda"), 2)
    device: DeviceAdapters[str] = DeviceAdapters(lambda adapter: "", copy=lambda *each: None, streams=streams)
    device.update(step(*map(prepared, "abc")))
    assert log[:2] == ["first waits for computing", "second waits for computing"]
    assert log[2:5] == ["on first", "on second", "on first"]
    assert log[5:] == ["computing waits for first", "computing waits for second"]


def test_without_a_gpu_there_are_no_streams() -> None:
    assert CopyStreams(torch.device("cpu"), 4).streams == []
