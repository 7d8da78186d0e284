"""Small tokenizers of six families, written to directories as a model would carry them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from backend.text.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox doesn't jump over the lazy dog; it's 12:30, isn't it?",
    "def main(arguments: list[str]) -> int:\n    return len(arguments)  # done!",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "人人生而自由，在尊严和权利上一律平等。",
    "I can't, we'll, they've, you're and I'm here . Really ?",
] * 4
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
TEMPLATE = "{% for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor %}"


def byte_level_bpe() -> tuple[Backend, dict[str, Any]]:
    """Like models/default: single digits, newlines apart, ChatML tokens."""
    backend = Backend(models.BPE())
    pieces = Regex(r"[\r\n]+| {2,}|\t+| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pieces, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    config = {"bos_token": special[0], "eos_token": special[0], "pad_token": special[3]}
    return backend, {**config, "chat_template": TEMPLATE}


def sentencepiece_bpe() -> tuple[Backend, dict[str, Any]]:
    """Like Llama 2: <s> in front, byte fallback, one leading space stripped from the whole text."""
    trained = Backend(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="never")
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<unk>", "<s>", "</s>", *BYTES], show_progress=False, limit_alphabet=80
    )
    trained.train_from_iterator(CORPUS, trainer)
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    backend = Backend(models.BPE(model["vocab"], merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = trained.normalizer
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    bos = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", bos)])
    # transformers 5 leaves these aside: two beside a tokenizer.json, and the clean-up for any BPE
    ignored = {"add_bos_token": True, "add_eos_token": True, "clean_up_tokenization_spaces": True}
    return backend, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **ignored}


def unigram() -> tuple[Backend, dict[str, Any]]:
    """Like T5 and its followers, with byte fallback: Metaspace decoder, eos behind the text."""
    trained = Backend(models.Unigram())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=250, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    trained.train_from_iterator(CORPUS[:3], trainer)
    vocab = [tuple(entry) for entry in json.loads(trained.to_str())["model"]["vocab"]]
    backend = Backend(models.Unigram(vocab + [(byte, -20.0) for byte in BYTES], 2, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    backend.add_special_tokens(["<pad>", "</s>", "<unk>"])
    backend.post_processor = processors.TemplateProcessing("$A </s>", "$A </s> $B </s>", [("</s>", 1)])
    extra = {"additional_special_tokens": ["<extra_0>", {"content": "<extra_1>", "__type": "AddedToken"}]}
    return backend, {"eos_token": {"content": "</s>", "__type": "AddedToken"}, "pad_token": "<pad>", **extra}


def wordpiece() -> tuple[Backend, dict[str, Any]]:
    """Like BERT: [CLS] and [SEP], and transformers' clean-up of spaces over the whole text."""
    backend = Backend(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=350, special_tokens=special, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]", [("[CLS]", 2), ("[SEP]", 3)]
    )
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    return backend, {**dict(zip(names, special)), "clean_up_tokenization_spaces": True}


def end_of_word_bpe() -> tuple[Backend, dict[str, Any]]:
    """Like the first GPT and CLIP: </w> marks the end of a word, and the last one gets no space."""
    backend = Backend(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>", "<end>"], end_of_word_suffix="</w>", show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.enable_truncation(5)  # must be switched off by whoever loads it
    backend.add_tokens([AddedToken("<tool>", special=False), AddedToken("<think>", special=False)])
    return backend, {"unk_token": "<unk>", "eos_token": "<end>", "bos_token": "<new>"}  # <new> is in no other file


def word_level() -> tuple[Backend, dict[str, Any]]:
    """No decoder at all: tokens are joined by spaces."""
    words = sorted({word for line in CORPUS for word in line.split()})
    backend = Backend(models.WordLevel({word: i for i, word in enumerate(["<unk>", *words])}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return backend, {"unk_token": "<unk>", "clean_up_tokenization_spaces": True}


FAMILIES = {
    make.__name__: make for make in (byte_level_bpe, sentencepiece_bpe, unigram, wordpiece, end_of_word_bpe, word_level)
}


def write_directory(path: Path, backend: Backend, config: dict[str, Any]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {name: write_directory(root / name, *make()) for name, make in FAMILIES.items()}


@pytest.fixture(scope="session")
def family_tokenizers(directories: dict[str, Path]) -> dict[str, Tokenizer]:
    return {name: Tokenizer.from_directory(path) for name, path in directories.items()}


@pytest.fixture(params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def directory(family: str, directories: dict[str, Path]) -> Path:
    return directories[family]


@pytest.fixture
def tokenizer(family: str, family_tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return family_tokenizers[family]
