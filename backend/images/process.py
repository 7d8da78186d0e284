"""The process that reads images: `python -m backend.images.process FD`, FD being its end of a socket pair.

An image is decoded by Pillow and goes through the checkpoint's own image processor, as transformers has it, in a child with
limits (core/limited_server.py). The process runs without torch, because it forks: transformers' processors for Pillow need numpy
alone.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from PIL import Image, ImageOps, UnidentifiedImageError

from backend.api.checkpoint.model_files import read_object, shown
from backend.api.errors import ConfigError, EverbatchError, InvalidRequest
from backend.api.tensor import TensorData
from backend.core.limited_messages import Begin, Ending, Limits, Outcome
from backend.core.limited_server import Perform, serve_jobs
from backend.images.reader import SERVER, ImageSetup, ReadImage

IMAGES_OF_CHILD = 20
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
ENDINGS = "PNG, JPEG, WebP, GIF, BMP or TIFF"
_WITHOUT = ("torch", "torchvision", "tensorflow", "jax", "flax")  # they start threads, which do not survive a fork
# Families whose replacement of the placeholder is that of another one, whose class needs no further packages.
_OTHERS = {"smolvlm": "Idefics3Processor"}
_PIXTRAL = "PixtralProcessor"


def decoded(data: bytes, max_pixels: int) -> Any:
    """An RGB image, upright. Raises InvalidRequest for bytes that are no single picture of a size that is allowed."""
    Image.MAX_IMAGE_PIXELS = None  # the size is checked here, before a pixel is decoded
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        width, height = image.size
        if not 0 < width * height <= max_pixels:
            raise InvalidRequest(
                f"the image has {width} x {height} pixels, the limit is {max_pixels} in all (images.max_pixels); make it smaller"
            )
        if image.format != "MPO" and getattr(image, "is_animated", False):
            raise InvalidRequest(f"the image has several frames ({image.format}); send one picture")
        image.load()
        return _rgb(ImageOps.exif_transpose(image))
    except UnidentifiedImageError:
        raise InvalidRequest(f"the image is no file of the types {ENDINGS}; convert it") from None
    except (EverbatchError, MemoryError):
        raise
    except Exception as error:  # decoders raise what they please on broken files
        raise InvalidRequest(f"the image cannot be decoded ({type(error).__name__}); its file is broken") from None


def _rgb(image: Any) -> Any:
    """Without an alpha channel, over white; 16 bits become 8."""
    if image.mode.startswith(("I", "F")):
        least, most = image.getextrema()
        factor = 1 / 257 if image.mode.startswith("I") and most > 255 else 255.0 if most <= 1 else 1.0
        image = image.convert("F").point(lambda value: value * factor).convert("L")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")


class Processor:
    """The image processor of a checkpoint, and what its placeholder in a prompt becomes for an image."""

    def __init__(self, setup: ImageSetup) -> None:
        """Raises ConfigError for a directory without one that can be read."""
        directory = Path(setup.directory)
        kind = (read_object(directory, "config.json") or {}).get("model_type")
        self._max_pixels = setup.max_pixels
        Image.init()  # loads the decoders of all FORMATS, once for all children
        try:
            transformers = _without_torch()
            self._images = transformers.AutoImageProcessor.from_pretrained(
                directory, backend="pil", local_files_only=True, trust_remote_code=False
            )
            self._texts = _texts_of(str(kind), self._images, directory)
        except Exception as error:  # the library raises what it pleases on settings that it does not know
            raise ConfigError(
                f"the image processor cannot be loaded: {type(error).__name__}: {shown(str(error))}"
            ) from None
        self.placeholder: str = self._texts.image_token

    def read(self, data: bytes) -> ReadImage:
        image = decoded(data, self._max_pixels)
        kept = getattr(self._images, "do_rescale", True), getattr(self._images, "do_normalize", True)
        options: dict[str, Any] = {"do_rescale": False, "do_normalize": False} if all(kept) else {}
        if "idefics" in type(self._images).__name__.lower() or "smolvlm" in type(self._images).__name__.lower():
            options["return_row_col_info"] = True
        if isinstance(self._texts, PixtralTexts):
            options["patch_size"] = self._texts.patch_size * self._texts.spatial_merge_size
        try:
            found = dict(self._images(images=[image], return_tensors="np", **options))
            text = self._texts.replace_image_token(found, 0)
        except MemoryError:
            raise
        except Exception as error:  # such as a shape that the processor refuses
            reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
            raise InvalidRequest(f"the model's image processor refuses the image: {shown(reason)}") from None
        inputs = {name: _tensor(value) for name, value in found.items() if name not in ("rows", "cols")}
        scale = None
        if options.get("do_rescale") is False:
            means, deviations = (tuple(map(float, getattr(self._images, name))) for name in ("image_mean", "image_std"))
            scale = (float(self._images.rescale_factor), means, deviations)
        return ReadImage(
            text, self.placeholder, {name: tensor for name, tensor in inputs.items() if tensor is not None}, scale
        )


def _tensor(value: Any) -> TensorData | None:
    """None for what is no array. Pixels that are whole numbers take a byte each."""
    import numpy as np

    try:
        array = np.asarray(value)
    except ValueError:
        return None
    if array.dtype.kind not in "biuf":
        return None
    if array.dtype.kind == "f":
        array = array.astype(np.float32)
        whole = array.astype(np.uint8)
        array = (
            whole if array.size and 0 <= array.min() and array.max() <= 255 and np.array_equal(whole, array) else array
        )
    elif array.dtype != np.uint8:
        array = array.astype(np.int64)
    return TensorData(str(array.dtype), tuple(array.shape), np.ascontiguousarray(array).tobytes())


class PixtralTexts:
    """transformers' PixtralProcessor without its import of torchvision: a row of image tokens ends with a break, the last with
    the end of the image.
    """

    def __init__(
        self,
        image_processor: Any,
        tokenizer: object,
        patch_size: int = 16,
        spatial_merge_size: int = 1,
        image_token: str = "[IMG]",
        image_break_token: str = "[IMG_BREAK]",
        image_end_token: str = "[IMG_END]",
        **others: Any,
    ) -> None:
        self.patch_size, self.spatial_merge_size = patch_size, spatial_merge_size
        self.image_token, self._break, self._end = image_token, image_break_token, image_end_token

    def replace_image_token(self, found: dict[str, Any], index: int) -> str:
        rows, columns = (
            int(size) // (self.patch_size * self.spatial_merge_size) for size in found["image_sizes"][index]
        )
        row = self.image_token * columns
        return (row + self._break) * (rows - 1) + row + self._end


class _Tokens:
    """Stands for the tokenizer that a processor asks for the names of its special tokens."""

    init_kwargs: dict[str, Any] = {}

    def __init__(self, names: dict[str, str]) -> None:
        self.__dict__.update(names)
        self.__dict__.update({f"{name}_id": 0 for name in names})

    def convert_tokens_to_ids(self, token: object) -> int:
        return 0

    def encode(self, text: str, **options: Any) -> list[int]:
        return [0]

    def add_special_tokens(self, tokens: object) -> None:
        pass


def _texts_of(kind: str, images: Any, directory: Path) -> Any:
    """The processor of texts and images of a family, without a tokenizer. Raises whatever the library raises."""
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
    from transformers.processing_utils import ProcessorMixin

    settings = read_object(directory, "processor_config.json") or {}
    name = _OTHERS.get(kind) or PROCESSOR_MAPPING_NAMES[kind]
    if settings.get("processor_class") == _PIXTRAL:  # in a checkpoint of LLaVA's form
        name = _PIXTRAL
    if name == _PIXTRAL:
        made: Any = PixtralTexts
    else:  # not as an attribute of the package, which hides classes whose processors of videos need torchvision
        place = transformers._class_to_module[name].removeprefix("transformers.")
        made = getattr(importlib.import_module(f"transformers.{place}"), name)
    tokenizer = read_object(directory, "tokenizer_config.json") or {}
    own = tokenizer.get("extra_special_tokens")
    named = {**(own if isinstance(own, dict) else {}), **tokenizer}
    tokens = _Tokens({key: value for key, value in named.items() if key.endswith("_token") and isinstance(value, str)})

    def set_parts(self: Any, image_processor: Any = None, tokenizer: Any = None, *others: Any, **more: Any) -> None:
        self.image_processor, self.tokenizer = image_processor, tokenizer

    given = {key: value for key, value in settings.items() if isinstance(value, str | int | float)}
    for key in ("processor_class", "chat_template", "auto_map"):
        given.pop(key, None)
    whole, ProcessorMixin.__init__ = ProcessorMixin.__init__, set_parts
    try:
        return made(image_processor=images, tokenizer=tokens, **given)
    finally:
        ProcessorMixin.__init__ = whole


def _without_torch() -> Any:
    """transformers, which takes torch for absent."""
    find = importlib.util.find_spec
    importlib.util.find_spec = lambda name, package=None: (
        None if name.split(".")[0] in _WITHOUT else find(name, package)
    )
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that torch is absent, which it is on purpose
    import transformers

    return transformers


def read_image(processor: Processor, begin: Begin) -> Outcome:
    """Raises MemoryError."""
    try:
        read = processor.read(begin.task)
    except EverbatchError as error:
        return Outcome(begin.job, Ending.REFUSED, text=error.message)
    return Outcome(begin.job, Ending.DONE, msgspec.msgpack.encode(read))


def set_up(body: bytes) -> tuple[Perform, Limits]:
    setup = msgspec.msgpack.decode(body, type=ImageSetup)
    try:
        return partial(read_image, Processor(setup)), setup.limits
    except ConfigError as error:
        return partial(_refuse, error.message), setup.limits


def _refuse(reason: str, begin: Begin) -> Outcome:
    return Outcome(begin.job, Ending.REFUSED, text=reason, place=SERVER)


if __name__ == "__main__":
    sys.exit(serve_jobs("images", set_up, jobs_of_child=IMAGES_OF_CHILD))
