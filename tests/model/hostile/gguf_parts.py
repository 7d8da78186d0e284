"""Models in two GGUF files that must be refused: sound parts of the tiny model, and ways to spoil one of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.model.hostile.base import Case
from tests.model.hostile.ggufs import INT32, TEXT, UINT16, UINT32, Gguf, Tensor, raw, sound

FIRST, SECOND = "model-00001-of-00002.gguf", "model-00002-of-00002.gguf"
COUNT, NUMBER, TENSORS = "split.count", "split.no", "split.tensors.count"
_DOWN = "blk.0.ffn_down.weight"


def two_parts(change: Callable[[Gguf, Gguf], object] = lambda first, second: None) -> Callable[[Path], None]:
    """The parts in the place of the checkpoint, with something changed."""

    def spoil(directory: Path) -> None:
        raw(lambda content: content)(directory)
        for path in directory.iterdir():
            path.unlink()
        whole = sound()
        names = list(whole.tensors)
        parts = [Gguf(whole.settings, {}), Gguf({}, {})]
        for number, part in enumerate(parts):
            part.tensors = {name: whole.tensors[name] for name in names[number * 5 :][: 5 if number == 0 else None]}
            part.settings |= {NUMBER: (UINT16, number), COUNT: (UINT16, 2), TENSORS: (INT32, len(names))}
        change(*parts)
        for name, part in zip((FIRST, SECOND), parts):
            (directory / name).write_bytes(part.content())

    return spoil


def _setting(part: int, key: str, kind: int, value: Any) -> Callable[[Path], None]:
    return two_parts(lambda *parts: parts[part].settings.update({key: (kind, value)}))


def _without(part: int, key: str) -> Callable[[Path], None]:
    return two_parts(lambda *parts: parts[part].settings.pop(key))


def _then(change: Callable[[Path], object]) -> Callable[[Path], None]:
    def spoil(directory: Path) -> None:
        two_parts()(directory)
        change(directory)

    return spoil


def _swap(directory: Path) -> None:
    content = (directory / FIRST).read_bytes()
    (directory / FIRST).write_bytes((directory / SECOND).read_bytes())
    (directory / SECOND).write_bytes(content)


def _lead_out(directory: Path) -> None:
    (directory / SECOND).rename(directory.parent / "outside.gguf")
    (directory / SECOND).symlink_to("../outside.gguf")


def _renamed(first: str, second: str) -> Callable[[Path], None]:
    return _then(lambda at: [(at / old).rename(at / new) for old, new in ((FIRST, first), (SECOND, second))])


def _tensor(part: int, name: str, shape: tuple[int, ...]) -> Callable[[Path], None]:
    return two_parts(lambda *parts: parts[part].tensors.update({name: Tensor(shape)}))


def _of_too_many(directory: Path) -> None:
    (directory / SECOND).unlink()
    (directory / FIRST).rename(directory / "model-00001-of-99999.gguf")


def _nameless(directory: Path) -> None:
    (directory / SECOND).unlink()
    (directory / FIRST).rename(directory / "a.gguf")


def _say_too_many(first: Gguf, second: Gguf) -> None:
    for part in (first, second):
        part.settings[TENSORS] = (UINT32, 1 << 31)


def _truncated(directory: Path) -> None:
    (directory / SECOND).write_bytes((directory / SECOND).read_bytes()[:-4000])


_ALL = len(sound().tensors)
_SAYS = f"split.tensors.count is {_ALL}"
CASES = [
    Case("gguf: the second part is missing", _then(lambda at: (at / SECOND).unlink()), (SECOND, "is missing", FIRST)),
    Case("gguf: the first part is missing", _then(lambda at: (at / FIRST).unlink()), (FIRST, "is missing", SECOND)),
    Case("gguf: parts in another order", _then(_swap), (FIRST, "split.no is 1", "it is 0", "fetch all parts")),
    Case("gguf: a part leads out", _then(_lead_out), (SECOND, "link out")),
    Case("gguf: more parts than are read", _then(_of_too_many), ("99999 parts", "at most 512", "--merge")),
    Case("gguf: a part is cut", _then(_truncated), (SECOND, "cut short")),
    Case(
        "gguf: a part is no GGUF file", _then(lambda at: (at / SECOND).write_bytes(b"x" * 99)), (SECOND, "begin with")
    ),
    Case("gguf: parts of other names", _renamed("a.gguf", "b.gguf"), ("2 models in GGUF files", "a among")),
    Case("gguf: a part of no number", _then(_nameless), ("a.gguf", "2 parts (split.count)", "-00001-of-00003.gguf")),
    Case("gguf: one of three by its count", _setting(1, COUNT, UINT16, 3), (SECOND, "split.count is 3", "it is 2")),
    Case("gguf: whole by its count", _setting(0, COUNT, UINT16, 0), (FIRST, "split.count is 0", "it is 2")),
    Case("gguf: no count", _without(0, COUNT), (FIRST, "split.count")),
    Case("gguf: no number", _without(1, NUMBER), (SECOND, "split.no")),
    Case("gguf: a number that is a text", _setting(1, NUMBER, TEXT, "1"), (SECOND, "split.no")),
    Case("gguf: a part twice", _setting(1, NUMBER, UINT16, 0), (SECOND, "split.no is 0", "it is 1")),
    Case(
        "gguf: parts of two models",
        _setting(1, TENSORS, INT32, 9),
        (SECOND, "split.tensors.count is 9", f"it is {_ALL}"),
    ),
    Case("gguf: a tensor in both parts", _tensor(0, _DOWN, (64, 64)), (SECOND, _DOWN, "earlier part")),
    Case(
        "gguf: the parts lack a tensor",
        two_parts(lambda first, second: second.tensors.pop(_DOWN)),
        (FIRST, _SAYS, f"{_ALL - 1} tensors"),
    ),
    Case("gguf: a tensor too many in parts", _tensor(1, "x", (64,)), (FIRST, _SAYS, f"{_ALL + 1} tensors or more")),
    Case("gguf: 2^31 tensors in parts", two_parts(_say_too_many), (FIRST, str(1 << 31))),
    Case("gguf: a tensor of a part has another shape", _tensor(1, _DOWN, (64, 32)), (SECOND, _DOWN, "[32, 64]")),
]
