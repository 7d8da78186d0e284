"""The kinds of tokenizers in GGUF files beside byte-level BPE: of characters, unigram, WordPiece; and tokens that are added."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from gguf import TokenType
from transformers import BertTokenizer, GemmaTokenizer, XLMRobertaTokenizer

from backend.api.errors import ConfigError
from backend.text.charsmap import MAX_REPLACEMENT, check_charsmap
from backend.text.tokenizer import Tokenizer
from tests.text.charsmaps import charsmap
from tests.text.gguf_tokenizers import write_tokens
from tests.text.test_gguf_tokenizer import texts
from tests.text.tokenizers_made import BYTES, wordpiece, xlm_roberta_unigram

NORMAL, UNKNOWN, CONTROL, USER, BYTE = (
    TokenType.NORMAL, TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.BYTE
)  # fmt: skip
PIECES = dict.fromkeys(["▁", "a", "b", "▁a", "▁b", "ab", "▁ab", "h", "<", ">", "/", "\n", "</"], NORMAL)
ADDED = {"<unk>": UNKNOWN, "<s>": CONTROL, "<|user|>": CONTROL, "</s>": USER, "  ": USER, "   ": USER, "\n\n": USER}
TOKENS = ADDED | dict.fromkeys(BYTES, BYTE) | PIECES
SCORES = [-float(index) for index in range(len(TOKENS))]


def shown(file: Path, text: str) -> list[str | None]:
    """The tokens of a text."""
    tokenizer = Tokenizer.from_directory(file)
    return [tokenizer._backend.id_to_token(token_id) for token_id in tokenizer.encode(text, add_special_tokens=False)]


@pytest.mark.parametrize(
    "text, expected, with_prefix",
    [
        ("a b", ["a", "▁b"], ["▁a", "▁b"]),
        (" a", ["▁a"], ["▁", "▁a"]),
        ("a  b", ["a", "  ", "b"], ["▁a", "  ", "▁b"]),
        ("a   b", ["a", "   ", "b"], ["▁a", "   ", "▁b"]),
        ("a    b", ["a", "   ", "▁b"], ["▁a", "   ", "▁", "▁b"]),
        ("<s>a b<s> a", ["<s>", "a", "▁b", "<s>", "▁a"], ["<s>", "▁a", "▁b", "<s>", "▁", "▁a"]),
        ("a\n\n\nb", ["a", "\n\n", "\n", "b"], ["▁a", "\n\n", "▁", "\n", "b"]),
        ("a</s>b", ["a", "</s>", "b"], ["▁a", "</s>", "▁b"]),
        ("ä", ["<0xC3>", "<0xA4>"], ["▁", "<0xC3>", "<0xA4>"]),
    ],
)
def test_spaces_and_added_tokens_of_sentencepiece(
    tmp_path: Path, text: str, expected: list[str], with_prefix: list[str]
) -> None:
    """Gemma's way and Llama 2's, as llama.cpp has them: the space in front comes behind each token that is added, too."""
    for prefix, tokens in ((False, expected), (True, with_prefix), (None, with_prefix)):
        settings = {} if prefix is None else {"add_space_prefix": prefix}
        assert shown(write_tokens(tmp_path / "a.gguf", "llama", TOKENS, scores=SCORES, **settings), text) == tokens


def test_spaces_of_an_old_file_are_those_of_the_text(tmp_path: Path) -> None:
    """Its tokens of the user have ▁ for a space, as in SentencePiece's own file."""
    old = {text.replace("  ", "▁▁") if kind == USER else text: kind for text, kind in TOKENS.items() if text != "   "}
    file = write_tokens(tmp_path / "a.gguf", "llama", old, scores=SCORES[1:], add_space_prefix=False)
    assert shown(file, "a  b") == ["a", "  ", "b"]
    assert Tokenizer.from_directory(file).decode(Tokenizer.from_directory(file).encode("a  b")) == "a  b"


def test_a_word_is_not_made_special_by_its_name(tmp_path: Path) -> None:
    """Some converters name a word as the separator."""
    named = {"seperator_token_id": 0, "mask_token_id": 3}
    tokens = {"a": NORMAL, "b": NORMAL, "ab": NORMAL, "[MASK]": CONTROL}
    tokenizer = Tokenizer.from_directory(
        write_tokens(tmp_path / "a.gguf", "gpt2", tokens, merges=["a b"], pre="gpt-2", **named)
    )
    assert tokenizer.special_tokens == {"mask_token": "[MASK]"}
    assert tokenizer.decode(tokenizer.encode("aab")) == "aab"


def test_spaces_behind_a_token_are_part_of_it_in_phi_3(tmp_path: Path) -> None:
    """As its tokenizer.json says (rstrip). The file does not, so the architecture decides."""
    expected = {
        "phi3": ["<|user|>", "▁ab", "</s>", "▁a", "<s>", "▁", "▁b"],
        "llama": ["<|user|>", "▁", "\n", "ab", "</s>", "▁", "▁a", "<s>", "▁", "▁b"],
    }
    for family, tokens in expected.items():
        file = write_tokens(tmp_path / "a.gguf", "llama", TOKENS, family=family, scores=SCORES)
        assert shown(file, "<|user|>\nab</s> a<s> b") == tokens


@pytest.mark.parametrize("settings, is_left", [({}, False), ({"pre": "modern-bert"}, True), ({"pre": "gpt-2"}, False)])
def test_the_space_in_front_of_a_mask_is_part_of_it_where_the_family_has_it_so(
    tmp_path: Path, settings: dict[str, str], is_left: bool
) -> None:
    tokens = {"a": NORMAL, "Ġ": NORMAL, "Ġa": NORMAL, "[MASK]": CONTROL}
    file = write_tokens(tmp_path / "a.gguf", "gpt2", tokens, merges=["Ġ a"], **settings)
    assert shown(file, "a [MASK]") == (["a", "[MASK]"] if is_left else ["a", "Ġ", "[MASK]"])


def character_bpe() -> tuple[dict[str, TokenType], list[str]]:
    """Like Gemma 4: merges of characters, also of spaces, and tokens of bytes."""
    pieces = ["▁▁", "▁▁▁", "th", "he", "▁th", "▁the", "in", "▁in", "er", "\n\n", "▁a", "on", "▁o", "▁on"]
    merges = [
        "▁ ▁",
        "▁▁ ▁",
        "t h",
        "h e",
        "▁ th",
        "▁th e",
        "i n",
        "▁ in",
        "e r",
        "\n \n",
        "▁ a",
        "o n",
        "▁ o",
        "▁o n",
        "▁ on",
    ]
    letters = "▁\nabcdefghijklmnopqrstuvwxyzTH"
    special = {"<pad>": CONTROL, "<unk>": UNKNOWN, "<bos>": CONTROL, "<|tool>": USER}
    return special | dict.fromkeys(BYTES, BYTE) | dict.fromkeys([*letters, *pieces], NORMAL), merges


@pytest.mark.parametrize("model, pre", [("gemma4", None), ("gpt2", "sarvam-moe")])
def test_bpe_of_characters_gives_the_ids_of_gemma_s_tokenizer(tmp_path: Path, model: str, pre: str | None) -> None:
    tokens, merges = character_bpe()
    vocab = {text: index for index, text in enumerate(tokens)}
    theirs = GemmaTokenizer(vocab=vocab, merges=[tuple(merge.split(" ")) for merge in merges]).backend_tokenizer
    theirs.add_tokens(["<|tool>"])
    named = {"bos_token_id": 2, "unknown_token_id": 1} | ({} if pre is None else {"pre": pre})
    ours = Tokenizer.from_directory(
        write_tokens(tmp_path / "a.gguf", model, tokens, merges=merges, add_bos=True, **named)
    )
    for text in [*texts(), "the   thin\n\n\n in  on the", "<bos>a <|tool>on 5"]:
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == [2, *ids], text
        assert ours.decode(ids) == theirs.decode(ids)


MAP = {"\u3000": " ", "\t": " ", "\n": " ", "\u00bd": "1/2", "\ufb01": "fi", "\u200b": ""}


def unigram_file(path: Path, **settings: Any) -> tuple[Path, XLMRobertaTokenizer]:
    """A file, and transformers' tokenizer of the same pieces and map."""
    pieces = json.loads(xlm_roberta_unigram()[0].to_str())["model"]["vocab"]
    kinds = {"<s>": CONTROL, "<pad>": CONTROL, "</s>": CONTROL, "<unk>": UNKNOWN, "<mask>": CONTROL}
    pieces = [["<s>", 0.0], ["<pad>", 0.0], ["</s>", 0.0], ["<unk>", 0.0], *(p for p in pieces if p[0] not in kinds)]
    pieces.append(["<mask>", 0.0])
    tokens = {text: kinds.get(text, NORMAL) for text, _ in pieces}
    named = {"bos_token_id": 0, "eos_token_id": 2, "unknown_token_id": 3}
    scores = [score for _, score in pieces]
    content = charsmap(MAP)
    file = write_tokens(path, "t5", tokens, scores=scores, charsmap=content, **named, **settings)
    return file, XLMRobertaTokenizer(vocab=[tuple(piece) for piece in pieces], _spm_precompiled_charsmap=content)


def test_unigram_gives_the_ids_of_transformers(tmp_path: Path) -> None:
    file, theirs = unigram_file(tmp_path / "a.gguf", add_bos=True, add_space_prefix=True, remove_extra_whitespaces=True)
    ours = Tokenizer.from_directory(file)
    for text in [*texts(), "\u00bd \ufb01nd\u3000a\u200bb  c ", "a <mask> b<mask>", "<s> a </s>"]:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("model", ["llama", "t5"])
def test_a_token_of_many_characters_is_refused(tmp_path: Path, model: str) -> None:
    """Looking for it would take time with the square of a text's length."""
    for count, is_taken in ((512, True), (513, False)):
        tokens = {"<unk>": UNKNOWN, "a": NORMAL, "a" * count: NORMAL}
        file = write_tokens(tmp_path / "a.gguf", model, tokens, scores=[0.0, -1.0, -2.0])
        if is_taken:
            assert shown(file, "a")[-1] == "a"
        else:
            with pytest.raises(ConfigError, match="has more than 512 characters"):
                Tokenizer.from_directory(file)


def test_unigram_takes_the_likeliest_pieces(tmp_path: Path) -> None:
    """Of all ways to cut a text; what is no piece is unknown, ten below the least likely piece."""
    rng = random.Random(3)
    scores = {text: -rng.random() * 4 for text in ("▁", "a", "b", "ab", "▁a", "ba", "aba", "▁ab", "bb", "abb")}

    def best(text: str) -> float:
        """The score of the best way."""
        ways = [(scores[text[:size]], size) for size in (1, 2, 3) if text[:size] in scores] or [(unknown, 1)]
        return max(score + best(text[size:]) for score, size in ways) if text else 0.0

    unknown = min(scores.values()) - 10
    tokens = {"<pad>": CONTROL, "</s>": CONTROL, "<unk>": UNKNOWN} | dict.fromkeys(scores, NORMAL)
    file = write_tokens(tmp_path / "a.gguf", "t5", tokens, scores=[0.0, 0.0, 0.0, *scores.values()], eos_token_id=1)
    for _ in range(50):
        text = "".join(rng.choices("aabbc ", k=rng.randrange(1, 9))).strip().replace("cc", "c")
        pieces = shown(file, text)
        words = ["▁" + word for word in text.split()]
        assert "".join(str(piece) for piece in pieces) == "".join(words).replace("c", "<unk>")
        assert sum(scores.get(str(piece), unknown) for piece in pieces) == pytest.approx(sum(map(best, words))), text
    assert (
        Tokenizer.from_directory(file).encode("a")[-1] == 1
    )  # </s> behind the text, though the file does not ask for it


def test_spaces_of_unigram_are_kept_where_the_file_says_so(tmp_path: Path) -> None:
    tokens = {"<unk>": UNKNOWN, "▁": NORMAL, "a": NORMAL, "▁a": NORMAL}
    for keeps, expected in ((True, ["▁", "▁a", "▁"]), (False, ["▁a"])):
        settings: dict[str, Any] = {"scores": [0.0, -2.0, -2.0, -1.0], "remove_extra_whitespaces": not keeps}
        assert shown(write_tokens(tmp_path / "a.gguf", "t5", tokens, **settings), "  a ") == expected
    settings = {"scores": [0.0, -2.0, -2.0, -1.0], "add_space_prefix": False}
    assert shown(write_tokens(tmp_path / "a.gguf", "t5", tokens, **settings), "a a") == ["a", "▁a"]


def spoiled(change: str) -> bytes:
    content = charsmap(MAP)
    size = int.from_bytes(content[:4], "little")
    first = int.from_bytes(content[4:8], "little")
    return {
        "empty": b"",
        "shorter than it says": content[: size // 2],
        "no replacements": content[: 4 + size],
        "no whole units": (size - 1).to_bytes(4, "little") + content[4:],
        "the root leads out": content[:4] + (first | 1 << 30).to_bytes(4, "little") + content[8:],
        "a child leads out": content.replace(first_child(content), b"\xe3\x02\xff\x7f", 1),
        "no zero at the end": content[:-1] + b"x",
        "no UTF-8": content[:-3] + b"\xff\0\0",
        "a long replacement": charsmap({"a": "b" * (MAX_REPLACEMENT + 1)}),
        "a replacement that begins nowhere": content.replace(b"1/2\0", b"1\0/2", 1),
    }[change]


def first_child(content: bytes) -> bytes:
    """The unit behind the root for the first byte of \u3000."""
    return content[4 + 4 * (256 ^ 0xE3) :][:4]


@pytest.mark.parametrize(
    "change, words",
    [
        ("empty", "bytes"),
        ("shorter than it says", "bytes"),
        ("no replacements", "bytes"),
        ("no whole units", "bytes"),
        ("the root leads out", "leads out of itself"),
        ("a child leads out", "leads out of itself"),
        ("no zero at the end", "leads out of itself"),
        ("a replacement that begins nowhere", "leads out of itself"),
        ("no UTF-8", "not UTF-8"),
        ("a long replacement", "more than 128 bytes"),
    ],
)
def test_a_map_of_characters_that_leads_out_of_itself_is_refused(change: str, words: str) -> None:
    """The library would follow it at the first text that has such a character."""
    check_charsmap(list(charsmap(MAP)), "a.gguf")
    with pytest.raises(ConfigError, match=rf"a.gguf: tokenizer.ggml.precompiled_charsmap .*{words}"):
        check_charsmap(list(spoiled(change)), "a.gguf")


def bert_file(path: Path, **settings: Any) -> tuple[Path, dict[str, int]]:
    """A file as llama.cpp writes it, with ▁ for the start of a word in place of ## for its inside; and BERT's vocabulary."""
    vocab = wordpiece()[0].get_vocab()
    texts = sorted(vocab, key=vocab.__getitem__)
    special = {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"}
    tokens = {
        text if text in special else text.removeprefix("##") if text.startswith("##") else "▁" + text: text in special
        for text in texts
    }
    named = {
        f"{name}_token_id": vocab[text] for name, text in dict(cls="[CLS]", seperator="[SEP]", unknown="[UNK]").items()
    }
    kinds = {text: CONTROL if is_special else NORMAL for text, is_special in tokens.items()}
    return write_tokens(path, "bert", kinds, **named, **settings), vocab


def test_wordpiece_gives_the_ids_of_transformers(tmp_path: Path) -> None:
    file, vocab = bert_file(tmp_path / "a.gguf")
    theirs, ours = BertTokenizer(vocab=vocab), Tokenizer.from_directory(file)
    for text in [*texts(), "[MASK] a [CLS]", "x" * 101, "x" * 100, "Zwölf naïve (quick)brown"]:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("lower, accents, expected", [(None, None, "a"), (False, None, "Ä"), (True, False, "ä")])
def test_wordpiece_keeps_cases_and_accents_where_the_file_says_so(
    tmp_path: Path, lower: bool | None, accents: bool | None, expected: str
) -> None:
    tokens = {"[UNK]": CONTROL, "▁ä": NORMAL, "▁Ä": NORMAL, "▁a": NORMAL}
    given = {"normalizer.lowercase": lower, "normalizer.strip_accents": accents}
    flags = {key: value for key, value in given.items() if value is not None}
    assert shown(write_tokens(tmp_path / "a.gguf", "bert", tokens, unknown_token_id=0, **flags), "Ä") == [expected]
