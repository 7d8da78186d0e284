"""Meta's tokenizer.model as the tokenizer of a Hugging Face checkpoint.

Llama 1, 2 and Mistral: a SentencePiece model, a protobuf (google/sentencepiece, src/sentencepiece_model.proto). Llama 3: lines
of a token in base64, a space and its rank, for tiktoken (meta-llama/llama-models, models/llama3/tokenizer.py); its 256 special
tokens follow, whose texts are in that program.
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from backend.api.checkpoint.gguf import GgufHeader
from backend.api.checkpoint.model_files import read_bytes
from backend.api.errors import ConfigError
from backend.text.gguf_tokenizer import build_tokenizer
from backend.text.gguf_vocabulary import PREFIX
from backend.text.tokenizer import MAX_TOKENIZER_BYTES

FILE = "tokenizer.model"
MAX_TOKENS = 1 << 20
MAX_TOKEN_BYTES = 512
CONTROL = 3
_SPECIAL = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>"),
    *("<|finetune_right_pad_id|>", "<|step_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>"),
    *("<|eot_id|>", "<|python_tag|>"),
)
SPECIAL = (*_SPECIAL, *(f"<|reserved_special_token_{n}|>" for n in range(2, 256 - len(_SPECIAL) + 2)))
AGAIN = "fetch it again"


def read_tokenizer(directory: Path) -> tuple[Tokenizer, dict[str, Any], list[int]] | None:
    """The tokenizer, what a tokenizer_config.json says, and the ids that end a text; None without a file. Raises ConfigError."""
    found = _read(directory)
    if found is None:
        return None
    named, ends = found
    tokenizer, texts = build_tokenizer(GgufHeader(directory / FILE, named, {}))
    return tokenizer, texts, ends


def gguf_settings(directory: Path) -> dict[str, Any] | None:
    """The settings `tokenizer.ggml.*` of a GGUF file; None without a tokenizer.model. Raises ConfigError."""
    found = _read(directory)
    return None if found is None else found[0]


def _read(directory: Path) -> tuple[dict[str, Any], list[int]] | None:
    """The same settings, and the ids that end a text."""
    data = read_bytes(directory, FILE, MAX_TOKENIZER_BYTES)
    if data is None:
        return None
    is_ranks = data[:64].split(b"\n")[0].rpartition(b" ")[2].isdigit()
    settings, ends = _of_ranks(data) if is_ranks else _of_sentencepiece(data)
    return {PREFIX + key: value for key, value in settings.items()}, ends


def _of_ranks(data: bytes) -> tuple[dict[str, Any], list[int]]:
    tokens: list[bytes] = []
    for number, line in enumerate(data.splitlines()):
        text, _, rank = line.partition(b" ")
        try:
            token = base64.b64decode(text, validate=True)
            is_next = int(rank) == number
        except (binascii.Error, ValueError):
            is_next, token = False, b""
        if not is_next or not 1 <= len(token) <= MAX_TOKEN_BYTES or number >= MAX_TOKENS:
            raise ConfigError(f"{FILE}: line {number + 1} is no token in base64 with the rank {number}; {AGAIN}")
        tokens.append(token)
    ranks = {token: rank for rank, token in enumerate(tokens)}
    if len(ranks) != len(tokens):
        raise ConfigError(f"{FILE} holds a token twice; {AGAIN}")
    spelled = [_spelled(token) for token in tokens]
    first = len(tokens)
    settings = {
        "model": "gpt2",
        "pre": "llama-bpe",
        "tokens": [*spelled, *SPECIAL],
        "token_type": [1] * first + [CONTROL] * len(SPECIAL),
        "merges": [f"{_spelled(left)} {_spelled(right)}" for left, right in _merges(ranks)],
        "bos_token_id": first,
        "eos_token_id": first + 1,
    }
    return settings, [first + 1, first + SPECIAL.index("<|eom_id|>"), first + SPECIAL.index("<|eot_id|>")]


def _merges(ranks: dict[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """All ways to make a token of two others, in the order of the ranks of what is made."""
    for token in ranks:
        cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
        ways = [(left, right) for left, right in cuts if left in ranks and right in ranks]
        yield from sorted(ways, key=lambda way: (ranks[way[0]], ranks[way[1]]))


def _byte_texts() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies, as in GPT-2."""
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(others)) for byte in range(256)]


_BYTES = _byte_texts()


def _spelled(token: bytes) -> str:
    return "".join(_BYTES[byte] for byte in token)


def _of_sentencepiece(data: bytes) -> tuple[dict[str, Any], list[int]]:
    """ModelProto: pieces = 1 {piece = 1, score = 2, type = 3}, trainer_spec = 2 {unk_id = 40, bos_id = 41, eos_id = 42, ...},
    normalizer_spec = 3 {add_dummy_prefix = 3}. The types have the numbers of GGUF's.
    """
    texts: list[str] = []
    scores: list[float] = []
    kinds: list[int] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    try:
        for number, value in _fields(data):
            if number == 1:
                piece = dict(_fields(value))
                texts.append(piece[1].decode("utf-8"))
                scores.append(struct.unpack("<f", piece[2])[0])
                kinds.append(piece.get(3, 1))
            elif number in (2, 3):
                (trainer if number == 2 else normalizer).update(_fields(value))
    except (ValueError, KeyError, IndexError, struct.error, TypeError, AttributeError):
        raise ConfigError(f"{FILE} is neither a SentencePiece model nor tiktoken's ranks; {AGAIN}") from None
    if not 1 <= len(texts) <= MAX_TOKENS:
        raise ConfigError(f"{FILE} holds {len(texts)} tokens, 1 to {MAX_TOKENS} are possible; {AGAIN}")
    if trainer.get(3, 1) != 2:
        raise ConfigError(
            f"{FILE} is no BPE model of SentencePiece, as Llama's and Mistral's are; add a tokenizer.json"
        )
    eos = trainer.get(42, 2)
    settings = {
        "model": "llama",
        "tokens": texts,
        "scores": scores,
        "token_type": kinds,
        "unknown_token_id": trainer.get(40, 0),
        "bos_token_id": trainer.get(41, 1),
        "eos_token_id": eos,
        "add_bos_token": True,
        "add_space_prefix": bool(normalizer.get(3, 1)),
    }
    return settings, [eos]


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of each field of a protobuf message: ints, bytes of a length, or 4 or 8 bytes. Raises ValueError."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        length = {1: 8, 5: 4}.get(kind)
        if kind == 2:
            length, at = _varint(data, at)
        if length is None or at + length > len(data):
            raise ValueError("no message of protobuf")
        yield key >> 3, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError("a number of more than 64 bits")
