"""DecodePipeline: a tokenizer's decoder that takes one token at a time.

The library `tokenizers` decodes a whole list: each decoder of its chain maps a list of strings to a list of strings. Each
stage here does the same with a stream of strings, and emits a string as soon as nothing that follows can change it. So what
has been emitted is always a prefix of what the library would return, whatever comes next. `finish` emits the rest. The stages
are:

    ByteLevel      decodes bytes as UTF-8, and holds back an incomplete character (at most 3 bytes)
    ByteFallback   turns a run of <0xXX> tokens into one string if all of it is UTF-8, else into one U+FFFD for each byte;
                   holds back the run, because a later byte can invalidate characters that were complete
    PerToken       is used for Replace, Strip, Metaspace and WordPiece, which treat the first token differently from all
                   others; holds back nothing
    BPEDecoder     drops the suffix of the last token, and replaces that of others by a space; holds back one token
    behind a Fuse  Strip and Replace see one string, and hold back what may still be stripped or matched

The state of a stage is small, and a stage can be copied with copy.copy. The rules are those of the decoders of the Hugging
Face library `tokenizers` (Apache 2.0), with which the tests compare every token.
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
    """The byte of each printable character that stands for one in GPT-2's vocabulary (openai/gpt-2, encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_BYTE_OF = _byte_alphabet()
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f+][0-9A-Fa-f])>")


class Stage:
    """One decoder of the chain."""

    forgets = True  # True if its state depends on the last few tokens only (see IncrementalDetokenizer)

    @property
    def holds(self) -> bool:
        """True if something has been taken in and not yet emitted."""
        raise NotImplementedError

    def push(self, token: str) -> Iterable[str]:
        """Take in one string, and return the strings that are final now."""
        raise NotImplementedError

    def finish(self) -> Iterable[str]:
        """The stream is over: return what was held back."""
        return ()

    def drop_incomplete(self) -> None:
        """Forget the bytes of a character whose end has not come."""


class PerToken(Stage):
    """A decoder that maps each token by itself, though perhaps the first one differently. It asks the library once per token."""

    holds = False

    def __init__(self, decoder: decoders.Decoder) -> None:
        self._decoder = decoder
        self._first: bool = True
        self._known: dict[str, str] = {}  # All copies share it.

    def push(self, token: str) -> Iterable[str]:
        if self._first:
            self._first = False
            return (self._decoder.decode([token]),)
        text = self._known.get(token)
        if text is None:
            text = self._known[token] = self._decoder.decode(["", token])
        return (text,)


class JoinWithSpaces(Stage):
    """Does what the library does for a tokenizer without a decoder: it puts a space between the tokens."""

    holds = False

    def __init__(self) -> None:
        self._separator = ""

    def push(self, token: str) -> Iterable[str]:
        separator, self._separator = self._separator, " "
        return (separator + token,)


class BytesOfTokens(Stage):
    """The decoder ByteLevel."""

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

    def drop_incomplete(self) -> None:
        self._pending = b""

    def finish(self) -> Iterable[str]:
        text = self._pending.decode("utf-8", "replace")
        self._pending = b""
        return (text,)


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a byte-level token. A token with a character outside the alphabet, such as an added one, is plain text."""
    if all(char in _BYTE_OF for char in token):
        return bytes(_BYTE_OF[char] for char in token)
    return token.encode("utf-8")


class ByteRuns(Stage):
    """The decoder ByteFallback."""

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

    def drop_incomplete(self) -> None:
        del self._run[codecs.utf_8_decode(self._run, "replace", False)[1] :]

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
    """The decoder BPEDecoder."""

    forgets = False

    def __init__(self, suffix: str) -> None:
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
    """Strips the whole text of a character, at most `start` times in front and at most `stop` times at the end."""

    def __init__(self, char: str, start: int, stop: int) -> None:
        self._char, self._start, self._stop = char, start, stop
        self._tail = ""
        self.forgets = stop == 0 and start == 1  # The first token with text then settles what is stripped.

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
    """Replaces a pattern in the whole text. It holds back the longest end of the text with which the pattern begins."""

    forgets = False

    def __init__(self, pattern: str, content: str) -> None:
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
    """The stages of one stream. `push` returns text that is final, and `finish` what was held back."""

    def __init__(self, stages: list[Stage]) -> None:
        self._stages = stages

    @property
    def holds(self) -> bool:
        return any(stage.holds for stage in self._stages)

    @property
    def forgets(self) -> bool:
        """True if every stage forgets. ByteLevel must be the first stage, because IncrementalDetokenizer judges the bytes of
        tokens as the vocabulary has them.
        """
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

    def drop_incomplete(self) -> None:
        for stage in self._stages:
            stage.drop_incomplete()

    def copy(self) -> DecodePipeline:
        return DecodePipeline([copy.copy(stage) for stage in self._stages])


def build_pipeline(decoder: dict[str, Any] | None, cleanup: bool = False) -> DecodePipeline:
    """Build the pipeline of a `decoder` entry of tokenizer.json, in its initial state. Each stream takes a copy of it.

    `cleanup` adds transformers' clean_up_tokenization, which works with the whole text. Raises Unsupported for a decoder that
    cannot be streamed.
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


# These are the replacements of PreTrainedTokenizerBase.clean_up_tokenization in transformers, in its order.
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
