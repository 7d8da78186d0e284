"""Materials: what a library that compiles guides is made of. The engine and the process that compiles make one each."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from backend.guided.protocol import GuideBackend
from backend.guided.vocabulary import TokenizerInfo, Vocabulary
from backend.text.tokenizer import Tokenizer


class Materials(Struct, frozen=True, forbid_unknown_fields=True):
    backend: str  # `llguidance` or `xgrammar`
    vocab_size: int
    eos_ids: tuple[int, ...]  # end ids of the model, for tokenizers that name none
    source: TokenizerInfo | str  # or the directory of the tokenizer

    def make(self) -> GuideBackend:
        """Raises ConfigError for a tokenizer that cannot be read, or does not fit the model."""
        info = self.source
        if isinstance(info, str):
            info = TokenizerInfo.of_tokenizer(Tokenizer.from_directory(info))
        vocabulary = Vocabulary.of(info, self.vocab_size)
        if not vocabulary.stop_ids:
            vocabulary = vocabulary.ending_with(self.eos_ids)
        return backend_maker(self.backend)(vocabulary)


def backend_maker(name: str) -> Callable[[Vocabulary], GuideBackend]:
    """The class of the backend `name`; importing it imports the library."""
    if name == "xgrammar":
        from backend.guided.xgrammar_backend import XGrammarBackend

        return XGrammarBackend
    from backend.guided.llguidance_backend import LLGuidanceBackend

    return LLGuidanceBackend
