"""The tokenizer of a checkpoint as the settings `tokenizer.*` of a GGUF file.

    gpt2     BPE of bytes: tokens, merges, and the name of its words (tokenizer.ggml.pre), found by comparing regular expressions
    llama    SentencePiece's BPE: tokens and scores, which follow from the order of the merges
    gemma4   BPE of characters with merges whose order no scores give
    t5       unigram: tokens, scores and the map of characters

A file can say less than a tokenizer.json. So the tokenizer that is read out of the settings must give the tokens of PROBES that
the checkpoint's gives; the first form that does is written.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from backend.api.checkpoint.gguf import CONTROL, END_TEXTS, USER_DEFINED, GgufHeader
from backend.api.checkpoint.model_files import shown
from backend.api.errors import ConfigError
from backend.text.chat import GGUF_SETTINGS, read_templates
from backend.text.gguf_tokenizer import build_tokenizer
from backend.text.gguf_vocabulary import NORMAL, PREFIX, UNKNOWN
from backend.text.pre_tokenizers import PRE_TOKENIZERS
from backend.text.tokenizer import Tokenizer

Settings = dict[str, Any]  # without PREFIX
AUTO, NONE = "auto", "none"
UNUSED, BYTE = 5, 6
# name of a special token -> the setting of its id
_IDS = dict(
    bos_token="bos", eos_token="eos", unk_token="unknown", pad_token="padding", sep_token="seperator", cls_token="cls",
    mask_token="mask",
)  # fmt: skip
_GPT2, (_DIGIT, _) = PRE_TOKENIZERS["gpt-2"].patterns[0], PRE_TOKENIZERS["starcoder"].patterns
_BYTE = re.compile("<0x[0-9A-F]{2}>")
PROBES = (
    "Hello world",
    " a  b   c    d\t\te\r\n\r\nf\n \n  g \u00a0\u3000h  ",
    "I'M here, WE'LL go; it's 1234567 o'clock, 3.14159 (½ ¾ ⅷ x² ١٢٣) don't DON'T 'tis",
    "ÀÉ nai\u0308ve e\u0301 Ω≈ç√ Straße ﬁn Ǆungla İstanbul",
    "한국어 조선 日本語、カタカナ・ひらがな 人人生而自由，在尊严和权利上一律平等。",
    "हिन्दी में क्या है? ภาษาไทย العربية שלום Привет, как дела?",
    "👩‍👩‍👧‍👦 🏳️‍🌈 x\u200by",
    "def f(x):\n    return x**2  # ok\n\n\nclass A:\n\tpass\n",
    "HTTPServer camelCase SHOUTING snake_case_name 0x1F /usr/bin//env --flag=a/b\n/\n",
    "<b>bold</b> {{x}} $y = \\frac{1}{2}$ ... !!! -- ~~ @user #tag a/b/c\\d",
)


class TokenizerSource(NamedTuple):
    """Where a tokenizer comes from: settings of a GGUF file, or the files of a directory."""

    settings: Settings | None  # with PREFIX, and chat templates; None: read `directory`
    directory: Path


def settings_of(
    source: TokenizerSource, wanted: str, num_rows: int, eos_ids: tuple[int, ...]
) -> tuple[Settings, list[str]]:
    """The settings with their whole names, and remarks.

    wanted: AUTO, NONE, or the name of BPE's words (tokenizer.ggml.pre). num_rows: of the embedding; each has a token. eos_ids: of
    config.json. Raises ConfigError for a tokenizer that has no form in a GGUF file.
    """
    if wanted == NONE:
        return {PREFIX + "model": "no_vocab"}, []
    if source.settings is not None:
        found, remarks = dict(source.settings), list[str]()
        if PREFIX + "tokens" not in found:
            return {PREFIX + "model": "no_vocab"}, ["the checkpoint has no tokenizer, and the file has none"]
    elif not _has_tokenizer(source.directory):
        return {PREFIX + "model": "no_vocab"}, ["the checkpoint has no tokenizer, and the file has none"]
    else:
        found, remarks = _of_directory(source.directory, wanted, eos_ids)
    _fill(found, num_rows)
    return found, remarks


def _has_tokenizer(directory: Path) -> bool:
    return any(directory.glob("tokenizer.*")) or (directory / "vocab.json").exists()


def _fill(settings: Settings, num_rows: int) -> None:
    """A token for each row of the embedding. Raises ConfigError if there are more tokens than rows."""
    tokens = list(settings[PREFIX + "tokens"])
    missing = num_rows - len(tokens)
    if missing < 0:
        raise ConfigError(
            f"the tokenizer has {len(tokens)} tokens, the embedding {num_rows} rows; fetch the checkpoint again"
        )
    kinds = list(settings.get(PREFIX + "token_type") or [NORMAL] * len(tokens))
    settings[PREFIX + "tokens"] = tokens + [f"[PAD{index}]" for index in range(len(tokens), num_rows)]
    settings[PREFIX + "token_type"] = kinds + [UNUSED] * missing
    if PREFIX + "scores" in settings:
        settings[PREFIX + "scores"] = list(settings[PREFIX + "scores"]) + [-1e4] * missing


def _of_directory(directory: Path, wanted: str, eos_ids: tuple[int, ...]) -> tuple[Settings, list[str]]:
    tokenizer, remarks = Tokenizer.from_directory(directory), list[str]()
    content = json.loads(tokenizer.to_json())
    common = _tokens(tokenizer, content) | _ids(tokenizer, eos_ids) | _around(tokenizer, remarks)
    probes = [tokenizer.encode(text, add_special_tokens=False) for text in PROBES]
    first: Settings | None = None
    for own in _forms(content, common, wanted):
        found = {PREFIX + key: value for key, value in (common | own).items()}
        first = first or found
        read = Tokenizer(*build_tokenizer(GgufHeader(directory / "tokenizer.json", found, {})))
        differing = [text for text, ids in zip(PROBES, probes) if read.encode(text, add_special_tokens=False) != ids]
        if not differing and _has_merges(read, content, own):
            break
    else:
        assert first is not None
        if wanted == AUTO:
            raise ConfigError(
                f"tokenizer.json makes other tokens than the same tokenizer in a GGUF file would, as of "
                f"{shown(differing[0] if differing else 'merges')}; give --tokenizer none for a file without one"
            )
        found = first
        remarks.append(f"--tokenizer {wanted} makes other tokens than tokenizer.json of {len(differing)} texts")
    templates = read_templates(directory)
    return found | {GGUF_SETTINGS[name]: text for name, text in templates.items()}, remarks


def _tokens(tokenizer: Tokenizer, content: dict[str, Any]) -> Settings:
    """The texts and kinds of all tokens; ids that are left out are unused."""
    model = content["model"]
    vocab = model["vocab"]
    named = vocab if isinstance(vocab, dict) else {text: index for index, (text, _) in enumerate(vocab)}
    added = {each["id"]: each for each in content["added_tokens"]}
    texts = [f"[PAD{index}]" for index in range(tokenizer.num_ids)]
    kinds = [UNUSED] * len(texts)
    is_in_bytes = tokenizer.is_byte_level
    for text, index in named.items():
        texts[index] = text
        kinds[index] = BYTE if not is_in_bytes and _BYTE.fullmatch(text) else NORMAL
    for index, each in added.items():
        texts[index], kinds[index] = each["content"], CONTROL if each["special"] else USER_DEFINED
    unknown = model.get("unk_token") if isinstance(vocab, dict) else vocab[model.get("unk_id") or 0][0]
    if unknown in named and not is_in_bytes:
        kinds[named[unknown]] = UNKNOWN
    return dict(tokens=texts, token_type=kinds)


def _ids(tokenizer: Tokenizer, eos_ids: tuple[int, ...]) -> Settings:
    """Ids of special tokens; further ones that end a text, as far as no reader knows them by their texts."""
    named = {key: tokenizer.token_to_id(tokenizer.special_tokens.get(name, "")) for name, key in _IDS.items()}
    ends = list(dict.fromkeys([*([] if named["eos"] is None else [named["eos"]]), *tokenizer.eos_ids, *eos_ids]))
    if ends and named["eos"] is None:
        named["eos"] = ends[0]
    known = {tokenizer.token_to_id(text) for text in END_TEXTS}
    further = [each for each in ends if each != named["eos"] and each not in known]
    named |= dict(zip(("eot", "eom"), further, strict=False))
    return {f"{key}_token_id": token_id for key, token_id in named.items() if token_id is not None}


def _around(tokenizer: Tokenizer, remarks: list[str]) -> Settings:
    """The tokens that are put before and behind a text."""
    plain, whole = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a")
    at = next((at for at in range(len(whole)) if whole[at : at + len(plain)] == plain), 0)
    before, after = whole[:at], whole[at + len(plain) :]
    has_bos, has_eos = before == [tokenizer.bos_id], after == [tokenizer.eos_id]
    if (before and not has_bos) or (after and not has_eos):
        remarks.append(
            "tokenizer.json puts other tokens around a text than bos and eos, which a GGUF file cannot say: send them in the text"
        )
    return dict(add_bos_token=has_bos, add_eos_token=has_eos)


def _forms(content: dict[str, Any], common: Settings, wanted: str) -> Iterator[Settings]:
    """The settings that may stand for a tokenizer, the likeliest first. Raises ConfigError for one that has no form."""
    model, kind = content["model"], content["model"]["type"]
    if kind == "BPE" and not model["byte_fallback"] and "ByteLevel" in str(content["pre_tokenizer"]):
        merges = dict(merges=[" ".join(merge) for merge in model["merges"]])
        names = _names_of(content) if wanted == AUTO else [wanted]
        yield from (dict(model="gpt2", pre=name, **merges) for name in names)
    elif kind == "BPE":
        scores = _scores(model["merges"], common["tokens"])
        yield from (dict(model="llama", scores=scores, add_space_prefix=prefix) for prefix in (True, False))
        yield dict(model="gemma4", merges=[" ".join(merge) for merge in model["merges"]])
    elif kind == "Unigram":
        given = {text: score for text, score in model["vocab"]}
        scores = [given.get(text, -1e4) for text in common["tokens"]]
        found = re.search(r"'precompiled_charsmap': '([^']+)'", str(content["normalizer"]))
        charsmap = dict(precompiled_charsmap=list(base64.b64decode(found[1]))) if found else {}
        for prefix in (True, False):
            for removes in (True, False):
                flags = dict(add_space_prefix=prefix, remove_extra_whitespaces=removes)
                yield dict(model="t5", scores=scores, **charsmap, **flags)
    else:
        raise ConfigError(
            f"tokenizer.json is of kind {shown(kind)}, BPE and Unigram are written; give --tokenizer none for a file without one"
        )


def _scores(merges: list[list[str]], tokens: list[str]) -> list[float]:
    """The earlier a token is merged, the higher its score; those that nothing is merged to come last."""
    rank: dict[str, int] = {}
    for left, right in merges:
        rank.setdefault(left + right, len(rank))
    return [-float(rank.get(text, len(rank) + index)) for index, text in enumerate(tokens)]


def _has_merges(read: Tokenizer, content: dict[str, Any], own: Settings) -> bool:
    """True unless merges that follow from scores are others than the checkpoint's."""
    if own["model"] != "llama":
        return True
    ours, theirs = (model["merges"] for model in (json.loads(read.to_json())["model"], content["model"]))
    return sorted(ours) == sorted(theirs)


def _names_of(content: dict[str, Any]) -> list[str]:
    """Names of words that are cut like the tokenizer's. Raises ConfigError if there is none."""
    patterns, of_bytes = _patterns(content["pre_tokenizer"])
    is_nfc = content["normalizer"] is not None
    rows = {
        name: row
        for name, row in PRE_TOKENIZERS.items()
        if row.is_in_bytes and (row.patterns, row.byte_patterns, row.is_nfc) == (patterns, of_bytes, is_nfc)
    }
    ignores = content["model"].get("ignore_merges", False)
    names = sorted(rows, key=lambda name: rows[name].ignores_merges != ignores)  # the order within is the table's
    if not names:
        normalised = f" after {content['normalizer'].get('type')}" if is_nfc else ""
        raise ConfigError(
            f"tokenizer.json cuts words by {shown(' then '.join(patterns + of_bytes))}{normalised}, which is no pre-tokenizer "
            f"that llama.cpp has a name for; give --tokenizer NAME with one that is alike, or --tokenizer none"
        )
    return names


def _patterns(given: dict[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The regular expressions before and after a text becomes bytes; a step of another kind stands under its name."""
    before, after = list[str](), list[str]()
    found = before
    for step in given["pretokenizers"] if given["type"] == "Sequence" else [given]:
        if step["type"] == "ByteLevel":
            if step.get("add_prefix_space"):
                found.append("ByteLevel with a space in front")
            elif step.get("use_regex", True):
                found.append(_GPT2)
            found = after
        elif step["type"] == "Digits":
            found.append(_DIGIT if step["individual_digits"] else _DIGIT + "+")
        elif step["type"] == "Split" and (step["behavior"], step["invert"]) in (("Isolated", False), ("Removed", True)):
            found.append(step["pattern"].get("Regex") or re.escape(step["pattern"].get("String", "")))
        else:
            found.append(step["type"])
    return tuple(before), tuple(after)
