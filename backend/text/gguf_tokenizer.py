"""The tokenizer in a GGUF file, as one of the library `tokenizers`.

    tokenizer.ggml.model         which kind: KINDS
    tokenizer.ggml.pre           of BPE with merges: how text is cut into words, by the name of a model (PRE_TOKENIZERS)
    tokenizer.ggml.token_type    of each token: 1 normal, 2 unknown, 3 control, 4 defined by the user, 5 unused, 6 a byte
    tokenizer.ggml.add_bos_token, add_eos_token, add_space_prefix, ..._token_id

Sources: llama.cpp's src/llama-vocab.cpp, and the original tokenizer.json where the file holds less (NFC before Qwen2's words,
spaces that belong to a mask). Transformers can convert such files too, but it takes seconds to be imported, trusts the file, and
cuts words as GPT-2 does if it does not know the name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from backend.api.checkpoint.gguf import AGAIN, GgufHeader
from backend.api.checkpoint.model_files import shown
from backend.api.errors import ConfigError
from backend.text.gguf_sentencepiece import characters_bpe, sentencepiece, unigram
from backend.text.gguf_vocabulary import (
    PREFIX,
    Vocabulary,
    ids_of,
    is_special,
    is_whole,
    library_errors,
    merges_of,
    named_tokens,
    read_vocabulary,
)
from backend.text.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer

_log = logging.getLogger("everbatch.text")
MAX_ADDED_TOKENS = 20_000
_MASKS = {"modern-bert": "[MASK]"} | dict.fromkeys(
    ("jina-v2-de", "jina-v2-es", "jina-v2-code", "roberta-bpe"), "<mask>"
)
MAX_WORD = 100  # characters of a word that WordPiece looks for; a longer one is unknown


class Kind(NamedTuple):
    build: Callable[
        [GgufHeader, Vocabulary], tuple[Tokenizer, bool]
    ]  # and whether a text begins with bos, unless the file says so
    adds_last: bool = False  # unless the file says so
    ends: tuple[tuple[str, ...], ...] = (("bos_token",), ("eos_token",))  # the first one that is named
    keys: tuple[str, str] = ("add_bos_token", "add_eos_token")


def build_tokenizer(header: GgufHeader) -> tuple[Tokenizer, dict[str, Any]]:
    """Returns (the tokenizer, what a tokenizer_config.json would say). Raises ConfigError."""
    name = header.need(PREFIX + "model", str)
    if name not in KINDS:
        raise ConfigError(
            f"{header.name}: {PREFIX}model {shown(name)} is not supported; supported are {', '.join(KINDS)}: use a file with "
            f"such a tokenizer"
        )
    kind, tokens = KINDS[name], read_vocabulary(header)
    with library_errors(f"{header.name}: its tokenizer cannot be built; {AGAIN}"):
        tokenizer, adds_bos = kind.build(header, tokens)
        _add_tokens(header, tokenizer, tokens)
        named = named_tokens(header, tokens)
        _add_around(header, tokenizer, named, kind, adds_bos)
    return tokenizer, named


def _bpe(header: GgufHeader, tokens: Vocabulary) -> tuple[Tokenizer, bool]:
    """BPE with the file's merges, of bytes or of characters."""
    row = _pre_tokenizer(header)
    if not row.is_in_bytes:
        return characters_bpe(tokens, merges_of(header), has_prefix=False), row.adds_bos
    tokenizer = Tokenizer(models.BPE(tokens.vocab, merges_of(header), ignore_merges=row.ignores_merges))
    if row.is_nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *_splits(row.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            *_splits(row.byte_patterns),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, row.adds_bos


def _splits(patterns: tuple[str, ...]) -> list[pre_tokenizers.PreTokenizer]:
    return [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]


def _pre_tokenizer(header: GgufHeader) -> PreTokenizer:
    """The row of the file's name for its words. Raises ConfigError for a name that is not known."""
    if header.settings.get(PREFIX + "model") == "gemma4":
        return PRE_TOKENIZERS["gemma4"]
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
    return PRE_TOKENIZERS[name]


def _word_piece(header: GgufHeader, tokens: Vocabulary) -> tuple[Tokenizer, bool]:
    """BERT's: the longest tokens from the left of each word, which is unknown above MAX_WORD characters (in llama.cpp it is not).

    In BERT's own file ## marks the tokens inside a word; llama.cpp's file marks the others with ▁.
    """
    texts = [
        text if is_special(kind) else text[1:] if text.startswith("▁") else "##" + text
        for text, kind in zip(tokens.texts, tokens.kinds)
    ]
    lowercase = header.get(PREFIX + "normalizer.lowercase", bool) is not False
    strip_accents = header.get(PREFIX + "normalizer.strip_accents", bool)
    unknown = named_tokens(header, tokens).get("unk_token", "[UNK]")
    tokenizer = Tokenizer(
        models.WordPiece(
            ids_of(texts), unk_token=unknown, max_input_chars_per_word=MAX_WORD, continuing_subword_prefix="##"
        )
    )
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=True, strip_accents=strip_accents, lowercase=lowercase
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece("##", cleanup=True)
    return tokenizer, True


# llama.cpp knows others: rwkv and plamo2, whose rules the library `tokenizers` does not have, hybriddna, and whitespace.
KINDS = {
    "gpt2": Kind(_bpe),
    "gemma4": Kind(_bpe),
    "llama": Kind(sentencepiece),
    "t5": Kind(unigram, adds_last=True),
    "bert": Kind(_word_piece, True, (("cls_token", "bos_token"), ("sep_token",)), ("add_bos_token", "add_sep_token")),
}


def _add_tokens(header: GgufHeader, tokenizer: Tokenizer, tokens: Vocabulary) -> None:
    """Tokens that are found in a text as a whole: special ones, and those of the user."""
    found = [(text, kind) for text, kind in zip(tokens.texts, tokens.kinds) if text and is_whole(kind)]
    if len(found) > MAX_ADDED_TOKENS:
        raise ConfigError(
            f"{header.name} has {len(found)} special tokens, at most {MAX_ADDED_TOKENS} can be added; convert the model again"
        )
    taken = [(text, is_special(kind), *_spaces_of(header, text, is_special(kind))) for text, kind in found]
    tokenizer.add_tokens(
        [
            AddedToken(text, special=special, normalized=False, lstrip=left, rstrip=right)
            for text, special, left, right in taken
        ]
    )


def _spaces_of(header: GgufHeader, text: str, is_special: bool) -> tuple[bool, bool]:
    """(spaces in front belong to a token, spaces behind do): from its family's tokenizer.json, for the file does not say."""
    family, model = (header.settings.get(key) for key in ("general.architecture", PREFIX + "model"))
    mask = "<mask>" if model == "t5" else _MASKS.get(str(header.settings.get(PREFIX + "pre")))
    is_phi3 = (family, model) == ("phi3", "llama")
    return text == mask, is_phi3 and (text == "</s>" or (is_special and text not in ("<unk>", "<s>", "<|endoftext|>")))


def _add_around(header: GgufHeader, tokenizer: Tokenizer, named: dict[str, str], kind: Kind, adds_bos: bool) -> None:
    """The special tokens that are put before and behind a text, unless the file says otherwise."""
    first, last = (next((named[name] for name in names if name in named), None) for names in kind.ends)
    adds = [
        by_default if (given := header.get(PREFIX + key, bool)) is None else given
        for key, by_default in zip(kind.keys, (adds_bos, kind.adds_last))
    ]
    before, after = [first] if first and adds[0] else [], [last] if last and adds[1] else []
    if not before and not after:
        return
    around = [(text, tokenizer.token_to_id(text)) for text in dict.fromkeys([*before, *after])]
    again = [] if after else before
    tokenizer.post_processor = processors.TemplateProcessing(
        [*before, "$A", *after], [*before, "$A", *after, *again, "$B", *after], around
    )
