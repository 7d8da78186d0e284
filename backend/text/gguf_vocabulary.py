"""The tokens of a GGUF file, as its settings list them, and what several kinds of tokenizers need to know about them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite
from typing import Any, NamedTuple

from backend.api.checkpoint.gguf import AGAIN, CONTROL, USER_DEFINED, GgufHeader, TokenId
from backend.api.checkpoint.model_files import shown
from backend.api.errors import ConfigError

PREFIX = "tokenizer.ggml."
MAX_PIECE = 512  # characters of a token: BPE looks at all ways to cut it in two, unigram for it at each place of a text
NORMAL, UNKNOWN = 1, 2  # tokenizer.ggml.token_type
_NAMED = dict(
    bos="bos_token", eos="eos_token", unknown="unk_token", padding="pad_token", cls="cls_token", seperator="sep_token",
    mask="mask_token",
)  # fmt: skip
_ALWAYS = ("bos", "eos", "unknown", "padding")


class Vocabulary(NamedTuple):
    texts: list[str]  # by id
    kinds: list[int]
    vocab: dict[str, int]  # as ids_of has it

    def first(self, kind: int) -> str | None:
        """The text of the first token of a kind."""
        return next((text for text, own in zip(self.texts, self.kinds) if own == kind), None)


@contextmanager
def library_errors(message: str) -> Iterator[None]:
    """Raise ConfigError(message) for whatever the library raises."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # The library raises plain Exception, whatever is wrong with what it is given.
        raise ConfigError(message) from error
    except BaseException as error:  # A panic of the library is no Exception, and its class cannot be imported.
        if type(error).__name__ != "PanicException":
            raise
        raise ConfigError(message) from error


def read_vocabulary(header: GgufHeader) -> Vocabulary:
    """The tokens of a file. In SentencePiece's those of the user have spaces, where old files have ▁. Raises ConfigError."""
    texts = header.need(PREFIX + "tokens", list[str])
    kinds = _one_each(header, "token_type", header.get(PREFIX + "token_type", list[int]), len(texts))
    if kinds is None:
        kinds = [NORMAL] * len(texts)
    if header.settings.get(PREFIX + "model") == "llama":
        texts = [text.replace("▁", " ") if kind == USER_DEFINED else text for text, kind in zip(texts, kinds)]
    return Vocabulary(texts, kinds, ids_of(texts))


def ids_of(texts: list[str]) -> dict[str, int]:
    """Text -> id; of two tokens with one text the first."""
    vocab: dict[str, int] = {}
    for index, text in enumerate(texts):
        vocab.setdefault(text, index)
    return vocab


def scores_of(header: GgufHeader, tokens: Vocabulary) -> list[float]:
    """A finite number for each of SentencePiece's tokens. Raises ConfigError, also for a token that is too long."""
    if long := next((text for text in tokens.texts if len(text) > MAX_PIECE), None):
        raise ConfigError(f"{header.name}: the token {shown(long)} has more than {MAX_PIECE} characters; {AGAIN}")
    scores = header.need(PREFIX + "scores", list[float])
    _one_each(header, "scores", scores, len(tokens.texts))
    if (wrong := next((index for index, score in enumerate(scores) if not isfinite(score)), None)) is not None:
        raise ConfigError(
            f"{header.name}: {PREFIX}scores[{wrong}] is {scores[wrong]}, a finite number is needed; {AGAIN}"
        )
    return scores


def merges_of(header: GgufHeader) -> list[tuple[str, str]]:
    """The merges of BPE, the first one first. Raises ConfigError."""
    merges = []
    for index, text in enumerate(header.need(PREFIX + "merges", list[str])):
        left, space, right = text.partition(" ")
        if not space or " " in right:
            raise ConfigError(
                f"{header.name}: {PREFIX}merges[{index}] is {shown(text)}, two tokens are needed; {AGAIN}"
            )
        merges.append((left, right))
    return merges


def named_tokens(header: GgufHeader, tokens: Vocabulary) -> dict[str, str]:
    """bos_token, ... -> their texts. Raises ConfigError for an id that is none.

    Whatever bos, eos, unknown and padding name becomes special, as in transformers; others are named if they are special.
    """
    named = {}
    for key, name in _NAMED.items():
        token_id = header.get(f"{PREFIX}{key}_token_id", TokenId)
        if token_id is None:
            continue
        if token_id >= len(tokens.texts):
            raise ConfigError(
                f"{header.name}: {PREFIX}{key}_token_id is {token_id}, there are {len(tokens.texts)} tokens; {AGAIN}"
            )
        if key in _ALWAYS or is_special(tokens.kinds[token_id]):
            named[name] = tokens.texts[token_id]
    return named


def is_special(kind: int) -> bool:
    """True for tokens that stand for no text."""
    return kind in (UNKNOWN, CONTROL)


def is_whole(kind: int) -> bool:
    """True for tokens that are found in a text as they are, before anything else is done with it."""
    return kind in (UNKNOWN, CONTROL, USER_DEFINED)


def _one_each(header: GgufHeader, key: str, values: list[int] | list[float] | None, count: int) -> Any:
    """`values`. Raises ConfigError when there is not one for each of `count` tokens."""
    if values is not None and len(values) != count:
        raise ConfigError(f"{header.name}: {PREFIX}{key} has {len(values)} entries for {count} tokens; {AGAIN}")
    return values
