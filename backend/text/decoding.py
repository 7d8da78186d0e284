"""A tokenizer's decoder as a pipeline that takes one token at a time.

`tokenizers` decodes a whole list: each decoder of the chain maps a list of strings to a list of strings. Each stage
here does the same to a stream of strings, and emits a string as soon as nothing that follows can change it. So what
has been emitted is always a prefix of what the library would return, whatever comes next, and `finish` emits the
rest:

    ByteLevel      bytes to UTF-8; holds an incomplete character (at most 3 bytes)
    ByteFallback   a run of <0xXX> tokens is one string if all of it is UTF-8, else U+FFFD per byte; holds the run,
                   because a later byte can invalidate characters that were complete
    per token      Replace, Strip, Metaspace, WordPiece: only the first token differs from the others; nothing is held
    BPEDecoder     the last token's suffix is dropped, others' become a space; holds one token
    after a Fuse   Strip and Replace see one string: hold what may still be stripped or matched

State is small, and a stage can be copied shallowly. Source of the rules: the decoders of the Hugging Face
`tokenizers` library (Apache 2.0), which the tests compare with, token by token.
"""

from __future__ import annotations

import codecs
import copy
import re
from collections.abc import Iterable
from typing import Any

from tokenizers import decoders

from backend.api.errors import Unsupported

REPLACEMENT = "\ufffd"


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes (openai/gpt-2, encoder.py): character -> byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_BYTE_OF = _byte_alphabet()
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f+][0-9A-Fa-f])>")


class Stage:
    """One decoder of the chain.

    `holds`: something was taken in and not emitted. `forgets`: what it does next depends on a few recent tokens
    only, as IncrementalDetokenizer counts them.
    """

    holds = False
    forgets = True

    def push(self, token: str) -> Iterable[str]:
        raise NotImplementedError

    def finish(self) -> Iterable[str]:
        return ()


class PerToken(Stage):
    """A decoder that maps each token by itself, the first one perhaps differently; asks the library, once per token."""

    def __init__(self, decoder: decoders.Decoder):
        self._decoder = decoder
        self._first: bool = True
        self._known: dict[str, str] = {}  # shared by copies

    def push(self, token: str) -> Iterable[str]:
        if self._first:
            self._first = False
            return (self._decoder.decode([token]),)
        text = self._known.get(token)
        if text is None:
            text = self._known[token] = self._decoder.decode(["", token])
        return (text,)


class JoinWithSpaces(Stage):
    """What the library does for a tokenizer without decoder."""

    def __init__(self) -> None:
        self._separator = ""

    def push(self, token: str) -> Iterable[str]:
        separator, self._separator = self._separator, " "
        return (separator + token,)


class BytesOfTokens(Stage):
    """ByteLevel."""

    def __init__(self) -> None:
        self._pending = b""
        self._known: dict[str, bytes] = {}

    @property
    def holds(self) -> bool:
        return bool(self._pending)

    def push(self, token: str) -> Iterable[str]:
        data = self._known.get(token)
        if data is None:
            data = self._known[token] = byte_level_bytes(token)
        data = self._pending + data
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return (text,)

    def finish(self) -> Iterable[str]:
        text = self._pending.decode("utf-8", "replace")
        self._pending = b""
        return (text,)


def byte_level_bytes(token: str) -> bytes:
    """The bytes a byte-level token stands for; with a character outside the alphabet (an added one) its own text."""
    if all(char in _BYTE_OF for char in token):
        return bytes(_BYTE_OF[char] for char in token)
    return token.encode("utf-8")


class ByteRuns(Stage):
    """ByteFallback."""

    def __init__(self) -> None:
        self._run = bytearray()

    def __copy__(self) -> ByteRuns:
        twin = ByteRuns()
        twin._run = self._run[:]
        return twin

    @property
    def holds(self) -> bool:
        return bool(self._run)

    def push(self, token: str) -> Iterable[str]:
        byte = fallback_byte(token)
        if byte is not None:
            self._run.append(byte)
            return ()
        return (*self.finish(), token) if self._run else (token,)

    def finish(self) -> Iterable[str]:
        run, self._run = self._run, bytearray()
        try:
            return (run.decode("utf-8"),) if run else ()
        except UnicodeDecodeError:
            return (REPLACEMENT,) * len(run)


def fallback_byte(token: str) -> int | None:
    """The byte of a token `<0xXX>`, else None. The library's parser takes a plus for the first digit, nothing else."""
    found = _BYTE_TOKEN.fullmatch(token)
    return None if found is None else int(found[1], 16)


class LastTokenDiffers(Stage):
    """BPEDecoder."""

    forgets = False

    def __init__(self, suffix: str):
        self._suffix = suffix
        self._held: str | None = None

    @property
    def holds(self) -> bool:
        return self._held is not None

    def push(self, token: str) -> Iterable[str]:
        held, self._held = self._held, token
        return () if held is None else (held.replace(self._suffix, " "),)

    def finish(self) -> Iterable[str]:
        held, self._held = self._held, None
        return () if held is None else (held.replace(self._suffix, ""),)


class StripFused(Stage):
    """Strip of the whole text: at most `start` of the character in front and `stop` at the end."""

    def __init__(self, char: str, start: int, stop: int):
        self._char, self._start, self._stop = char, start, stop
        self._tail = ""
        self.forgets = stop == 0 and start == 1  # any token with text settles one character

    @property
    def holds(self) -> bool:
        return bool(self._tail)

    def push(self, token: str) -> Iterable[str]:
        while self._start and token:
            if token[0] != self._char:
                self._start = 0
                break
            self._start -= 1
            token = token[1:]
        text = self._tail + token
        held = min(len(text) - len(text.rstrip(self._char)), self._stop)
        self._tail = text[len(text) - held :]
        return (text[: len(text) - held],)

    def finish(self) -> Iterable[str]:
        self._tail = ""
        return ()


class ReplaceFused(Stage):
    """str.replace over the whole text; holds the longest end of the text that begins the pattern."""

    forgets = False

    def __init__(self, pattern: str, content: str):
        self._pattern, self._content = pattern, content
        self._tail = ""

    @property
    def holds(self) -> bool:
        return bool(self._tail)

    def push(self, token: str) -> Iterable[str]:
        *done, rest = (self._tail + token).split(self._pattern)
        held = min(len(self._pattern) - 1, len(rest))
        while held and not self._pattern.startswith(rest[len(rest) - held :]):
            held -= 1
        self._tail = rest[len(rest) - held :]
        return ("".join(part + self._content for part in done) + rest[: len(rest) - held],)

    def finish(self) -> Iterable[str]:
        tail, self._tail = self._tail, ""
        return (tail,)


class DecodePipeline:
    """The stages of one stream. `push` returns text that is final, `finish` what was held."""

    def __init__(self, stages: list[Stage]):
        self._stages = stages

    @property
    def holds(self) -> bool:
        return any(stage.holds for stage in self._stages)

    @property
    def forgets(self) -> bool:
        """Whether every stage does. ByteLevel must come first: it is judged by the token as the vocabulary has it."""
        in_place = not any(isinstance(stage, BytesOfTokens) for stage in self._stages[1:])
        return in_place and all(stage.forgets for stage in self._stages)

    def push(self, token: str) -> str:
        tokens: list[str] = [token]
        for stage in self._stages:
            tokens = [out for each in tokens for out in stage.push(each)]
        return "".join(tokens)

    def finish(self) -> str:
        tokens: list[str] = []
        for stage in self._stages:
            tokens = [out for each in tokens for out in stage.push(each)]
            tokens.extend(stage.finish())
        return "".join(tokens)

    def copy(self) -> DecodePipeline:
        return DecodePipeline([copy.copy(stage) for stage in self._stages])


def build_pipeline(decoder: dict[str, Any] | None, cleanup: bool = False) -> DecodePipeline:
    """The pipeline of a `decoder` entry of tokenizer.json, in its initial state; copy it for each stream.

    `cleanup` adds transformers' clean_up_tokenization, which works on the whole text. Raises Unsupported for a decoder
    that cannot be streamed.
    """
    parts = [] if decoder is None else decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    stages: list[Stage] = []
    fused = False
    for part in parts:
        stage = _fused_stage(part) if fused else _stage(part)
        fused = fused or part["type"] in ("ByteLevel", "Fuse")
        if stage is not None:
            stages.append(stage)
    if not parts:
        stages.append(JoinWithSpaces())
    if cleanup:
        stages.extend(ReplaceFused(pattern, content) for pattern, content in CLEANUP)
    return DecodePipeline(stages or [PerToken(decoders.Fuse())])


# transformers, PreTrainedTokenizerBase.clean_up_tokenization: in this order
CLEANUP = (
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"),
    (" n't", "n't"), (" 'm", "'m"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"),
)  # fmt: skip


def _stage(part: dict[str, Any]) -> Stage | None:
    match part["type"]:
        case "ByteLevel":
            return BytesOfTokens()
        case "ByteFallback":
            return ByteRuns()
        case "Fuse":
            return None
        case "BPEDecoder":
            return LastTokenDiffers(part["suffix"])
        case "Metaspace":
            scheme = part.get("prepend_scheme", "always")
            return PerToken(decoders.Metaspace(part["replacement"], scheme, part.get("split", True)))
        case "WordPiece":
            return PerToken(decoders.WordPiece(part["prefix"], part["cleanup"]))
        case "Strip":
            return PerToken(decoders.Strip(part["content"], part["start"], part["stop"]))
        case "Replace" if "String" in part["pattern"]:
            return PerToken(decoders.Replace(part["pattern"]["String"], part["content"]))
    raise _unsupported(part)


def _fused_stage(part: dict[str, Any]) -> Stage | None:
    match part["type"]:
        case "Fuse":
            return None
        case "Strip":
            return StripFused(part["content"], part["start"], part["stop"])
        case "Replace" if part["pattern"].get("String"):
            return ReplaceFused(part["pattern"]["String"], part["content"])
    raise _unsupported(part)


def _unsupported(part: dict[str, Any]) -> Unsupported:
    return Unsupported(
        f"the tokenizer's decoder {part['type']} cannot be streamed in this place; supported are ByteLevel, "
        "ByteFallback, Fuse, Metaspace, WordPiece, BPEDecoder, and Strip or Replace with a plain string"
    )
