"""The header of a GGUF file, llama.cpp's format of a model in one file: settings, and where each tensor lies.

    "GGUF"   u32 version   u64 number of tensors   u64 number of settings
    settings   a name, a u32 type, and the value; an array is a u32 type, a u64 count, and the values
    tensors    a name, a u32 number of dimensions, u64 each (the fastest first), a u32 type, and a u64 offset
    zeros up to the next multiple of `general.alignment`, and the data; a text is a u64 length and UTF-8

Source: ggml's docs/gguf.md. Everything is little-endian; version 1 and big-endian files are refused. The file is somebody else's:
what it counts is compared with the bytes that are left before memory is taken for it, and tensors must follow each other without
gap or overlap, as ggml itself demands.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple, TypeVar

from msgspec import Meta

from backend.api.checkpoint.gguf_experts import experts_apart
from backend.api.checkpoint.gguf_parts import SUFFIX, merged, model_name, parts_of
from backend.api.checkpoint.model_files import MAX_ID, convert, find_file, shown
from backend.api.errors import ConfigError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 64 << 20
MAX_SETTINGS, MAX_TENSORS = 1 << 14, 1 << 16
MAX_TEXT_BYTES = 8 << 20
MAX_DIMENSIONS = 4  # ggml's own limit
MAX_ALIGNMENT = 1 << 16
# tokenizer.ggml.token_type of special tokens, and of others that are found in a text as a whole.
CONTROL, USER_DEFINED = 3, 4
END_TEXTS = (
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>", "[EOT]",
    "[EOS]", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<end_of_utterance>", "<turn|>", "<|tool_response>",
    "<｜end▁of▁sentence｜>", "[e~[",
)  # fmt: skip
CALLS = {"<|call|>", "<|calls|>"}  # Where one of these ends a text, <|end|> ends a part of it (reasoning, for one).
TokenId = Annotated[int, Meta(ge=0, le=MAX_ID)]
AGAIN = "fetch it again"

# The number of a setting's type -> its struct format.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
_BOOL, _TEXT, _ARRAY = 7, 8, 9


class BlockType(NamedTuple):
    """How a tensor's values are stored: in blocks of `size` values, `num_bytes` each."""

    name: str
    size: int
    num_bytes: int


# ggml's numbers of the types that are read.
TYPES = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    16: BlockType("IQ2_XXS", 256, 66),
    17: BlockType("IQ2_XS", 256, 74),
    18: BlockType("IQ3_XXS", 256, 98),
    20: BlockType("IQ4_NL", 32, 18),
    21: BlockType("IQ3_S", 256, 110),
    22: BlockType("IQ2_S", 256, 82),
    23: BlockType("IQ4_XS", 256, 136),
    30: BlockType("BF16", 1, 2),
    34: BlockType("TQ1_0", 256, 54),
    35: BlockType("TQ2_0", 256, 66),
    39: BlockType("MXFP4", 32, 17),
}
# Types that exist and are not read, for the error message.
_OTHERS = {
    15: "Q8_K", 19: "IQ1_S", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 40: "NVFP4",
}  # fmt: skip
T = TypeVar("T")


class TensorPlace(NamedTuple):
    type: BlockType
    shape: tuple[int, ...]  # as torch has it: the fastest dimension last
    offset: int  # in the file
    num_bytes: int
    path: Path

    @property
    def file(self) -> str:
        """The file's name, as errors show it."""
        return shown(self.path.name)


class GgufHeader(NamedTuple):
    """The header of a model: of a GGUF file, or of all parts together."""

    path: Path  # the file, or the first part
    settings: Mapping[str, Any]  # int, float, bool, str, list[str], or array of numbers
    tensors: Mapping[str, TensorPlace]

    @property
    def name(self) -> str:
        """The file's name, as errors show it."""
        return shown(self.path.name)

    def get(self, key: str, kind: type[T]) -> T | None:
        """The value of a setting; None if it is absent. Raises ConfigError when it is not of `kind`, which msgspec checks."""
        value = self.settings.get(key)
        if value is None:
            return None
        return convert(list(value) if isinstance(value, array) else value, kind, self.name, key)

    def need(self, key: str, kind: type[T]) -> T:
        """Like `get`, and raises ConfigError when the setting is missing."""
        value = self.get(key, kind)
        if value is None:
            raise ConfigError(f"{self.name} lacks the setting {key}; convert the model again, or {AGAIN}")
        return value


def eos_ids(header: GgufHeader) -> tuple[int, ...]:
    """Tokens that end a text: those that the settings name, and those whose text says so, as in llama.cpp.

    There </s> is one too; here only if a setting names it, for it is a tag of HTML in Gemma's vocabulary. Raises ConfigError.
    """
    named = [header.get(f"tokenizer.ggml.{key}_token_id", TokenId) for key in ("eos", "eot", "eom")]
    tokens = header.get("tokenizer.ggml.tokens", list[str]) or []
    kinds = header.get("tokenizer.ggml.token_type", list[int]) or []
    whole = enumerate(zip(tokens, kinds))
    spoken = {token: index for index, (token, kind) in whole if kind in (CONTROL, USER_DEFINED) and token in END_TEXTS}
    if spoken.keys() & CALLS:
        spoken.pop("<|end|>", None)
    return tuple(dict.fromkeys([*(token_id for token_id in named if token_id is not None), *spoken.values()]))


def gguf_file(path: Path) -> Path | None:
    """The GGUF file that `path` names: itself, or the only one of a directory without config.json. None: it names none.

    If `path` names a part of a split model, the file of its first part is returned. Raises ConfigError for a directory with
    several models, and where a part is missing.
    """
    try:
        if path.is_file():
            with path.open("rb") as file:
                is_gguf = path.suffix == SUFFIX or file.read(len(MAGIC)) == MAGIC
            return parts_of(path)[0] if is_gguf else None
        if not path.is_dir() or os.path.lexists(path / "config.json"):
            return None
        found = sorted(path.glob("*" + SUFFIX))
    except OSError as error:
        raise ConfigError(
            f"model {shown(path.name)} cannot be looked at ({error.strerror}); let this user read it"
        ) from None
    models = {model_name(each.name): each for each in found}
    if len(models) > 1:
        raise ConfigError(
            f"model {shown(path.name)} has {len(models)} models in GGUF files, {shown(min(models))} among them; give the path of "
            f"one file"
        )
    named = find_file(path, found[0].name) if found else None
    return None if named is None else parts_of(named)[0]


def read_header(path: Path) -> GgufHeader:
    """Read and check the header of a GGUF file, and of the other parts of the model if it is one. Raises ConfigError.

    A tensor of all experts of a layer is presented as one for each.
    """
    parts = parts_of(path)
    header = merged(map(_read_header, parts), len(parts))
    return header._replace(tensors=experts_apart(header.tensors, header.name))


def _read_header(path: Path) -> GgufHeader:
    try:
        # O_NONBLOCK, because the path may have become a pipe since it was checked.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            return _Reader(path, file).header()
    except OSError as error:
        raise ConfigError(
            f"{shown(path.name)} cannot be read ({error.strerror}); let this user read it, or {AGAIN}"
        ) from None


class _Reader:
    """Reads the values of the header one after the other."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._name, self._file = path, shown(path.name), file
        self._num_bytes = os.fstat(file.fileno()).st_size
        self._position = 0
        self._most = min(self._num_bytes, MAX_HEADER_BYTES)

    def header(self) -> GgufHeader:
        self._check_start()
        num_tensors, num_settings = self._number("Q"), self._number("Q")
        for count, most, what in ((num_tensors, MAX_TENSORS, "tensors"), (num_settings, MAX_SETTINGS, "settings")):
            if count > most:
                raise ConfigError(f"{self._name} says that it has {count} {what}, at most {most} are read; {AGAIN}")
        settings: dict[str, Any] = {}
        for _ in range(num_settings):
            key = self._text("the name of a setting")
            if key in settings:
                raise ConfigError(f"{self._name} has the setting {shown(key)} twice; {AGAIN}")
            settings[key] = self._value(key, self._number("I"))
        return GgufHeader(self._path, settings, self._tensors(num_tensors, self._alignment(settings)))

    def _check_start(self) -> None:
        if self._num_bytes < 24 or self._read(4, "the start") != MAGIC:
            raise ConfigError(f"{self._name} is no GGUF file, or is cut short: it does not begin with GGUF; {AGAIN}")
        version = self._number("I")
        if version not in VERSIONS:
            kind = "a big-endian file" if version & 0xFFFF == 0 else f"version {version}"
            raise ConfigError(
                f"{self._name} is {kind} of GGUF, supported are little-endian files of version "
                f"{' and '.join(map(str, VERSIONS))}; convert the model again"
            )

    def _value(self, key: str, kind: int) -> Any:
        place = f"the setting {shown(key)}"
        if kind in _SCALARS:
            return self._number(_SCALARS[kind], place)
        if kind == _BOOL:
            return self._bool(self._read(1, place), place)
        if kind == _TEXT:
            return self._text(place)
        if kind == _ARRAY:
            return self._array(place, self._number("I"), self._number("Q"))
        raise ConfigError(f"{self._name}: {place} has type {kind}, which is not known; {AGAIN}")

    def _array(self, place: str, kind: int, count: int) -> Any:
        form = _SCALARS.get(kind)
        if form is None and kind not in (_BOOL, _TEXT):
            raise ConfigError(f"{self._name}: {place} is an array of type {kind}, which is not supported; {AGAIN}")
        least = struct.calcsize(form) if form else 1 if kind == _BOOL else 8  # bytes of a value
        if count * least > self._most - self._position:
            raise ConfigError(
                f"{self._name}: {place} is an array of {count} values, more than the rest of its header can hold; {AGAIN}"
            )
        if kind == _TEXT:
            return [self._text(place) for _ in range(count)]
        content = self._read(count * least, place)
        if kind == _BOOL:
            return [self._bool(content[index : index + 1], place) for index in range(count)]
        assert form is not None
        values = array(form)
        values.frombytes(content)
        return values

    def _tensors(self, count: int, alignment: int) -> dict[str, TensorPlace]:
        places: dict[str, TensorPlace] = {}
        end = 0  # end of the tensors so far, from the start of the data
        for _ in range(count):
            name = self._text("the name of a tensor")
            place = f"{self._name}: tensor {shown(name)}"
            if name in places:
                raise ConfigError(f"{place} is there twice; {AGAIN}")
            num_dimensions = self._number("I", place)
            if not 1 <= num_dimensions <= MAX_DIMENSIONS:
                raise ConfigError(
                    f"{place} has {num_dimensions} dimensions, 1 to {MAX_DIMENSIONS} are possible; {AGAIN}"
                )
            shape = tuple(reversed([self._number("Q", place) for _ in range(num_dimensions)]))
            kind, offset = self._type(place, self._number("I", place)), self._number("Q", place)
            if shape[-1] % kind.size or 0 in shape:
                wanted = (
                    f"{kind.name} needs rows of a multiple of {kind.size}" if shape[-1] % kind.size else "none may be 0"
                )
                raise ConfigError(f"{place} has shape {shown(list(shape))}, {wanted}; {AGAIN}")
            if offset != end:
                raise ConfigError(f"{place} starts at {offset}, but the tensor before it ends at {end}; {AGAIN}")
            places[name] = TensorPlace(kind, shape, offset, prod(shape) // kind.size * kind.num_bytes, self._path)
            end = _up_to(offset + places[name].num_bytes, alignment)
        start = _up_to(self._position, alignment)
        # The last tensor's padding may be missing.
        needed = start + max((place.offset + place.num_bytes for place in places.values()), default=0)
        if needed > self._num_bytes:
            raise ConfigError(
                f"{self._name} is cut short: its tensors end at byte {needed}, and it has {self._num_bytes}; {AGAIN}"
            )
        return {name: place._replace(offset=start + place.offset) for name, place in places.items()}

    def _type(self, place: str, number: int) -> BlockType:
        if number not in TYPES:
            known = ", ".join(kind.name for kind in TYPES.values())
            raise ConfigError(
                f"{place} is of type {_OTHERS.get(number, number)}, which is not supported; supported are {known}: use a file "
                f"in one of them, such as Q4_K_M or Q8_0"
            )
        return TYPES[number]

    def _alignment(self, settings: Mapping[str, Any]) -> int:
        alignment = settings.get("general.alignment", 32)
        if type(alignment) is not int or not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise ConfigError(
                f"{self._name}: general.alignment is {shown(alignment)}, a power of two from 8 to {MAX_ALIGNMENT} is needed; "
                f"{AGAIN}"
            )
        return alignment

    def _read(self, count: int, place: str) -> bytes:
        if count > self._most - self._position:
            is_short = self._num_bytes <= MAX_HEADER_BYTES
            limit = "the end of the file" if is_short else f"the {MAX_HEADER_BYTES} bytes of a header that are read"
            raise ConfigError(f"{self._name} is cut short, or no GGUF file: {place} goes beyond {limit}; {AGAIN}")
        content = self._file.read(count)
        if len(content) < count:  # The file has become shorter.
            raise ConfigError(f"{self._name} is cut short in {place}; {AGAIN}")
        self._position += count
        return content

    def _number(self, form: str, place: str = "its header") -> Any:
        (value,) = struct.unpack("<" + form, self._read(struct.calcsize(form), place))
        return value

    def _text(self, place: str) -> str:
        (length,) = struct.unpack("<Q", self._read(8, place))
        if length > MAX_TEXT_BYTES:
            raise ConfigError(f"{self._name}: {place} has {length} bytes, at most {MAX_TEXT_BYTES} are read; {AGAIN}")
        try:
            return self._read(length, place).decode("utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self._name}: {place} is not UTF-8 at byte {error.start}; {AGAIN}") from None

    def _bool(self, content: bytes, place: str) -> bool:
        if content not in (b"\0", b"\1"):
            raise ConfigError(f"{self._name}: {place} is {content[0]}, a bool is 0 or 1; {AGAIN}")
        return content == b"\1"


def _up_to(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment
