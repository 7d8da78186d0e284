"""The tokenizer and the chat template of a GGUF file, against the Hugging Face tokenizer that it was made of."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import TokenType
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import Qwen2Tokenizer
from transformers.integrations.gguf import gguf_tokenizer_mapping as theirs

from backend.api.errors import ConfigError
from backend.text.chat import ChatTemplate
from backend.text.tokenizer import Tokenizer
from tests.text.gguf_tokenizers import write_file, write_tokens
from tests.text.tokenizers_made import MULTILINGUAL, llama3_bpe, sentencepiece_bpe, write_directory

TURNS = ["<|im_start|>", "<|im_end|>"]
SPECIAL = ["<|endoftext|>", *TURNS]
TEXTS = [
    "",
    " ",
    "Hello world",
    "  two  spaces, tabs\t\tand\r\n\r\nlines \n ",
    "I'M here, WE'LL go; it's 1234567 o'clock (½ ¾ ⅷ)",
    "ÀÉ nai\u0308ve e\u0301 Ω≈ç√ 한국어 日本語、人人生而自由",
    "👩‍👩‍👧‍👦 🏳️‍🌈 \u00a0\u2003x\u200b",
    "<|im_start|>user\nhi<|im_end|>\n<think> a </think>",
    "def f(x):\n    return x**2  # ok\n\n\n",
    "HTTPServer camelCase SHOUTING Ǆungla",
    "/usr/bin//env --flag=a/b\n/\n",
]


def texts() -> list[str]:
    """The above, and pieces of them put together at random."""
    rng = random.Random(7)
    data = "".join(TEXTS)
    cuts = [(rng.randrange(len(data)), rng.randrange(1, 9)) for _ in range(400)]
    return [*TEXTS, *("".join(data[at : at + size] for at, size in cuts[n : n + 8]) for n in range(0, 400, 8))]


def byte_level(pre: pre_tokenizers.PreTokenizer, **model: Any) -> tuple[Backend, dict[str, Any]]:
    """Trained with these words; <think> is a token that is not special."""
    backend = Backend(models.BPE(**model))
    backend.pre_tokenizer = pre
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(MULTILINGUAL * 4, trainer)
    backend.add_special_tokens(SPECIAL)
    backend.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return backend, {"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>"}


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    bytes_of_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), bytes_of_words])


def qwen2() -> tuple[Backend, dict[str, Any]]:
    trained, config = byte_level(split(theirs._QWEN2_SPLIT))
    model = json.loads(trained.to_str())["model"]
    backend = Qwen2Tokenizer(model["vocab"], [tuple(merge) for merge in model["merges"]]).backend_tokenizer
    backend.add_special_tokens(SPECIAL)
    backend.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return backend, config


WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False)
DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), WORDS])
# Name of words -> the tokenizer.json that models with it publish.
MAKERS: dict[str, Callable[[], tuple[Backend, dict[str, Any]]]] = {
    "gpt-2": lambda: byte_level(WORDS),
    "llama-bpe": llama3_bpe,
    "smaug-bpe": lambda: byte_level(split(theirs._LLAMA3_SPLIT)),
    "qwen2": qwen2,
    "deepseek-r1-qwen": lambda: byte_level(split(theirs._QWEN2_SPLIT)),
    "tekken": lambda: byte_level(split(theirs._TEKKEN_SPLIT), ignore_merges=True),
    "smollm": lambda: byte_level(DIGITS),
}


@pytest.mark.parametrize("pre", MAKERS)
def test_byte_level_bpe_gives_the_ids_and_texts_of_the_tokenizer_it_was_made_of(tmp_path: Path, pre: str) -> None:
    backend, config = MAKERS[pre]()
    expected = Tokenizer.from_directory(write_directory(tmp_path / "hf", backend, config))
    has_bos = pre == "llama-bpe"
    measured = Tokenizer.from_directory(write_file(tmp_path / "a.gguf", backend, config, pre=pre, add_bos=has_bos))
    for text in texts():
        ids = expected.encode(text)
        assert measured.encode(text) == ids, text
        assert measured.decode(ids) == expected.decode(ids)
        assert measured.decode(ids, skip_special_tokens=False) == expected.decode(ids, skip_special_tokens=False)
    assert (measured.special_tokens, measured.bos_id) == (expected.special_tokens, expected.bos_id)
    assert (measured.special_ids, measured.vocab_size) == (expected.special_ids, expected.vocab_size)


@pytest.mark.parametrize("pre, expected", [("llama-bpe", ["ab"]), ("tekken", ["ab"]), ("smaug-bpe", ["a", "b"])])
def test_a_word_that_is_a_token_needs_no_merges_where_the_model_has_it_so(
    tmp_path: Path, pre: str, expected: list[str]
) -> None:
    backend = Backend(models.BPE({"a": 0, "b": 1, "ab": 2, "c": 3, "bc": 4}, [("b", "c")]))
    tokenizer = Tokenizer.from_directory(write_file(tmp_path / "a.gguf", backend, {}, pre=pre))
    assert [tokenizer._backend.id_to_token(token_id) for token_id in tokenizer.encode("ab")] == expected


def test_a_file_without_a_name_has_llama_cpp_s_default_words(tmp_path: Path) -> None:
    """Runs of punctuation, then GPT-2's words, then digits apart from letters, of which three are one."""
    measured = Tokenizer.from_directory(write_file(tmp_path / "a.gguf", *byte_level(WORDS)))
    words = [word for word, _ in measured._backend.pre_tokenizer.pre_tokenize_str("Hello, x=12345!")]
    assert words == ["Hello", ",", "Ġx", "=", "123", "45", "!"]


def test_a_file_without_a_name_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for pre, count in (("gpt-2", 0), (None, 1)):
        named = {} if pre is None else {"pre": pre}
        Tokenizer.from_directory(write_file(tmp_path / "a.gguf", *byte_level(WORDS), **named))
        assert len(caplog.records) == count
    assert "a.gguf has no tokenizer.ggml.pre" in caplog.text and "serve its Hugging Face checkpoint" in caplog.text
    assert str(tmp_path) not in caplog.text


def pieces_and_scores() -> tuple[Backend, dict[str, Any], list[float]]:
    """Pieces in the order in which they were learned; the earlier, the higher the score."""
    backend, config = sentencepiece_bpe()
    del config["add_eos_token"], config["add_bos_token"], config["clean_up_tokenization_spaces"]
    return backend, config, [-float(index) for index in range(backend.get_vocab_size())]


def naive(text: str, vocab: dict[str, int], scores: list[float]) -> list[str]:
    """SentencePiece's own rule: merge the two neighbours that give the piece of the highest score, the leftmost first."""
    parts = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        found = [(-scores[vocab[a + b]], at) for at, (a, b) in enumerate(zip(parts, parts[1:])) if a + b in vocab]
        if not found:
            return parts
        _, at = min(found)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def test_sentencepiece_merges_the_highest_score_first(tmp_path: Path) -> None:
    backend, config, scores = pieces_and_scores()
    measured = Tokenizer.from_directory(write_file(tmp_path / "a.gguf", backend, config, scores=scores))
    vocab = backend.get_vocab(with_added_tokens=True)
    known = {text: index for text, index in vocab.items() if not text.startswith("<")}
    for text in texts():
        if "<" in text:
            continue
        expected = [vocab["<s>"]]
        for piece in naive(text, known, scores):
            expected += [vocab[piece]] if piece in vocab else [vocab[f"<0x{byte:02X}>"] for byte in piece.encode()]
        assert measured.encode(text) == expected, text
        assert measured.decode(expected) == text


def test_sentencepiece_gives_the_ids_of_the_hugging_face_tokenizer(tmp_path: Path) -> None:
    """With special tokens in the text: the space in front comes again behind each, as in Llama 2's tokenizer.json."""
    backend, config, scores = pieces_and_scores()
    vocab = backend.get_vocab(with_added_tokens=True)
    normal = {text: scores[index] for text, index in vocab.items() if not text.startswith("<")}
    merges = theirs.generate_merges(normal | {}, normal)
    model = json.loads(backend.to_str())["model"]
    backend.model = models.BPE(model["vocab"], merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    expected = Tokenizer.from_directory(write_directory(tmp_path / "hf", backend, config))
    measured = Tokenizer.from_directory(write_file(tmp_path / "a.gguf", backend, config, scores=scores))
    for text in [*texts(), "<s>a b</s> c<s>", " <unk> x"]:
        assert measured.encode(text) == expected.encode(text), text
        ids = expected.encode(text)
        assert measured.decode(ids) == expected.decode(ids)


@pytest.mark.parametrize(
    "add_bos, add_eos, expected", [(None, None, "<s>x"), (False, None, "x"), (True, True, "<s>x</s>")]
)
def test_the_file_says_what_is_put_around_a_text(
    tmp_path: Path, add_bos: bool | None, add_eos: bool | None, expected: str
) -> None:
    backend, config, scores = pieces_and_scores()
    file = write_file(tmp_path / "a.gguf", backend, config, scores=scores, add_bos=add_bos, add_eos=add_eos)
    tokenizer = Tokenizer.from_directory(file)
    measured = [tokenizer._backend.id_to_token(token_id) for token_id in tokenizer.encode("x")]
    assert "".join(measured) == expected.replace("x", "▁x")


def test_all_tokens_that_end_a_text_do(tmp_path: Path) -> None:
    """Those that are named (of a text, of a turn, of a message), and what says so itself: as llama.cpp has it."""
    backend, config = llama3_bpe()
    config |= {"eos_token": "<|end_of_text|>"}
    file = write_file(
        tmp_path / "a.gguf", backend, config, pre="llama-bpe", eot="<|end_header_id|>", eom="<|start_header_id|>"
    )
    vocab = backend.get_vocab(with_added_tokens=True)
    ids = [vocab[text] for text in ("<|end_of_text|>", "<|end_header_id|>", "<|start_header_id|>", "<|eot_id|>")]
    assert list(Tokenizer.from_directory(file).eos_ids) == ids


def ends(tmp_path: Path, tokens: dict[str, TokenType], **named: int) -> list[str]:
    file = write_tokens(tmp_path / "a.gguf", "gpt2", tokens, merges=["a a"], pre="gpt-2", **named)
    return [list(tokens)[token_id] for token_id in Tokenizer.from_directory(file).eos_ids]


def test_tags_of_html_end_no_text_and_a_part_of_a_text_neither(tmp_path: Path) -> None:
    """In llama.cpp </s> is an end in any vocabulary; and <|end|> is none where <|call|> is one, as here."""
    control, user = TokenType.CONTROL, TokenType.USER_DEFINED
    words = {"a": TokenType.NORMAL, "aa": TokenType.NORMAL}
    assert ends(tmp_path, words | {"</s>": user, "<eos>": control, "<turn|>": user}, eos_token_id=3) == [
        "<eos>",
        "<turn|>",
    ]
    assert ends(tmp_path, words | {"<|end|>": control, "<|return|>": control, "<|call|>": control}) == [
        "<|return|>",
        "<|call|>",
    ]
    assert ends(tmp_path, words | {"<|end|>": control, "<|return|>": TokenType.NORMAL}) == ["<|end|>"]


def test_the_chat_template_of_the_file_is_rendered_with_its_tokens(tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}"
    backend, config = llama3_bpe()
    file = write_file(tmp_path / "a.gguf", backend, config | {"chat_template": template}, pre="llama-bpe")
    directory = write_directory(tmp_path / "hf", backend, config | {"chat_template": template})
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    measured, expected = (
        ChatTemplate.from_directory(path, Tokenizer.from_directory(path)).render(messages) for path in (file, directory)
    )
    assert measured == expected == "<|begin_of_text|>[user] hi<|eot_id|>[assistant] ho<|eot_id|>"


def test_unknown_words_are_refused_by_name(tmp_path: Path) -> None:
    file = write_file(tmp_path / "a.gguf", *llama3_bpe(), pre="klingon")
    with pytest.raises(
        ConfigError, match=r"a.gguf: tokenizer.ggml.pre klingon is not supported; supported are default,"
    ):
        Tokenizer.from_directory(file)


@pytest.mark.parametrize("model", ["rwkv", "plamo2", "hybriddna", "whitespace", "none"])
def test_kinds_that_the_library_cannot_do_are_refused_by_name(tmp_path: Path, model: str) -> None:
    file = write_tokens(tmp_path / "a.gguf", model, {"a": TokenType.NORMAL})
    with pytest.raises(ConfigError, match=f"tokenizer.ggml.model {model} is not supported; supported are gpt2, gemma4"):
        Tokenizer.from_directory(file)


def test_words_of_falcon_end_at_bytes_that_look_like_digits(tmp_path: Path) -> None:
    """Its published tokenizer looks for digits among the characters that stand for bytes, of which ¹ ² ³ ¼ ½ ¾ are some."""
    tokens = dict.fromkeys(["Ð", "½", "Ð½", "ĠÐ"], TokenType.NORMAL)
    merges = ["Ð ½", "Ġ Ð"]
    file = write_tokens(tmp_path / "a.gguf", "gpt2", tokens | {"Ġ": TokenType.NORMAL}, merges=merges, pre="falcon")
    tokenizer = Tokenizer.from_directory(file)
    assert [tokenizer._backend.id_to_token(token_id) for token_id in tokenizer.encode(" нн")] == ["ĠÐ", "½", "Ð", "½"]
