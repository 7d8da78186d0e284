"""The disk of the simulated machine: files of KV blocks, which outlive the processes that write them, and what goes wrong there.

In place of core.block_file.BlockFile, whose file is mapped to a dictionary: place -> bytes. The format of a place, the index, the
threads and the traffic above them are the server's own. A write goes in two parts, between which its process may die.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from random import Random

from backend.core.kept_block import Found, RecordFormat
from backend.storage.block_file import num_places
from tests.simulation.server.threads import here, sleep
from tests.simulation.server.world import Process

DAMAGES, FAILS, STALLS = "disk damages", "disk fails", "disk stalls"
KINDS = (DAMAGES, FAILS, STALLS)
KIND_SHARE = 0.35  # of the seeds with a level that have each of them
STALLS_S = (0.02, 0.15, 1.0, 20.0, 1e6)


class File:
    """What one BlockFile has written. `holder` has it open."""

    def __init__(self, name: tuple[str, str]) -> None:
        self.name = name
        self.places: dict[int, bytes] = {}
        self.writers: dict[int, Process] = {}  # of the places
        self.damaged: set[int] = set()
        self.holder: Process | None = None

    @property
    def is_free(self) -> bool:
        return self.holder is None or not self.holder.is_alive


class Disk:
    def __init__(self, seed: int, kinds: frozenset[str]) -> None:
        """`kinds`: which of KINDS happen."""
        self.rng = Random(f"disk {seed}")
        self.kinds = kinds
        self.files: list[File] = []
        self.is_calm = False

    def happens(self, kind: str, share: float) -> bool:
        return kind in self.kinds and not self.is_calm and self.rng.random() < share

    def open(self, name: tuple[str, str]) -> File:
        """A file of this name that no living process holds; a new one if there is none."""
        file = next((each for each in self.files if each.name == name and each.is_free), None)
        if file is None:
            file = File(name)
            self.files.append(file)
        file.holder = here().current.process
        return file

    def disturb(self) -> None:
        """An operation may take long, or fail."""
        here().pause()
        if self.happens(STALLS, 0.15):
            here().reached["a disk that stalls"] += 1
            sleep(self.rng.choice(STALLS_S))
        if self.happens(FAILS, 0.2):
            here().reached["a disk that fails"] += 1
            raise OSError(errno.EIO, "Input/output error")


class DiskFile:
    """Implements core.kept_block.BlockStore."""

    def __init__(self, directory: str, max_bytes: int, fingerprint: str, form: RecordFormat) -> None:
        self.num_places = num_places(max_bytes, form.place_bytes)
        self._form = form
        self._disk: Disk = here().disk
        self._file = self._disk.open((directory, fingerprint))

    def scan(self) -> Iterator[Found]:
        self._disk.disturb()
        for place, content in sorted(self._file.places.items()):
            here().pause()
            record = self._form.decode(content[: self._form.num_bytes])
            if record is not None and place < self.num_places:
                here().reached["a block found again"] += 1
                yield Found(place, record)

    def read(self, place: int) -> bytes:
        self._disk.disturb()
        file = self._file
        here().reached["a block read"] += 1
        here().reached["a damaged block read"] += place in file.damaged
        here().reached["a block of a former engine read"] += file.writers.get(place) is not here().current.process
        return file.places.get(place, b"")

    def write(self, place: int, content: bytes) -> None:
        assert 0 <= place < self.num_places and len(content) == self._form.place_bytes
        self._disk.disturb()
        file, rng = self._file, self._disk.rng
        is_damaged = self._disk.happens(DAMAGES, 0.5)
        if is_damaged:
            place, content = self._damaged(place, content)
        here().reached["a block written"] += 1
        file.writers[place] = here().current.process
        cut, old = rng.randrange(len(content) + 1), file.places.get(place, b"")
        file.damaged.add(place)  # it stays so where the process dies between the two parts
        file.places[place] = content[:cut] + old[cut:]
        here().pause()
        file.places[place] = content
        if not is_damaged:
            file.damaged.discard(place)

    def _damaged(self, place: int, content: bytes) -> tuple[int, bytes]:
        """Another byte, a part, or at another place."""
        rng = self._disk.rng
        what = rng.choice(("byte", "part", "place"))
        if what == "place":
            place = rng.randrange(self.num_places)
        elif what == "part":
            content = content[: rng.randrange(len(content))]
        else:
            at = rng.randrange(len(content))
            content = content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]
        return place, content

    def close(self) -> None:
        here().pause()
        self._file.holder = None
