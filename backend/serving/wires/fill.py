"""Requests that fill in the middle: the key `fill` of the model `everbatch`."""

from __future__ import annotations

from msgspec import Struct

from backend.api import InvalidRequest, Unsupported
from backend.serving.intake.requests import ServingContext
from backend.serving.wires.limits import most_tokens, prompt_too_long
from backend.text.fim import Filling, FimWriter, Gap
from backend.text.tokenizer import Tokenizer

MAX_FILES = 1024
MAX_PATH = 4096  # characters
USUAL_MIDDLE = 256  # tokens that are kept free of files where the request does not say how long the middle may be
NO_TOKENS = (
    "fill cannot be served: the tokenizer of this model has no tokens for filling in the middle; send the prompt alone, or"
    " serve a model that has them, such as Qwen2.5-Coder, StarCoder2, CodeGemma, DeepSeek-Coder, Granite or Codestral"
)


class File(Struct, frozen=True, forbid_unknown_fields=True):
    text: str
    path: str = "tmp"


class Fill(Struct, frozen=True, forbid_unknown_fields=True):
    """The texts around the gap; `files`: others of the project, the most important one last."""

    prefix: str
    suffix: str
    files: list[File] = []

    def filling(
        self, writer: FimWriter | None, tokenizer: Tokenizer, max_tokens: int | None, context: ServingContext
    ) -> Filling:
        """The prompt. Raises Unsupported where the model has no tokens for it, and InvalidRequest."""
        if writer is None:
            raise Unsupported(NO_TOKENS)
        if len(self.files) > MAX_FILES:
            raise InvalidRequest(f"fill.files has {len(self.files)} entries, the limit is {MAX_FILES}; send fewer")
        if any(len(file.path) > MAX_PATH for file in self.files):
            raise InvalidRequest(f"fill.files has a path of more than {MAX_PATH} characters; shorten it")
        most = context.model.max_seq_len
        for text in (self.prefix, self.suffix):
            if len(text) >= most and (least := tokenizer.least_tokens(text)) >= most:
                raise prompt_too_long(f"at least {least}", most)
        room = most_tokens(context) - (USUAL_MIDDLE if max_tokens is None else max(1, max_tokens))
        gap = Gap(self.prefix, self.suffix, [(file.path, file.text) for file in self.files])
        return writer.written(gap, room)
