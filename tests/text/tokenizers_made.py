"""Small tokenizers of many families, made by training on a few lines or by listing a vocabulary.

FAMILIES are the six that most tests of this room read from a directory (conftest.py). MORE_FAMILIES are made for the
round trips of random ids (test_round_trip.py): nearer to the published ones, and with vocabularies that are harsher
than any trained one, since any id may follow any other there.
"""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from typing import Any

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


# --------------------------------------------------------------------------------------------------- more families

MULTILINGUAL = [
    *CORPUS[:6],
    "👩‍👩‍👧‍👦 and 🏳️‍🌈! naïve e\u0301 Ω≈ç√",
    "ไทยไม่เว้นวรรค العربية हिन्दी 한국어",
    "  a\t\n\n \u00a0 ' n't . , ?",
]
LLAMA3_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def gpt2_of_torn_characters() -> tuple[Backend, dict[str, Any]]:
    """Like GPT-2, but tokens are slices of UTF-8 at random places: ends, middles and beginnings of characters."""
    rng = random.Random("torn")
    data = "".join(MULTILINGUAL).encode()
    letters = _byte_letters()
    slices = [data[at : at + rng.randrange(2, 9)] for at in (rng.randrange(len(data)) for _ in range(400))]
    entries = dict.fromkeys([*letters, *("".join(letters[byte] for byte in piece) for piece in slices)])
    backend = Backend(models.BPE({entry: n for n, entry in enumerate(entries)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>"])
    return backend, {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}


def llama3_bpe() -> tuple[Backend, dict[str, Any]]:
    """Like Llama 3: its pattern of pieces, special tokens behind all others, bos from the post-processor."""
    backend = Backend(models.BPE(ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(MULTILINGUAL * 4, trainer)
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    backend.add_special_tokens(special)
    bos = backend.token_to_id(special[0])
    template = processors.TemplateProcessing(f"{special[0]} $A", f"{special[0]} $A $B", [(special[0], bos)])
    backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return backend, {"bos_token": special[0], "eos_token": special[4]}


def gemma_bpe() -> tuple[Backend, dict[str, Any]]:
    """Like Gemma: SentencePiece BPE with byte fallback, but nothing put in front and nothing stripped."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    turns = [AddedToken("<start_of_turn>", special=True), AddedToken("\n\n"), AddedToken("▁▁▁")]
    return _listed_bpe(special, turns, steps), {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}


def phi3_bpe() -> tuple[Backend, dict[str, Any]]:
    """Like Llama 2 and Phi-3: one space stripped in front of the text, added tokens that swallow spaces."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    turns = [AddedToken(f"<|{name}|>", rstrip=True, special=True) for name in ("user", "assistant", "end")]
    backend = _listed_bpe(["<unk>", "<s>", "</s>"], [*turns, AddedToken(" two words "), AddedToken("▁x")], steps)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return backend, {"bos_token": "<s>", "eos_token": "<|end|>", "unk_token": "<unk>"}


def t5_unigram() -> tuple[Backend, dict[str, Any]]:
    """Like T5: no byte fallback, a space put in front of every text, sentinels behind the vocabulary."""
    backend = _unigram(["<pad>", "</s>", "<unk>"])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    backend.add_special_tokens([f"<extra_id_{n}>" for n in range(4)])
    return backend, {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def xlm_roberta_unigram() -> tuple[Backend, dict[str, Any]]:
    """Like XLM-R: its own order of special tokens, and a mask that swallows the space before it."""
    backend = _unigram(["<s>", "<pad>", "</s>", "<unk>"])
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="first")]
    )
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    backend.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    return backend, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "mask_token": "<mask>"}


def bert_wordpiece() -> tuple[Backend, dict[str, Any]]:
    """Like BERT: ## continues a word, and the decoder itself cleans up the spaces, token by token."""
    backend, config = wordpiece()
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    backend.add_tokens(["##", "## n't", " ."])
    return backend, {**config, "clean_up_tokenization_spaces": False}


def added_in_the_middle() -> tuple[Backend, dict[str, Any]]:
    """Byte-level, with added tokens all over the vocabulary, special ones and plain ones.

    Their texts are the awkward ones: of letters that stand for bytes, with a space, with letters that stand for none.
    """
    letters = _byte_letters()
    plain = ["<tool call>", "<think>", "ĠĠ", "é", "Ã", "日本", "\n", "🙂", "<0xE2>"]
    special = ["<|im_start|>", "<|im_end|>", "<|vision pad|>", "</s>", "ðŁ"]
    entries = [*letters, *plain, *special]
    random.Random("middle").shuffle(entries)
    backend = Backend(models.BPE({entry: n for n, entry in enumerate(entries)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in plain])
    backend.add_special_tokens(special)
    return backend, {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}


MORE_FAMILIES = {
    make.__name__: make
    for make in (
        gpt2_of_torn_characters, llama3_bpe, gemma_bpe, phi3_bpe, t5_unigram, xlm_roberta_unigram, bert_wordpiece,
        added_in_the_middle,
    )
}  # fmt: skip


@functools.cache
def made(name: str) -> Tokenizer:
    """The tokenizer of a family, made once a session."""
    return Tokenizer(*{**FAMILIES, **MORE_FAMILIES}[name]())


def _byte_letters() -> list[str]:
    """The letter that stands for each byte in a byte-level vocabulary, told by the library."""
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    sample = "".join(map(chr, range(0x800)))  # all bytes but 0xE0 and above, and what never occurs in UTF-8
    letters = dict(zip(sample.encode(), splitter.pre_tokenize_str(sample)[0][0]))
    rest = iter(sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(letters.values())))
    return [letters.get(byte) or next(rest) for byte in range(256)]


def _listed_bpe(special: list[str], added: list[AddedToken], steps: list[decoders.Decoder]) -> Backend:
    """SentencePiece BPE with byte fallback: special tokens, bytes, pieces of text, and added ones in the middle."""
    rng = random.Random(special[0])
    data = "▁" + "".join(MULTILINGUAL).replace(" ", "▁")
    pieces = [data[at : at + rng.randrange(1, 6)] for at in (rng.randrange(len(data)) for _ in range(300))]
    middle = [*dict.fromkeys(pieces), "▁", "▁▁"]
    for token in added:
        middle.insert(rng.randrange(len(middle)), token.content)
    entries = dict.fromkeys([*special, *BYTES, *middle])
    vocabulary = {entry: n for n, entry in enumerate(entries)}
    backend = Backend(models.BPE(vocabulary, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(special)
    backend.add_tokens(added)
    return backend


def _unigram(special: list[str]) -> Backend:
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=400, special_tokens=special, unk_token="<unk>", show_progress=False)
    backend.train_from_iterator(MULTILINGUAL, trainer)
    return backend
