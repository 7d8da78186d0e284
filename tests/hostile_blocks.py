"""Damages KV blocks of a second level in a real file: `python -m tests.hostile_blocks [--blocks 1000]`.

Conversations are written to a file by one engine. Then, one after the other, a block is damaged in one of the ways below, and a
new engine over the same file is asked for all conversations. Every token must be that of an engine without a level.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from backend.core.kept_block import RecordFormat
from backend.storage.block_file import HEADER_BYTES
from tests.engine.driver import Driver, answer
from tests.fakes.level_io import ManualIo

BLOCK, POOL_TOKENS, NUM_PROMPTS, PROMPT_TOKENS = 4, 48, 6, 33
FORM = RecordFormat(BLOCK, 8 * BLOCK)
SALTS = ("", "a")


def driver_over(directory: Path, block_size: int = BLOCK) -> Driver:
    kv_cache = {"directory": str(directory), "directory_bytes": HEADER_BYTES + 300 * FORM.place_bytes}
    return Driver(
        pool_tokens=POOL_TOKENS,
        block_size=block_size,
        kv_block_size=block_size,
        kv_cache=kv_cache,
        level_io=ManualIo.eager,
    )


def prompts() -> list[tuple[str, list[int]]]:
    """Conversations that begin alike in pairs, in two namespaces."""
    return [
        (salt, [*range(10), *(100 * (number // 2) + position for position in range(PROMPT_TOKENS - 11)), number])
        for salt in SALTS
        for number in range(NUM_PROMPTS)
    ]


def ask(driver: Driver, salt: str, prompt: list[int]) -> list[int]:
    request = driver.ask(prompt, 4, cache_salt=salt)
    driver.run()
    for _ in range(3):
        driver.core.admit()
    return driver.tokens(request)


def fill(directory: Path, block_size: int = BLOCK) -> None:
    driver = driver_over(directory, block_size)
    for _ in range(2):
        for salt, prompt in prompts():
            ask(driver, salt, prompt)
    driver.core.close()


@dataclass
class Damage:
    """Ways to spoil a file. Each gets the file's bytes, the offset of a block's place, and that of another block's."""

    rng: Random
    other_layout: bytes = b""
    ways: dict[str, Callable[[bytearray, int, int], None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ways = {
            "a bit of the KV": lambda data, at, _: self._flip(data, at + FORM.num_bytes, FORM.block_bytes),
            "a bit of the record": lambda data, at, _: self._flip(data, at, FORM.num_bytes),
            "a torn write": self._tear,
            "another block in its place": self._swap,
            "the record of another block": self._record_of_another,
            "the KV of another block": self._kv_of_another,
            "an older file": self._zeros,
            "a truncated file": self._truncate,
            "a file of another layout": self._layout,
        }

    def _flip(self, data: bytearray, first: int, count: int) -> None:
        data[first + self.rng.randrange(count)] ^= 1 << self.rng.randrange(8)

    def _tear(self, data: bytearray, at: int, other: int) -> None:
        end = self.rng.randrange(1, FORM.place_bytes)
        data[at : at + end] = data[other : other + end]

    def _swap(self, data: bytearray, at: int, other: int) -> None:
        size = FORM.place_bytes
        data[at : at + size], data[other : other + size] = data[other : other + size], data[at : at + size]

    def _record_of_another(self, data: bytearray, at: int, other: int) -> None:
        data[at : at + FORM.num_bytes] = data[other : other + FORM.num_bytes]

    def _kv_of_another(self, data: bytearray, at: int, other: int) -> None:
        first, stop = FORM.num_bytes, FORM.place_bytes
        data[at + first : at + stop] = data[other + first : other + stop]

    def _zeros(self, data: bytearray, at: int, other: int) -> None:
        data[at : at + FORM.place_bytes] = bytes(FORM.place_bytes)

    def _truncate(self, data: bytearray, at: int, other: int) -> None:
        del data[at + self.rng.randrange(FORM.place_bytes) :]

    def _layout(self, data: bytearray, at: int, other: int) -> None:
        data[HEADER_BYTES:] = self.other_layout[HEADER_BYTES:].ljust(len(data) - HEADER_BYTES, b"\0")[
            : len(data) - HEADER_BYTES
        ]


def run(num_blocks: int, seed: int = 0, tell: Callable[[str], None] = lambda line: None) -> Counter[str]:
    """Damage so many blocks. Returns what was found: wrong tokens, misses by reason, blocks that were used."""
    found: Counter[str] = Counter()
    rng = Random(seed)
    with tempfile.TemporaryDirectory() as scratch:
        directory, elsewhere = Path(scratch) / "level", Path(scratch) / "other"
        fill(directory)
        fill(elsewhere, 8)
        (file,), (other,) = directory.iterdir(), elsewhere.iterdir()
        whole = file.read_bytes()
        damage = Damage(rng, other.read_bytes())
        offsets = range(HEADER_BYTES, len(whole), FORM.place_bytes)
        used = [at for at in offsets if any(whole[at : at + FORM.num_bytes])]
        expected = {(salt, tuple(prompt)): answer(prompt, 4, namespace=salt) for salt, prompt in prompts()}
        for number in range(num_blocks):
            name = list(damage.ways)[number % len(damage.ways)]
            data = bytearray(whole)
            damage.ways[name](data, rng.choice(used), rng.choice(used))
            is_before = rng.random() < 0.5
            file.write_bytes(data if is_before else whole)
            driver = driver_over(directory)
            if not is_before:  # the engine knows what the file has held
                driver.core.admit()
                file.write_bytes(data)
            for salt, prompt in rng.sample(prompts(), len(prompts())):
                if ask(driver, salt, prompt) != expected[salt, tuple(prompt)]:
                    found["wrong answers"] += 1
                    tell(f"{name}, number {number} of seed {seed}: a wrong answer")
            stats = driver.core.stats().latest.second_level
            found.update({f"missed: {reason}": count for reason, count in stats.misses_total.items()})
            found["blocks used"] += stats.onboarded_blocks_total
            found[f"damage: {name}"] += 1
            driver.core.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile_blocks", description=__doc__)
    parser.add_argument("--blocks", type=int, default=1000, help="how many blocks are damaged")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    found = run(arguments.blocks, arguments.seed, print)
    for name, count in sorted(found.items()):
        print(f"{count:8d}  {name}")
    print(f"{arguments.blocks} damaged blocks, {found['wrong answers']} wrong answers")
    return 1 if found["wrong answers"] else 0


if __name__ == "__main__":
    sys.exit(main())
