"""The shared memory that the products of quantised weights take, computed from their tables of tiles; nothing is compiled.

What a step along k reads lies in `num_stages` - 1 buffers while the steps ahead of it are multiplied; sm_90 has one buffer more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kernels import w4a8, w4a16, w8a8

KIB = 1024
# Bytes that a thread block may have, by compute capability times ten.
SHARED_OF_DEVICE = {80: 163 * KIB, 86: 99 * KIB, 89: 99 * KIB, 90: 227 * KIB, 100: 227 * KIB, 120: 99 * KIB}
# Architecture of a table of tiles -> the devices that use it (triton_runtime.architecture_of).
DEVICES = {80: (80, 86, 89), 90: (90,), 100: (100, 120)}
SHARED_LIMIT = {table: min(SHARED_OF_DEVICE[device] for device in devices) for table, devices in DEVICES.items()}


class Product(NamedTuple):
    """A product with some tiles."""

    name: str
    architecture: int
    step_bytes: int  # what one step along k reads of x, the weight and its scales
    num_stages: int

    @property
    def shared_bytes(self) -> int:
        return self.step_bytes * (self.num_stages - (self.architecture != 90))


def w8a8_step(block_m: int, block_n: int, block_k: int) -> int:
    return (block_m + block_n) * block_k


def w4a16_step(block_m: int, block_n: int, group: int, words: int) -> int:
    """`words`: tables of scales and zeros that are read in words of four bytes."""
    return 2 * block_m * group + block_n * group // 2 + 4 * words * block_n


def w4a8_step(block_m: int, block_n: int, words: int) -> int:
    return block_m * w4a8.GROUP + block_n * w4a8.GROUP // 2 + 4 * words * block_n


def products() -> Iterator[Product]:
    """Every entry of the tables, each in its largest form: weights with zero points, and an even number of features."""
    for architecture in DEVICES:
        for bucket, tiles in w8a8.TILES[architecture].items():
            yield Product(f"w8a8-{bucket}", architecture, w8a8_step(*tiles[:3]), tiles.num_stages)
        for bucket, four in w4a8.TILES[architecture].items():
            words = 2 * w4a8._in_words(four, 2)
            yield Product(f"w4a8-{bucket}", architecture, w4a8_step(*four[:2], words), four.num_stages)
        for bucket in w4a16.TILES[architecture]:
            for group in (32, 64, 128):
                own = w4a16._tiles(architecture, bucket or 1 << 20, group)
                words = 2 * w4a16._in_words(own, 2)
                step = w4a16_step(*own[:2], group, words)
                yield Product(f"w4a16-{bucket}-g{group}", architecture, step, own.num_stages)
