"""The tokenizer in a GGUF file, as one of the library `tokenizers`.

    tokenizer.ggml.model         gpt2: byte-level BPE with merges; llama: SentencePiece's BPE, whose merges follow from the scores
    tokenizer.ggml.pre           of gpt2: how text is cut into words, by the name of a model (PRE_TOKENIZERS)
    tokenizer.ggml.token_type    of each token: 1 normal, 2 unknown, 3 control, 4 defined by the user, 5 unused, 6 a byte
    tokenizer.ggml.add_bos_token, add_eos_token, add_space_prefix, ..._token_id

Sources: llama.cpp's src/llama-vocab.cpp, and the original tokenizer.json where the file holds less (NFC before Qwen2's words).
Transformers can convert such files too, but it takes seconds to be imported, trusts the file, and cuts words as GPT-2 does if it
does not know the name.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from backend.api.checkpoint.gguf import AGAIN, CONTROL, GgufHeader, TokenId
from backend.api.checkpoint.model_files import shown
from backend.api.errors import ConfigError

PREFIX = "tokenizer.ggml."
_log = logging.getLogger("everbatch.text")
MAX_ADDED_TOKENS = 20_000
MAX_PIECE = 512  # characters of a token of SentencePiece's: all ways to cut it in two are looked at
UNKNOWN, USER_DEFINED = 2, 4
_NAMED = dict(bos="bos_token", eos="eos_token", unknown="unk_token", padding="pad_token")

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


class PreTokenizer(NamedTuple):
    """How text is cut into words before they are encoded: by each pattern in turn, matches apart from what is between them."""

    patterns: tuple[str, ...]
    ignores_merges: bool = False  # a word that is a token needs no merges
    adds_bos: bool = False  # if the file does not set it
    is_nfc: bool = False


_LLAMA3_WORDS = PreTokenizer((_LLAMA3,), ignores_merges=True, adds_bos=True)
_DIGIT_WORDS = PreTokenizer((r"\p{N}", _GPT2))
PRE_TOKENIZERS = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": PreTokenizer((_GPT2,)),
    "llama-bpe": _LLAMA3_WORDS,
    "llama3": _LLAMA3_WORDS,
    "llama-v3": _LLAMA3_WORDS,
    "falcon3": _LLAMA3_WORDS,
    "smaug-bpe": PreTokenizer((_LLAMA3,)),
    "qwen2": PreTokenizer((_QWEN2,), is_nfc=True),
    "deepseek-r1-qwen": PreTokenizer((_QWEN2,)),
    "tekken": PreTokenizer((_TEKKEN,), ignores_merges=True, adds_bos=True),
    "smollm": _DIGIT_WORDS,
    "starcoder": _DIGIT_WORDS,
    "refact": _DIGIT_WORDS,
}


def build_tokenizer(header: GgufHeader) -> tuple[Tokenizer, dict[str, Any]]:
    """Returns (the tokenizer, what a tokenizer_config.json would say). Raises ConfigError."""
    kind = header.need(PREFIX + "model", str)
    if kind not in ("gpt2", "llama"):
        raise ConfigError(
            f"{header.name}: {PREFIX}model {shown(kind)} is not supported; supported are gpt2 and llama: use a file with such a "
            f"tokenizer"
        )
    tokens = _tokens(header)
    with library_errors(f"{header.name}: its tokenizer cannot be built; {AGAIN}"):
        tokenizer, adds_bos = _byte_level(header, tokens) if kind == "gpt2" else _sentencepiece(header, tokens)
        _add_tokens(header, tokenizer, tokens)
        named = {name: tokens.texts[token_id] for name, token_id in _named_ids(header, tokens).items()}
        _add_around(header, tokenizer, named, adds_bos)
    return tokenizer, named


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


class _Tokens(NamedTuple):
    texts: list[str]  # by id
    kinds: list[int]
    vocab: dict[str, int]  # text -> id; of two tokens with one text the first


def _tokens(header: GgufHeader) -> _Tokens:
    texts = header.need(PREFIX + "tokens", list[str])
    kinds = header.get(PREFIX + "token_type", list[int])
    if kinds is None:
        kinds = [1] * len(texts)
    if len(kinds) != len(texts):
        raise ConfigError(
            f"{header.name}: {PREFIX}token_type has {len(kinds)} entries for {len(texts)} tokens; {AGAIN}"
        )
    vocab: dict[str, int] = {}
    for index, text in enumerate(texts):
        vocab.setdefault(text, index)
    return _Tokens(texts, kinds, vocab)


def _byte_level(header: GgufHeader, tokens: _Tokens) -> tuple[Tokenizer, bool]:
    name = header.get(PREFIX + "pre", str)
    if not name:
        _log.warning(
            "%s has no %spre, which says how text is cut into words: the default is taken, and prompts may become other tokens "
            "than in training; convert the model again, or serve its Hugging Face checkpoint",
            *(header.name, PREFIX),
        )
        name = "default"
    if name not in PRE_TOKENIZERS:
        raise ConfigError(
            f"{header.name}: {PREFIX}pre {shown(name)} is not supported; supported are {', '.join(PRE_TOKENIZERS)}: serve the "
            f"Hugging Face checkpoint of the model instead"
        )
    pre = PRE_TOKENIZERS[name]
    merges = []
    for index, text in enumerate(header.need(PREFIX + "merges", list[str])):
        left, space, right = text.partition(" ")
        if not space or " " in right:
            raise ConfigError(
                f"{header.name}: {PREFIX}merges[{index}] is {shown(text)}, two tokens are needed; {AGAIN}"
            )
        merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(tokens.vocab, merges, ignore_merges=pre.ignores_merges))
    if pre.is_nfc:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre.adds_bos


def _sentencepiece(header: GgufHeader, tokens: _Tokens) -> tuple[Tokenizer, bool]:
    """BPE with byte fallback. A space is put in front of the text, and behind each special token, as in Llama 2's first form."""
    unknown = [tokens.texts[index] for index, kind in enumerate(tokens.kinds) if kind == UNKNOWN]
    model = models.BPE(
        tokens.vocab,
        _merges(header, tokens),
        unk_token=unknown[0] if unknown else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    has_prefix = header.get(PREFIX + "add_space_prefix", bool) is not False
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *spaces] if has_prefix else spaces)
    steps: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_prefix else steps)
    return tokenizer, True


def _merges(header: GgufHeader, tokens: _Tokens) -> list[tuple[str, str]]:
    """All pairs of tokens that are a token together, that with the highest score first.

    SentencePiece merges whatever gives the token of the highest score. Of equal scores the longer left half goes first, as in
    transformers' generate_merges.
    """
    scores = header.need(PREFIX + "scores", list[float])
    if len(scores) != len(tokens.texts):
        raise ConfigError(
            f"{header.name}: {PREFIX}scores has {len(scores)} entries for {len(tokens.texts)} tokens; {AGAIN}"
        )
    normal = {text: index for text, index in tokens.vocab.items() if tokens.kinds[index] == 1}
    if long := next((text for text in normal if len(text) > MAX_PIECE), None):
        raise ConfigError(f"{header.name}: the token {shown(long)} has more than {MAX_PIECE} characters; {AGAIN}")
    found = [
        (-scores[index], -cut, text)
        for text, index in normal.items()
        for cut in range(1, len(text))
        if text[:cut] in normal and text[cut:] in normal
    ]
    found.sort(key=lambda merge: merge[:2])
    return [(text[:-cut], text[-cut:]) for _, cut, text in found]


def _add_tokens(header: GgufHeader, tokenizer: Tokenizer, tokens: _Tokens) -> None:
    """Tokens that are found in a text as a whole: special ones, and those of the user."""
    added = [
        AddedToken(text, special=kind != USER_DEFINED, normalized=False)
        for text, kind in zip(tokens.texts, tokens.kinds)
        if kind in (UNKNOWN, CONTROL, USER_DEFINED) and text
    ]
    if len(added) > MAX_ADDED_TOKENS:
        raise ConfigError(
            f"{header.name} has {len(added)} special tokens, at most {MAX_ADDED_TOKENS} can be added; convert the model again"
        )
    tokenizer.add_tokens(added)


def _named_ids(header: GgufHeader, tokens: _Tokens) -> dict[str, int]:
    """bos_token, ... -> ids. Raises ConfigError for an id that is none."""
    ids = {}
    for key, name in _NAMED.items():
        token_id = header.get(f"{PREFIX}{key}_token_id", TokenId)
        if token_id is None:
            continue
        if token_id >= len(tokens.texts):
            raise ConfigError(
                f"{header.name}: {PREFIX}{key}_token_id is {token_id}, there are {len(tokens.texts)} tokens; {AGAIN}"
            )
        ids[name] = token_id
    return ids


def _add_around(header: GgufHeader, tokenizer: Tokenizer, named: dict[str, str], adds_bos: bool) -> None:
    """The special tokens that are put before and behind a text."""
    given = header.get(PREFIX + "add_bos_token", bool)
    has_bos = "bos_token" in named and (adds_bos if given is None else given)
    has_eos = "eos_token" in named and header.get(PREFIX + "add_eos_token", bool) is True
    before, after = [named["bos_token"]] if has_bos else [], [named["eos_token"]] if has_eos else []
    if not before and not after:
        return
    around = [(text, tokenizer.token_to_id(text)) for text in dict.fromkeys([*before, *after])]
    tokenizer.post_processor = processors.TemplateProcessing(
        [*before, "$A", *after], [*before, "$A", *after, *before, "$B", *after], around
    )
