"""The default model's vocabulary, and texts fed to matchers token by token."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np

from backend.api.guide import Guide, GuideType
from backend.guided.llguidance_backend import LLGuidanceBackend
from backend.guided.protocol import CompiledGuide, Matcher
from backend.guided.vocabulary import TokenizerInfo, Vocabulary
from backend.text.tokenizer import Tokenizer

MODEL = Path(__file__).resolve().parents[2] / "models" / "default"
VOCAB = 4096


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(MODEL)


@cache
def info() -> TokenizerInfo:
    return TokenizerInfo.of_tokenizer(tokenizer())


@cache
def backend() -> LLGuidanceBackend:
    return LLGuidanceBackend(Vocabulary.of(info(), VOCAB))


def compiled(kind: str, text: str) -> CompiledGuide:
    return backend().compile(Guide(GuideType(kind), text))


def allowed(matcher: Matcher, vocab: int = VOCAB) -> set[int]:
    """The tokens whose bits are set."""
    masks = np.zeros((1, -(-vocab // 32)), dtype=np.int32)
    matcher.fill(masks, 0)
    bits = np.unpackbits(masks.view(np.uint8), count=vocab, bitorder="little")
    return set(bits.nonzero()[0].tolist())


def accepts(guide: CompiledGuide, text: str) -> bool:
    """Whether every token of the text is in the mask ahead of it, and the output may end behind it."""
    matcher = guide.matcher()
    for token_id in tokenizer().encode(text, add_special_tokens=False):
        if token_id not in allowed(matcher):
            return False
        assert matcher.accept(token_id), "the mask allows a token that the matcher refuses"
    return matcher.is_complete
