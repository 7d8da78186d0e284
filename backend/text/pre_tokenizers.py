r"""How byte-level BPE cuts a text into words, by the names that llama.cpp has for it (`tokenizer.ggml.pre` of a GGUF file).

Names, and which tokenizer each stands for: llama.cpp's src/llama-vocab.cpp and convert_hf_to_gguf_update.py. The expressions are
those of the published tokenizer.json, in the syntax of Oniguruma, which the library `tokenizers` uses too. llama.cpp has no
\p{Lu}, no (?i:...) and no &&, and writes some of them in other ways. Where the two differ, the row says how.
"""

from __future__ import annotations

from typing import NamedTuple


class PreTokenizer(NamedTuple):
    """How text is cut into words before they are encoded: by each pattern in turn, matches apart from what is between them."""

    patterns: tuple[str, ...] = ()
    byte_patterns: tuple[str, ...] = ()  # the same, after each byte has become a character of GPT-2's alphabet
    ignores_merges: bool = False  # a word that is a token needs no merges
    adds_bos: bool = False  # if the file does not set it
    is_nfc: bool = False
    is_in_bytes: bool = True  # False: the vocabulary is of characters as in SentencePiece, with ▁ for a space


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_ENDS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_ENDS}"


def _llama3(digits: str) -> str:
    """Words with one sign or space in front, and `digits`."""
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}|{_REST}"


def _cased(digits: str, contractions: str) -> str:
    """The same, with a cut where a lower-case letter is followed by an upper-case one. Contractions belong to their words."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    return (
        rf"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{contractions}|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{contractions}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_ENDS}"
    )


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2 = _llama3(r"\p{N}")
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_ENDS}"
)
_GPT4O = _cased(r"\p{N}{1,3}", _CONTRACTIONS + "?")
_LETTERS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_KIMI = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{_LETTERS[0]}*{_LETTERS[1]}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_LETTERS[0]}+{_LETTERS[1]}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_REST}"
)
_EXAONE_MOE = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_SEED = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_JAIS2_SPACES = "|".join(rf"\s{{{count}}}(?!\S)" for count in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2"))
_JAIS2 = _llama3(r"\p{N}{1,3}").replace(r"\s+(?!\S)|\s+", _JAIS2_SPACES + r"|\s{1}")
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_ASCII_SIGN = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_DEEPSEEK3 = rf"{_ASCII_SIGN}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+"
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
# Cased letters, of an older Unicode than the library's.
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556"
    "\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15"
    "\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe"
    "\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113"
    "\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184"
    "\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e"
    "\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _DEEPSEEK_CJK,
    r"\p{N}",  # llama.cpp keeps a run of digits together, and the vocabulary has no token of several
)
_AFMOE_SCRIPTS = (
    "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff"
    "\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_YOUTU_SCRIPTS = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    f"|[\u3105-\u312f]+|{_CJK}"
)


def _in_threes(digit: str, run: str) -> tuple[str, str]:
    r"""Runs of digits, cut in threes from their end.

    The published \d{1,3}(?=(?:\d{3})*\b) looks at the rest of a run at each cut. A million digits would take hours so.
    """
    return run, rf"\A{digit}{{1,2}}(?=(?:{digit}{{3}})+\z)|\G{digit}{{3}}"


_LLAMA3 = PreTokenizer((_llama3(r"\p{N}{1,3}"),))
_LLAMA3_WORDS = _LLAMA3._replace(ignores_merges=True, adds_bos=True)
_GPT2_WORDS = PreTokenizer((_GPT2,))
_DIGIT_WORDS = PreTokenizer((r"\p{N}", _GPT2))
_GPT4O_WORDS = PreTokenizer((_GPT4O,))
_QWEN2_WORDS = PreTokenizer((_QWEN2,))
_DEEPSEEK3_WORDS = PreTokenizer((r"\p{N}{1,3}", _CJK, rf"{_DEEPSEEK3}[\r\n]*|{_ENDS}"))
_ROWS: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": _LLAMA3_WORDS,
    "glm4 glm5": _LLAMA3._replace(ignores_merges=True),
    "smaug-bpe dbrx chatglm-bpe": _LLAMA3,
    "jais-2": PreTokenizer((_JAIS2,)),
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", _llama3(r"\p{N}+")), ignores_merges=True),
    "deepseek-llm": PreTokenizer(_DEEPSEEK_LLM),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}")),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": _DEEPSEEK3_WORDS,
    "spark2_5": PreTokenizer((r"\p{N}{1,3}", _CJK, _DEEPSEEK3 + r"|[\r\n]|\s+(?!\S)|\s+", r"\p{N}")),
    "youtu": PreTokenizer((_YOUTU_SCRIPTS, _cased(r"\p{N}", _CONTRACTIONS + "?")), ignores_merges=True),
    # Digits are looked for among the bytes, of which ² ³ ¹ ¼ ½ ¾ stand for some: words of other scripts are cut there.
    # llama.cpp looks for them in the text.
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2), (r"\p{N}+", r"[0-9][0-9][0-9]")),
    "starcoder refact smollm codeshell exaone minerva-7b mellum2": _DIGIT_WORDS,
    "command-r": _DIGIT_WORDS._replace(is_nfc=True),  # not in llama.cpp
    "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe gigachat a.x-4.0 mellum exaone4 jais "
    "trillion granite-docling": _GPT2_WORDS,
    "mpt olmo modern-bert": _GPT2_WORDS._replace(is_nfc=True),  # not in llama.cpp
    "qwen2": _QWEN2_WORDS._replace(is_nfc=True),  # not in llama.cpp
    "qwen35": PreTokenizer((_QWEN35,), is_nfc=True),  # not in llama.cpp
    "deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2": _QWEN2_WORDS,
    "ufakzeka": PreTokenizer((_QWEN2.removeprefix(_CONTRACTIONS + "|"),)),
    "laguna": PreTokenizer((r"[^\n]+|[\n]+", _QWEN2)),
    "bloom poro-chat gpt3-finnish": PreTokenizer((_BLOOM,)),
    "viking": PreTokenizer((_BLOOM, r"\p{N}")),
    "tekken": PreTokenizer((_cased(r"\p{N}", ""),), ignores_merges=True, adds_bos=True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": _GPT4O_WORDS,
    "granite-embed-multi-97m": _GPT4O_WORDS._replace(ignores_merges=True),
    # llama.cpp cuts digits in threes from the end of a number also where a letter follows.
    "tiny_aya cohere2moe": PreTokenizer((*_in_threes(r"\d", r"(?<!\d)\d++\b"), _GPT4O)),
    "kimi-k2": PreTokenizer((_KIMI,)),  # llama.cpp takes marks (\p{M}) for no part of a word
    # Other numbers beside digits (²) are words of their own here.
    "superbpe": PreTokenizer((r"\p{N}+", *_in_threes(r"\d", r"\d+"))),
    "bailingmoe bailingmoe2 llada-moe": PreTokenizer((_BAILING,)),
    "seed-coder": PreTokenizer((_SEED,)),
    "afmoe": PreTokenizer((*_in_threes(r"\p{N}", r"\p{N}+"), _AFMOE_SCRIPTS, rf"{_DEEPSEEK3}[\r\n]*|{_ENDS}")),
    "exaone-moe": PreTokenizer((_EXAONE_MOE,)),
    "chameleon": PreTokenizer(
        (
            r"<sentinel:[0-9]+>",
            r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        ),
        adds_bos=True,
    ),
    # llama.cpp cuts at line feeds, which no merge of theirs crosses.
    "gemma4 granite-embed-multi-311m sarvam-moe": PreTokenizer(is_in_bytes=False),
}
PRE_TOKENIZERS = {name: row for names, row in _ROWS.items() for name in names.split()}
