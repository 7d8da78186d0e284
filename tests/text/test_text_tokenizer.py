"""Tokenizer: the same ids and the same text as transformers' AutoTokenizer on the same directory."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import AutoTokenizer

from backend.api.errors import ConfigError, InvalidRequest, Unsupported
from backend.text.tokenizer import Tokenizer
from backend.text.words import word_token_ids, words_token_ids

TEXTS = [
    "", " ", "a", "The quick brown fox", " leading and trailing ", "tabs\tand\nnew\r\nlines  double",
    "Привет, мир! 你好 👩‍👩‍👧 e\u0301 \u200d ﷽", "<|im_start|>user\nhi<|im_end|>",
    "<s>x</s> [SEP] <unk> <tool>y <new> z <extra_1>",
    "don't stop . It's here ! n't 'm", "x" * 300, "\x00\x7f", "1234567890", "a b c d e f g h i j k",
]  # fmt: skip


@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_encode_equals_transformers(directory: Path, tokenizer: Tokenizer, add_special_tokens: bool) -> None:
    theirs = AutoTokenizer.from_pretrained(directory)
    for text in TEXTS:
        expected = theirs.encode(text, add_special_tokens=add_special_tokens)
        assert tokenizer.encode(text, add_special_tokens) == expected, text


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_decode_equals_transformers(directory: Path, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
    theirs = AutoTokenizer.from_pretrained(directory)
    rng = random.Random(0)
    samples = [[rng.randrange(len(theirs)) for _ in range(length)] for length in [0, 1, 2, 3, 5, 8, 13, 60] * 12]
    for ids in [*samples, *map(theirs.encode, TEXTS)]:
        assert tokenizer.decode(ids, skip_special_tokens) == theirs.decode(ids, skip_special_tokens=skip_special_tokens)


def test_special_ids_and_sizes_equal_transformers(directory: Path, tokenizer: Tokenizer) -> None:
    theirs = AutoTokenizer.from_pretrained(directory)
    assert tokenizer.vocab_size == len(theirs)
    added = theirs.added_tokens_decoder.items()
    assert tokenizer.special_ids == {token_id for token_id, token in added if token.special}
    assert (tokenizer.bos_id, tokenizer.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert tokenizer.special_tokens == theirs.special_tokens_map


def test_an_id_beyond_the_vocabulary_decodes_to_nothing(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("The quick fox", add_special_tokens=False)
    assert tokenizer.decode([*ids, tokenizer.vocab_size + 1000]) == tokenizer.decode(ids)


def test_truncation_written_in_the_file_is_switched_off(family_tokenizers: dict[str, Tokenizer]) -> None:
    assert len(family_tokenizers["end_of_word_bpe"].encode("one two three four five six seven")) > 5


def test_eos_ids_come_from_the_generation_config_and_the_tokenizer(
    tmp_path: Path, directories: dict[str, Path]
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((directories["byte_level_bpe"] / name).read_bytes())
    (tmp_path / "config.json").write_text('{"eos_token_id": 9}')
    assert Tokenizer.from_directory(tmp_path).eos_ids == (9, 0)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    assert Tokenizer.from_directory(tmp_path).eos_ids == (2, 0)


def test_the_older_special_tokens_map_is_read(tmp_path: Path, directories: dict[str, Path]) -> None:
    (tmp_path / "tokenizer.json").write_bytes((directories["sentencepiece_bpe"] / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    names = '{"bos_token": {"content": "<s>", "lstrip": false}, "eos_token": "</s>"}'
    (tmp_path / "special_tokens_map.json").write_text(names)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer.from_directory(tmp_path)
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id) == (1, 2)


def test_tokens_listed_in_the_config_are_added_as_transformers_adds_them(
    tmp_path: Path, directories: dict[str, Path]
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((directories["byte_level_bpe"] / "tokenizer.json").read_bytes())
    size = Tokenizer.from_directory(directories["byte_level_bpe"]).vocab_size
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    listed = {
        str(size): {"content": "<a>", "special": True, **flags},
        str(size + 1): {"content": "<b>", "special": False, **flags},
    }
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": listed, "eos_token": "<a>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), Tokenizer.from_directory(tmp_path)
    text = "x<a>y<b>z"
    assert ours.encode(text) == theirs.encode(text)
    assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)
    assert ours.eos_ids == (size,)


def test_a_directory_without_tokenizer_json_is_converted_by_transformers(tmp_path: Path) -> None:
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "world", "##s", "!"]
    (tmp_path / "vocab.txt").write_text("\n".join(vocab) + "\n")
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer", "do_lower_case": true}')
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), Tokenizer.from_directory(tmp_path)
    assert ours.encode("Hello worlds!") == theirs.encode("Hello worlds!") == [2, 5, 6, 7, 8, 3]
    assert ours.decode([5, 6, 7, 8]) == theirs.decode([5, 6, 7, 8])


def test_an_empty_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no tokenizer.json"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("content", ["{", '{"model": {}}', "[]"])
def test_a_broken_tokenizer_json_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match="tokenizer.json of the model cannot be read"):
        Tokenizer.from_directory(tmp_path)


def test_a_lone_surrogate_and_a_negative_id_end_the_request_only(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="lone surrogate at character 1"):
        tokenizer.encode("a\ud800")
    with pytest.raises(InvalidRequest, match="token id"):
        tokenizer.decode([-1])


def test_a_decoder_that_cannot_be_streamed_is_named() -> None:
    backend = Backend(models.WordLevel({"a": 0}, unk_token="a"))
    backend.decoder = decoders.CTC()
    with pytest.raises(Unsupported, match="decoder CTC cannot be streamed"):
        Tokenizer(backend).new_pipeline()


def test_the_text_modules_import_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, pkgutil, importlib, backend.text as text\n"
        "[importlib.import_module(m.name) for m in pkgutil.iter_modules(text.__path__, 'backend.text.')]\n"
        "heavy = {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# -------------------------------------------------------------------------------------------------------------- words


def test_a_word_stands_for_its_spelling_at_the_start_and_after_a_space(family_tokenizers: dict[str, Tokenizer]) -> None:
    for name in ("byte_level_bpe", "sentencepiece_bpe", "unigram", "end_of_word_bpe"):
        tokenizer = family_tokenizers[name]
        spellings = word_token_ids(tokenizer, "fox")
        assert tokenizer.encode("fox", False) in spellings
        for context in ("The fox", "fox"):
            ids = tokenizer.encode(context, False)
            assert any(ids[len(ids) - len(word) :] == word for word in spellings), (name, context)
        for ids in spellings:
            assert tokenizer.decode(ids).strip() == "fox", name
        assert len(spellings) == len({tuple(ids) for ids in spellings})


def test_a_word_in_the_middle_of_a_text_is_found_despite_the_space_that_sentencepiece_puts_in_front(
    family_tokenizers: dict[str, Tokenizer],
) -> None:
    tokenizer = family_tokenizers["sentencepiece_bpe"]
    text = tokenizer.encode("a\nfox", add_special_tokens=False)
    assert any(text[len(text) - len(word) :] == word for word in word_token_ids(tokenizer, "fox"))


def test_words_without_a_spelling_and_empty_words_are_refused(family_tokenizers: dict[str, Tokenizer]) -> None:
    with pytest.raises(InvalidRequest, match="cannot be written"):
        words_token_ids(family_tokenizers["word_level"], ["xyzzy"])
    with pytest.raises(InvalidRequest, match="is empty"):
        words_token_ids(family_tokenizers["byte_level_bpe"], ["a", ""])
    both = words_token_ids(family_tokenizers["byte_level_bpe"], ["a", "b", "a"])
    assert len(both) == 4


def test_other_threads_run_while_a_long_text_is_tokenised(family_tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer, text = family_tokenizers["byte_level_bpe"], "lorem ipsum dolor " * 20_000
    over = threading.Event()
    seen = [time.monotonic()]

    def watch() -> None:
        while not over.is_set():
            time.sleep(0.001)
            seen.append(time.monotonic())

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.monotonic()
    tokenizer.encode(text)
    took = time.monotonic() - began
    over.set()
    watcher.join()
    assert max(later - earlier for earlier, later in zip(seen, seen[1:])) < took / 2
