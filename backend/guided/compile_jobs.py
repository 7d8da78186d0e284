"""CompileProcess: guides that are compiled under limits, in a process of their own (compile_process.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec
from msgspec import Struct

from backend.api.guide import Guide
from backend.core.limited_messages import Limits, Outcome
from backend.core.limited_process import LimitedJob, LimitedProcess
from backend.guided.protocol import GuideBackend
from backend.guided.vocabulary import TokenizerInfo, Vocabulary
from backend.text.tokenizer import Tokenizer


class Materials(Struct, frozen=True, forbid_unknown_fields=True):
    """What a library that compiles guides is made of. The engine and the process that compiles make one each."""

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


encode_guide = msgspec.msgpack.Encoder().encode
decode_guide = msgspec.msgpack.Decoder(Guide).decode


class CompileSetup(Struct, frozen=True, forbid_unknown_fields=True):
    """The first message to the process."""

    materials: Materials
    limits: Limits  # for each guide


class Jobs(Protocol):
    """Compiles guides under limits. Several threads may call it."""

    def start(self) -> None:
        """Start the process in advance. Raises OSError if it cannot be started."""
        ...

    def wait_until_ready(self) -> None:
        """Wait until the process has started, or has failed to."""
        ...

    def run(self, job: LimitedJob, guide: Guide) -> Outcome:
        """Run a job and wait for its outcome, which comes within milliseconds after `drop`. Raises OSError if no process can be
        started.
        """
        ...

    def close(self) -> None:
        """End the process. Running jobs are lost."""
        ...


class CompileProcess:
    """Implements Jobs. The process starts with the first job, and again after its death."""

    def __init__(self, setup: CompileSetup) -> None:
        self.process = LimitedProcess("backend.guided.compile_process", setup)

    def start(self) -> None:
        self.process.start()

    def wait_until_ready(self) -> None:
        self.process.wait_until_ready()

    def run(self, job: LimitedJob, guide: Guide) -> Outcome:
        return self.process.run(job, encode_guide(guide))

    def close(self) -> None:
        self.process.close()
