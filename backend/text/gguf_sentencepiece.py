"""SentencePiece's tokenizers out of a GGUF file: BPE whose merges follow from scores (`llama`), and unigram (`t5`).

Sources: llama.cpp's src/llama-vocab.cpp (SPM, UGM), and what transformers' converter makes of SentencePiece's files.
"""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from backend.api.checkpoint.gguf import AGAIN, GgufHeader
from backend.api.errors import ConfigError
from backend.text.charsmap import check_charsmap
from backend.text.gguf_vocabulary import NORMAL, PREFIX, UNKNOWN, Vocabulary, scores_of


def sentencepiece(header: GgufHeader, tokens: Vocabulary) -> tuple[Tokenizer, bool]:
    """BPE with byte fallback. A space is put in front of the text, and behind each special token, as in Llama 2's first form."""
    has_prefix = header.get(PREFIX + "add_space_prefix", bool) is not False
    return characters_bpe(tokens, _merges(header, tokens), has_prefix), True


def characters_bpe(tokens: Vocabulary, merges: list[tuple[str, str]], has_prefix: bool) -> Tokenizer:
    """BPE of characters: ▁ is a space, and what is no token becomes the tokens of its bytes."""
    unknown = tokens.first(UNKNOWN)
    tokenizer = Tokenizer(models.BPE(tokens.vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *spaces] if has_prefix else spaces)
    steps: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_prefix else steps)
    return tokenizer


def _merges(header: GgufHeader, tokens: Vocabulary) -> list[tuple[str, str]]:
    """All pairs of tokens that are a token together, that with the highest score first.

    SentencePiece merges whatever gives the token of the highest score. Of equal scores the longer left half goes first, as in
    transformers' generate_merges.
    """
    scores = scores_of(header, tokens)
    normal = {text: index for text, index in tokens.vocab.items() if tokens.kinds[index] == NORMAL}
    found = [
        (-scores[index], -cut, text)
        for text, index in normal.items()
        for cut in range(1, len(text))
        if text[:cut] in normal and text[cut:] in normal
    ]
    found.sort(key=lambda merge: merge[:2])
    return [(text[:-cut], text[-cut:]) for _, cut, text in found]


def unigram(header: GgufHeader, tokens: Vocabulary) -> tuple[Tokenizer, bool]:
    """The most likely tokens. White space at the ends is dropped, and runs of it are one space, unless the file says otherwise.

    So it is in the published tokenizers. llama.cpp looks for spaces only, which the usual map of characters makes of the rest.
    """
    scores = scores_of(header, tokens)
    unknown = tokens.first(UNKNOWN)
    if unknown is None:
        raise ConfigError(f"{header.name}: {PREFIX}token_type names no unknown token, one is needed; {AGAIN}")
    tokenizer = Tokenizer(models.Unigram(list(zip(tokens.texts, scores)), tokens.vocab[unknown], byte_fallback=False))
    steps: list[normalizers.Normalizer] = []
    charsmap = header.get(PREFIX + "precompiled_charsmap", list[int])
    if charsmap is not None:
        steps.append(normalizers.Precompiled(check_charsmap(charsmap, header.name)))
    if header.get(PREFIX + "remove_extra_whitespaces", bool) is not False:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(r"\s+"), " ")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    prefix = "never" if header.get(PREFIX + "add_space_prefix", bool) is False else "always"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prefix)
    tokenizer.decoder = decoders.Metaspace("▁", prefix)
    return tokenizer, False
