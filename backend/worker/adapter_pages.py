"""Pages: memory of one size each, in which LoRA adapters are held on the host.

After TensorRT-LLM's PEFT cache. An adapter has its pages to itself, and each projection of a layer lies in one page, its A beside
its B. Memory is taken in blocks of several pages. Pages of adapters that have gone are used again; blocks are kept.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from backend.models.lora import Layers, ProjectionPlace, Projections
from kernels.common.adapter import Part

ALIGNMENT = 64  # bytes; where a tensor may begin in a page
PartBytes = Callable[[ProjectionPlace, int], int]  # a projection and a rank -> what its A and B take in a page


def part_bytes(place: ProjectionPlace, rank: int, itemsize: int) -> int:
    """A [rank, k] and B [n, rank], as they are."""
    return _aligned(rank * place.k * itemsize) + _aligned(rank * place.n * itemsize)


def module_bytes(model: Projections, size: PartBytes) -> int:
    """Bytes of the largest projection of one layer at rank 1: the unit of TensorRT-LLM's numHostModuleLayer."""
    return max((size(place, 1) for places in model.layers for place in places.values()), default=1)


def page_bytes(model: Projections, size: PartBytes, page_rank: int, max_rank: int) -> int:
    """An adapter of all projections at `page_rank`, and besides the largest projection at `max_rank`. As a projection is not
    divided, the end of a page may stay empty; with that room an adapter of n times `page_rank` takes n pages all the same.
    """
    whole = sum(size(place, page_rank) for layer in range(len(model.layers)) for place in model.smallest(layer))
    return whole + max((size(place, max_rank) for places in model.layers for place in places.values()), default=1)


class PagePool:
    """For any thread."""

    def __init__(self, page_bytes: int, pages_per_block: int) -> None:
        self.page_bytes, self._pages_per_block = page_bytes, pages_per_block
        self.num_blocks = 0
        self._free: deque[Tensor] = deque()
        self._growing = threading.Lock()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> Tensor:
        """A page, uint8 [page_bytes]. Its content is what it last held."""
        while True:
            try:
                return self._free.pop()
            except IndexError:
                self._grow()

    def give_back(self, pages: Sequence[Tensor]) -> None:
        """Takes no lock: the garbage collector may call it on a thread that is just growing the pool."""
        self._free.extend(pages)

    def _grow(self) -> None:
        with self._growing:
            if not self._free:
                block = torch.empty(self._pages_per_block, self.page_bytes, dtype=torch.uint8)
                self.num_blocks += 1
                self._free.extend(block)


class AdapterPages:
    """The pages of one adapter."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._pages: list[Tensor] = []
        self._used: list[int] = []  # bytes of each

    @property
    def num_bytes(self) -> int:
        """Size of its whole pages."""
        return len(self._pages) * self._pool.page_bytes

    def hold(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of both, in the first page that has room for them."""
        needed = _aligned(a.nbytes) + _aligned(b.nbytes)
        assert needed <= self._pool.page_bytes, f"{needed} bytes do not fit into a page of {self._pool.page_bytes}"
        index = next(
            (i for i, used in enumerate(self._used) if used + needed <= self._pool.page_bytes), len(self._used)
        )
        if index == len(self._pages):
            self._pages.append(self._pool.take())
            self._used.append(0)
        return self._copy(index, a), self._copy(index, b)

    def belong_to(self, owner: object) -> None:
        """Give the pages back to the pool when `owner` is collected, which must hold all that reads them."""
        weakref.finalize(owner, self._pool.give_back, self._pages).atexit = False

    def _copy(self, index: int, tensor: Tensor) -> Tensor:
        start = self._used[index]
        self._used[index] += _aligned(tensor.nbytes)
        held = self._pages[index][start : start + tensor.nbytes]
        held.numpy()[:] = (
            tensor.contiguous().view(-1).view(torch.uint8).numpy()
        )  # torch would wake all its threads for it
        return held.view(tensor.dtype).view(tensor.shape)


class PagedLayers(Layers):
    """An adapter's layers whose tensors lie in pages; they stay there as long as this object is held."""


def hold_layers(layers: Layers, pages: AdapterPages) -> PagedLayers:
    """Copies of `layers` in `pages`."""
    held = PagedLayers(
        {name: [_held(part, pages) for part in parts] for name, parts in layer.items()} for layer in layers
    )
    pages.belong_to(held)
    return held


def _held(part: Part, pages: AdapterPages) -> Part:
    a, b = pages.hold(part.a, part.b)
    return part._replace(a=a, b=b)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
