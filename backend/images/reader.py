"""ImageReader: decodes images in a process that has limits of time and memory (process.py), and puts them into prompts.

An image file is a program for a decoder: a small one may become gigabytes. In the stub that would end every request of the model;
here it ends one, with an error that names the limit.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from backend.api.config.schema import ImagesConfig
from backend.api.errors import EngineUnavailable, EverbatchError, InvalidRequest, Unsupported
from backend.api.images import ImageInput, digest_of
from backend.api.tensor import TensorData
from backend.core.limited_messages import Ending, Limits, Outcome
from backend.core.limited_process import LimitedProcess, limit_passed
from backend.text.tokenizer import Tokenizer

log = logging.getLogger("everbatch.serving")
CPU_S = 8.0
BYTES_PER_PIXEL = (
    24  # for the image, its copies by channel, and what the processor makes; 16 were enough for 33 million
)
LEAST_BYTES = 256 << 20
PATIENCE_S = 20.0  # for one image, on a machine whose processors are busy
SERVER = "server"  # the place of an outcome that is refused because of the server's own files
MAX_PIXEL_BYTES = 48 << 20  # a request has no more: a frame between processes holds 64 MiB
KEPT_BYTES = 64 << 20  # images that were read lately are kept so far


class ImageSetup(Struct, frozen=True, forbid_unknown_fields=True):
    """The first message to the process."""

    directory: str  # where the checkpoint is
    max_pixels: int
    limits: Limits  # for each image


class ReadImage(Struct, frozen=True, forbid_unknown_fields=True):
    """`text`: what stands in the prompt for the image. The rest is ImageInput's."""

    text: str
    placeholder: str  # that it takes the place of
    inputs: dict[str, TensorData]
    scale: tuple[float, tuple[float, ...], tuple[float, ...]] | None = None


class Placed(Struct, frozen=True):
    """A prompt with the tokens of its images."""

    ids: list[int]
    images: tuple[ImageInput, ...]


class ImageReader:
    """Several threads may call it. The process starts with the first image, and again after its death."""

    def __init__(self, directory: str, config: ImagesConfig, limits: Limits | None = None) -> None:
        self._limits = limits or Limits(CPU_S, LEAST_BYTES + BYTES_PER_PIXEL * config.max_pixels)
        setup = ImageSetup(directory, config.max_pixels, self._limits)
        self.process = LimitedProcess("backend.images.process", setup)
        self._kept: OrderedDict[bytes, ReadImage] = OrderedDict()
        self._kept_bytes = 0
        self._lock = threading.Lock()

    def place(self, ids: list[int], files: Sequence[bytes], token_id: int, tokenizer: Tokenizer) -> Placed:
        """Put images into a prompt, whose `ids` have the placeholder of each. token_id: the model's for images.

        Raises InvalidRequest for a file that is no image within the limits, and where the prompt has more or fewer places.
        """
        read = [self.read(data) for data in files]
        places = tokenizer.encode(read[0].placeholder, add_special_tokens=False)
        if len(places) != 1 or ids.count(places[0]) != len(read):
            found = ids.count(places[0]) if len(places) == 1 else 0
            raise InvalidRequest(
                f"the prompt has {found} places for images ({read[0].placeholder}), and the request has {len(read)} images; give "
                f"one place for each: a chat message's content part of the type image, or the placeholder in a prompt"
            )
        if (size := sum(map(_size, read))) > MAX_PIXEL_BYTES:
            raise InvalidRequest(
                f"the model's processor makes {size} bytes of the request's images, the limit is {MAX_PIXEL_BYTES} in all; send "
                f"fewer or smaller ones"
            )
        texts = _Texts(tokenizer)
        images, left = list[ImageInput](), iter(read)
        for each in ids:
            if each != places[0]:
                texts.add(each)
                continue
            image = next(left)
            own = texts.put(image.text)
            if not (count := own.count(token_id)):
                raise Unsupported(
                    f"the checkpoint's processor and its tokenizer disagree: an image becomes {own[:4]}, none of which is the "
                    f"model's token {token_id} for images; use another copy of the checkpoint"
                )
            digest = digest_of(count, image.inputs, image.scale)
            images.append(ImageInput(token_id, count, digest, image.inputs, image.scale))
        return Placed(texts.all_ids(), tuple(images))

    def read(self, data: bytes) -> ReadImage:
        """Raises InvalidRequest where a limit is passed or the file is no image, and EngineUnavailable without a process."""
        key = hashlib.sha256(data).digest()
        with self._lock:
            if (kept := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return kept
        outcome = self._outcome(data)
        if outcome.ending is not Ending.DONE:
            raise self._error_of(outcome)
        read = msgspec.msgpack.decode(outcome.result, type=ReadImage)
        self._keep(key, read)
        return read

    def start(self) -> None:
        """Start the process in advance."""
        try:
            self.process.start()
        except OSError as error:  # the first image then fails with this error
            log.error("no process to read images can be started: %s", error)

    def close(self) -> None:
        """End the process."""
        self.process.close()

    def _keep(self, key: bytes, read: ReadImage) -> None:
        with self._lock:
            if key not in self._kept:
                self._kept[key] = read
                self._kept_bytes += _size(read)
            while self._kept_bytes > KEPT_BYTES:
                self._kept_bytes -= _size(self._kept.popitem(last=False)[1])

    def _outcome(self, data: bytes) -> Outcome:
        try:
            return self.process.outcome_of(data, PATIENCE_S)
        except OSError as error:
            log.error("no process to read images can be started: %s", error)
            return Outcome(0, Ending.LOST)

    def _error_of(self, outcome: Outcome) -> EverbatchError:
        if outcome.ending is Ending.REFUSED and outcome.place == SERVER:
            return Unsupported(f"{outcome.text}; the checkpoint on this server cannot read images: send text only")
        if outcome.ending is Ending.REFUSED:
            return InvalidRequest(outcome.text)
        what = limit_passed(outcome, self._limits, PATIENCE_S)
        if outcome.ending is Ending.FAILED:
            log.error("reading an image failed: %s", outcome.text)
            what = "ends the process that reads it"
        if what is None:
            return EngineUnavailable("images cannot be read, because the process for it has ended; try again later")
        return InvalidRequest(f"reading the image {what}; send a smaller one, or another file of it")


class _Texts:
    """Token ids of a prompt, into which texts are put. White space at the ends of a text and that beside it in the prompt become
    tokens together, as in a prompt that is written as one text: line ends in front of an image are one token (Gemma 3).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._space = ""  # behind the last text

    def add(self, token_id: int) -> None:
        if self._space:
            text = self._tokenizer.decode([token_id], skip_special_tokens=False)
            if text.isspace():
                self._space += text
                return
            self._close()
        self._ids.append(token_id)

    def put(self, text: str) -> list[int]:
        """Put a text behind the tokens so far, and return the ids of what it is without white space at its ends."""
        bare = text.strip()
        if text[: len(text) - len(text.lstrip())] or self._space:
            self._space += text[: len(text) - len(text.lstrip())]
            while self._ids and (before := self._tokenizer.decode(self._ids[-1:], skip_special_tokens=False)).isspace():
                self._space = before + self._space
                del self._ids[-1]
            self._close()
        own = self._tokenizer.encode(bare, add_special_tokens=False)
        self._ids += own
        self._space = text[len(text.rstrip()) :]
        return own

    def all_ids(self) -> list[int]:
        self._close()
        return self._ids

    def _close(self) -> None:
        if self._space:
            self._ids += self._tokenizer.encode(self._space, add_special_tokens=False)
        self._space = ""


def _size(read: ReadImage) -> int:
    return sum(len(tensor.data) for tensor in read.inputs.values())
