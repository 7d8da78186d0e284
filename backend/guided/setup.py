"""Sets guided decoding up for a model: which library compiles, and what its tokens stand for."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

from backend.api.config import GuidedConfig
from backend.api.errors import ConfigError
from backend.api.guide import NOT_SET_UP
from backend.guided.compiler import GuideCompiler
from backend.guided.protocol import GuideBackend
from backend.guided.vocabulary import TokenizerInfo, Vocabulary
from backend.text.tokenizer import Tokenizer

DEFAULT = "llguidance"


def make_guides(
    config: GuidedConfig, model_path: Path | None, vocab_size: int, eos_ids: tuple[int, ...]
) -> tuple[GuideCompiler | None, str]:
    """Returns the compiler and '', or None and why requests with guides are refused.

    model_path: of the tokenizer, if there is one; eos_ids: the model's, where the materials name no end ids. Raises ConfigError
    for a library that is asked for and not installed, and for materials that cannot be read.
    """
    if config.backend == "none":
        return None, f"{NOT_SET_UP}: guided.backend is none; start the engine with another, or leave the guide out"
    name = DEFAULT if config.backend == "auto" else config.backend
    if importlib.util.find_spec(name) is None:
        if config.backend != "auto":
            raise ConfigError(f"guided.backend is {name}, which is not installed; pip install {name}, or use auto")
        return None, f"{NOT_SET_UP}: {name} is not installed; pip install {name}, or leave the guide out"
    info = None if config.tokenizer_info is None else TokenizerInfo.read(config.tokenizer_info)
    if info is None and model_path is None:
        return None, f"{NOT_SET_UP}: the engine has no tokenizer; set guided.tokenizer_info, or leave the guide out"

    def make() -> GuideBackend:
        found = TokenizerInfo.of_tokenizer(Tokenizer.from_directory(model_path or "")) if info is None else info
        vocabulary = Vocabulary.of(found, vocab_size)
        if not vocabulary.stop_ids:
            vocabulary = vocabulary.ending_with(eos_ids)
        return backend_maker(name)(vocabulary)

    return GuideCompiler(config, make), ""


def backend_maker(name: str) -> Callable[[Vocabulary], GuideBackend]:
    """The class of the backend `name`; importing it imports the library."""
    if name == "xgrammar":
        from backend.guided.xgrammar_backend import XGrammarBackend

        return XGrammarBackend
    from backend.guided.llguidance_backend import LLGuidanceBackend

    return LLGuidanceBackend
