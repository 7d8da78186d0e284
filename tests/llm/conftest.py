"""A tiny checkpoint with a vocabulary of 32,000 tokens, as document 002 has them, and an LLM over it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from backend.text.tokenizer import Tokenizer
from compat.llm import LLM
from tests.llm.helpers import make_tokenizer
from tests.text.tokenizers_made import write_directory

VOCAB_SIZE = 32_000
SPECIAL = ["<unk>", "<s>", "</s>"]


def write_tokenizer(path: Path) -> Path:
    """Byte-level: three special tokens, the bytes, and words that no text is encoded to."""
    entries = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    entries += [f"Ġw{n}" for n in range(VOCAB_SIZE - len(entries))]
    backend = Backend(models.BPE({entry: n for n, entry in enumerate(entries)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    return write_directory(path, backend, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"})


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tools.make_random_model import make_random_model

    path = make_random_model(tmp_path_factory.mktemp("model"), seed=2, family="llama", vocab_size=VOCAB_SIZE)
    return write_tokenizer(path)


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return make_tokenizer()


@pytest.fixture(scope="session")
def llm(model_dir: Path) -> Iterator[LLM]:
    with LLM(model_dir) as llm:
        yield llm
