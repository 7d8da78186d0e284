"""Vocabulary: what each token stands for, in bytes, as grammars need it.

It is made of TokenizerInfo, the materials that TensorRT-LLM's GuidedDecodingConfig names: the vocabulary's entries in the order
of their ids, the text of tokenizer.json, the ids that end an output. They may be written to a file and read from it; without the
text of tokenizer.json the entries alone must do, and say themselves how bytes are written in them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

from backend.api.errors import ConfigError
from backend.text.decoding import byte_level_bytes, fallback_byte
from backend.text.tokenizer import Tokenizer

MAX_INFO_BYTES = 128 << 20
_SPACE = "\u2581"  # how SentencePiece writes a space
_SPECIAL = re.compile(r"<\|.*\|>|</?s>|<unk>|<pad>|<mask>|\[(UNK|CLS|SEP|PAD|MASK)\]")


class TokenizerInfo(Struct, frozen=True, forbid_unknown_fields=True):
    """The materials. `encoded_vocab`: the entries as the tokenizer writes them, sorted by id."""

    encoded_vocab: list[str]
    tokenizer_str: str | None = None
    stop_token_ids: list[int] | None = None

    @classmethod
    def of_tokenizer(cls, tokenizer: Tokenizer) -> TokenizerInfo:
        entries = [tokenizer.visible_token(i, skip_special_tokens=False) or "" for i in range(tokenizer.num_ids)]
        return cls(entries, tokenizer.to_json(), list(tokenizer.eos_ids))

    @classmethod
    def read(cls, path: str | Path) -> TokenizerInfo:
        """Raises ConfigError for a file that is not there, or holds something else."""
        path = Path(path)
        try:
            if not path.is_file() or path.stat().st_size > MAX_INFO_BYTES:
                raise ConfigError(
                    f"guided.tokenizer_info {path.name} is no file of at most {MAX_INFO_BYTES >> 20} MiB; write it anew"
                )
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigError(f"guided.tokenizer_info {path.name} cannot be read: {error}; write it anew") from None

    def write(self, path: str | Path) -> None:
        Path(path).write_bytes(msgspec.json.encode(self))


class Vocabulary(NamedTuple):
    tokens: list[bytes]  # by id; of special tokens their names
    special_ids: frozenset[int]  # no grammar's text ever means them
    stop_ids: tuple[int, ...]
    size: int  # number of logits of the model, which may exceed the number of tokens

    @classmethod
    def of(cls, info: TokenizerInfo, size: int) -> Vocabulary:
        """`size`: of the model's vocabulary. Raises ConfigError when there are more entries, or an end id beyond it."""
        entries = info.encoded_vocab
        if not entries or len(entries) > size:
            raise ConfigError(
                f"the vocabulary for guided decoding has {len(entries)} entries, the model {size} tokens; give that of the model"
            )
        added = _added_tokens(info.tokenizer_str)
        special = {i for i, token in added.items() if token["special"]}
        if info.tokenizer_str is None:
            special = {i for i, entry in enumerate(entries) if _SPECIAL.fullmatch(entry)}
        stop_ids = tuple(info.stop_token_ids or ())
        if any(not 0 <= i < size for i in stop_ids):
            raise ConfigError(
                f"the end ids {list(stop_ids)} for guided decoding are not all below {size}; correct them"
            )
        style = _style(entries, info.tokenizer_str)
        tokens = [
            entry.encode() if i in added or i in special else _token_bytes(entry, style)
            for i, entry in enumerate(entries)
        ]
        unused = frozenset(i for i, token in enumerate(tokens) if not token)
        return cls(tokens, frozenset(special) | frozenset(stop_ids) | unused, stop_ids, size)

    @property
    def special_texts(self) -> dict[str, int]:
        """The ids of special tokens that a guide may ask for, by their names. Those that end an output are not among them."""
        ids = sorted(self.special_ids - frozenset(self.stop_ids))
        named = {self.tokens[i].decode(errors="replace"): i for i in ids if i < len(self.tokens)}
        return {text: i for text, i in named.items() if text}

    def ending_with(self, end_ids: tuple[int, ...]) -> Vocabulary:
        """This vocabulary with other end ids. Raises ConfigError when there are none."""
        if not end_ids:
            raise ConfigError(
                "neither the model nor the tokenizer says which token ends an output; name one (eos_token_id)"
            )
        return self._replace(stop_ids=end_ids, special_ids=self.special_ids | frozenset(end_ids))


def _added_tokens(tokenizer_str: str | None) -> dict[int, dict[str, bool]]:
    if tokenizer_str is None:
        return {}
    try:
        added = json.loads(tokenizer_str).get("added_tokens") or []
        return {int(token["id"]): {"special": bool(token.get("special"))} for token in added}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"the tokenizer for guided decoding is no tokenizer.json ({type(error).__name__}); give that of the model"
        ) from None


def _style(entries: Sequence[str], tokenizer_str: str | None) -> str:
    """How entries write bytes: `byte_level` (GPT-2), `fallback` (SentencePiece), or as they are (`plain`)."""
    if tokenizer_str is not None:
        decoder = json.dumps(json.loads(tokenizer_str).get("decoder"))
        if '"ByteLevel"' in decoder:
            return "byte_level"
        return "fallback" if "ByteFallback" in decoder or _SPACE in decoder or "\\u2581" in decoder else "plain"
    if any(entry.startswith("\u0120") for entry in entries):
        return "byte_level"
    return "fallback" if any(entry.startswith(_SPACE) for entry in entries) else "plain"


def _token_bytes(entry: str, style: str) -> bytes:
    if style == "byte_level":
        return byte_level_bytes(entry)
    if style == "fallback":
        byte = fallback_byte(entry)
        return entry.replace(_SPACE, " ").encode() if byte is None else bytes([byte])
    return entry.encode()
