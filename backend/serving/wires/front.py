"""A front: how one Triton model of one wire reads requests and answers them.

A new wire is a new file here: its table of tensors, `check` and `parse`, the renderer of its outputs. Everything else (threads,
cancellation, streams, metrics, draining) is the ModelServer's, and the same for all.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from backend.api.checkpoint.pooling import Pooling, read_pooling
from backend.api.errors import Unsupported
from backend.api.output_limits import NO_HEAD
from backend.core.step import ModelInfo
from backend.images.reader import ImageReader
from backend.serving.dialect import PLAIN, Dialect
from backend.serving.intake.batch import Batch
from backend.serving.intake.requests import Parameters, ServingContext
from backend.serving.served_model import AtOnce, not_at_once
from backend.serving.tensors import ModelTensors
from backend.serving.work import Work
from backend.text.chat import ChatTemplate
from backend.text.fim import FimWriter
from backend.text.template import MakeRenderer, Renderer
from backend.text.tokenizer import Tokenizer


class TextTools(NamedTuple):
    """The model's tokenizer and chat template, and how it makes embeddings."""

    tokenizer: Tokenizer
    template: ChatTemplate
    pooling: Pooling = Pooling()
    images: ImageReader | None = None  # None: the model takes none
    fim: FimWriter | None = None  # None: the tokenizer has no tokens for filling in the middle

    @classmethod
    def from_directory(cls, path: str, chat_template: str = "", make_renderer: MakeRenderer = Renderer) -> TextTools:
        """`chat_template`: a file in place of the model's own; `make_renderer`: makes what renders it.

        Raises ConfigError when the directory has no tokenizer that can be read, and for a template that cannot.
        """
        tokenizer = Tokenizer.from_directory(path)
        template = ChatTemplate.from_directory(path, tokenizer, chat_template, make_renderer)
        return cls(tokenizer, template, read_pooling(Path(path)), fim=FimWriter.of(tokenizer))

    def template_for(self, model: ModelInfo) -> ChatTemplate:
        """The chat template. Raises Unsupported for a model that generates nothing."""
        if not model.has_head:
            raise Unsupported(NO_HEAD)
        return self.template


class Front(NamedTuple):
    """A model of token ids. `parse` runs on the stub's main thread: one Work per row, or EverbatchError; then no row runs."""

    tensors: ModelTensors
    parse: Callable[[Batch, ServingContext, Parameters], list[Work]]
    dialect: Dialect = PLAIN


class TextFront(NamedTuple):
    """A model of text. `check` runs on the main thread and raises for errors that are quickly found; `parse` tokenises and
    renders, on a text thread, for up to triton.text_timeout_s. `at_once` answers what needs neither text nor engine, also while
    the server is full.
    """

    tensors: ModelTensors
    check: Callable[[Batch, ServingContext], None]
    parse: Callable[[Batch, ServingContext, Parameters, TextTools], list[Work]]
    dialect: Dialect = PLAIN
    at_once: AtOnce = not_at_once
    is_for_chats: bool = False  # True where most requests are chats: what renders them is started with the model
