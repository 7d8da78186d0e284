"""LoRA adapters on a rank: reading them (any thread), and those on the device (the engine's thread)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

import torch

from backend.api.config.schema import LoraSection
from backend.api.lora import LoraConfig
from backend.core.step import PreparedAdapter, Row, StepInput
from backend.layers.lora import Stacks
from backend.models.decoder import Decoder
from backend.models.lora import Layers, Projections, content_of, files_of, parts_of, read_adapter, stack_shapes
from backend.worker.input_batch import InputBatch

T = TypeVar("T")
Pack = Callable[
    [Layers], tuple[object, int, int]
]  # layers -> what the tier computes with, its bytes, those on the device
Files = tuple[str, tuple[tuple[int, int, int], ...]]  # a directory; inode, size and time of the files in it


class AdapterReader:
    """Reads, checks and packs adapters. One that is still held somewhere is not packed again. For any thread."""

    def __init__(self, model: Projections, dtype: torch.dtype, max_rank: int, pack: Pack) -> None:
        self._model, self._dtype, self._max_rank, self._pack = model, dtype, max_rank, pack
        self._lock = threading.Lock()
        self._by_content: WeakValueDictionary[str, PreparedAdapter] = WeakValueDictionary()
        self._by_files: WeakValueDictionary[Files, PreparedAdapter] = WeakValueDictionary()

    def prepare(self, lora: LoraConfig) -> PreparedAdapter:
        """Raises InvalidRequest for an adapter that cannot be used."""
        files = _files(lora.path) if lora.path else None
        with self._lock:
            known = None if files is None else self._by_files.get(files)
        if known is not None:
            return known
        layers = read_adapter(lora, self._model, self._dtype, self._max_rank)
        content = content_of(layers)
        with self._lock:
            adapter = self._by_content.get(content)
        if adapter is None:
            max_rank = max((part.rank for part in parts_of(layers)), default=0)
            weights, num_bytes, device_bytes = self._pack(layers)
            adapter = PreparedAdapter(content, max_rank, num_bytes, device_bytes, weights)
        with self._lock:
            self._by_content[content] = adapter
            if files is not None:
                self._by_files[files] = adapter
        return adapter


class DeviceAdapters(Generic[T]):
    """The adapters that sequences of the batch have, by content, in the form of the tier."""

    def __init__(
        self,
        place: Callable[[PreparedAdapter], T],
        release: Callable[[T], None] = lambda placed: None,
        copy: Callable[[T, PreparedAdapter], None] | None = None,
        num_workers: int = 1,
        streams: CopyStreams | None = None,
    ) -> None:
        """place: gives an adapter its form, or a place on the device
        copy: brings its weights there, on one of `num_workers` threads; None where they need not be moved
        """
        self._place, self._release, self._copy = place, release, copy
        self._num_workers, self._streams = num_workers, streams
        self._workers: ThreadPoolExecutor | None = None  # from the first copy on
        self._held: dict[str, T] = {}

    def update(self, step: StepInput) -> None:
        """Carry out what a step says, before anything of it runs."""
        for content in step.adapters_out:
            if content in self._held:
                self._release(self._held.pop(content))
        coming = {each.content: each for each in step.adapters_in if each.content not in self._held}
        placed = {content: self._place(adapter) for content, adapter in coming.items()}
        try:
            if self._copy is not None and placed:
                self._ensure([(placed[content], adapter) for content, adapter in coming.items()])
        except BaseException:  # they come again with a later step
            for each in placed.values():
                self._release(each)
            raise
        self._held |= placed

    def _ensure(self, coming: list[tuple[T, PreparedAdapter]]) -> None:
        """Copy all of them; the device has them before it begins what follows."""
        if self._workers is None:
            self._workers = ThreadPoolExecutor(self._num_workers, thread_name_prefix="everbatch-ensure-adapters")
        streams = self._streams or CopyStreams(torch.device("cpu"), 0)
        streams.begin()
        copies = [self._workers.submit(self._one_copy, streams, *each) for each in enumerate(coming)]
        wait(copies)
        streams.end()
        for copy in copies:
            copy.result()

    def _one_copy(self, streams: CopyStreams, number: int, each: tuple[T, PreparedAdapter]) -> None:
        assert self._copy is not None
        with streams.stream(number):
            self._copy(*each)

    def of_rows(self, batch: InputBatch, rows: Sequence[Row]) -> list[T | None] | None:
        """Each row's adapter; None when no row has one."""
        return self.named(self.names(batch, rows)) or None

    def names(self, batch: InputBatch, rows: Sequence[Row]) -> list[str]:
        """The content of each row's adapter, empty where it has none; no entries when no row has one."""
        contents = [batch.adapters[row.slot] for row in rows] if self._held else []
        return contents if any(contents) else []

    def named(self, contents: Sequence[str]) -> list[T | None]:
        """The adapters of these contents, None for an empty one."""
        return [self._held[content] if content else None for content in contents]


def _files(path: str) -> Files | None:
    """A fingerprint that changes when an adapter is written again. None if the files cannot be examined: reading will say why."""
    try:
        found = [each.stat() for each in files_of(Path(path))]
    except (OSError, ValueError):
        return None
    return path, tuple((each.st_ino, each.st_size, each.st_mtime_ns) for each in found)


class CopyStreams:
    """CUDA streams for copies to the device, beside the stream that computes.

    On a CPU there are none, and copies are made as they come.
    """

    def __init__(self, device: torch.device, count: int) -> None:
        self._device = device
        self.streams = [torch.cuda.Stream(device) for _ in range(count)] if device.type == "cuda" else []

    def begin(self) -> None:
        """Copies that follow wait for what the computing stream has been given: it may still read what they overwrite."""
        for stream in self.streams:
            stream.wait_stream(torch.cuda.current_stream(self._device))

    @contextmanager
    def stream(self, number: int) -> Iterator[None]:
        """Copies of this thread go to the stream that `number` chooses."""
        if not self.streams:
            yield
            return
        with torch.cuda.stream(self.streams[number % len(self.streams)]):
            yield

    def end(self) -> None:
        """Make all later work of the computing stream wait for the copies."""
        for stream in self.streams:
            torch.cuda.current_stream(self._device).wait_stream(stream)


def make_stacks(model: Decoder, max_rank: int, block_bytes: int = 0) -> Stacks:
    """Empty places for adapters of `model`."""
    config = model.config
    return Stacks(stack_shapes(config), config.num_layers, max_rank, model.dtype, model.device, block_bytes)


def stacked_adapters(stacks: Stacks, lora: LoraSection, device: torch.device) -> DeviceAdapters[int]:
    """The adapters of the batch on a GPU: each is a place in stacks (layers/lora.py), filled ahead of the step that needs it."""

    def copy(place: int, adapter: PreparedAdapter) -> None:
        layers: Layers = adapter.weights  # type: ignore[assignment]  # what the group packs for this tier
        stacks.fill(place, layers)

    streams = CopyStreams(device, lora.copy_streams if lora.enabled else 0)
    return DeviceAdapters(lambda adapter: stacks.reserve(), stacks.take, copy, lora.ensure_workers, streams)
