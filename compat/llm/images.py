"""Pictures beside prompts: their files, and their places in token ids."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from backend.api import InvalidRequest, Unsupported
from backend.api.config.schema import ImagesConfig
from backend.api.image_limits import ImageLimits, check_num_images
from backend.core.step import ModelInfo
from backend.images.files import base64_of_url, check_size, of_base64
from backend.images.reader import ImageReader
from backend.text.tokenizer import Tokenizer
from compat.llm.errors import NotHere, ParameterError
from compat.llm.requests import GenerationRequest

KEY = "image"  # in multi_modal_data
REMEDY = "give the path of a file, its bytes, or an image of PIL"
_PNG_MODES = ("1", "L", "LA", "I;16", "P", "RGB", "RGBA")
_PICTURES = {"image_url", "image_pil", "image_data", "image"}  # types of parts of a message
_OF_PART = ("image_url", "image_pil", "image_data", "image", "url", "path", "data")  # fields that may have the picture


class PromptImages:
    """Puts the pictures of requests into their prompts. The first one starts the process that reads them."""

    def __init__(self, directory: str, model: ModelInfo, config: ImagesConfig, tokenizer: Tokenizer | None) -> None:
        self._limits = ImageLimits(model.image_token_id, model.image_refusal, config)
        self._passes_all = model.takes_extra_inputs
        self._reader = ImageReader(directory, config)
        self._tokenizer = tokenizer

    def place(self, request: GenerationRequest) -> None:
        """Let the request have its images, and the tokens of each in its prompt. A second call does nothing.

        Raises NotHere for another kind than images, and for a model without them; ParameterError and InvalidRequest.
        """
        given = request.multimodal_params
        if not given or request.images or self._passes_all:
            return
        if not isinstance(given, Mapping):
            raise TypeError(f'multi_modal_data is a {type(given).__name__}, {{"{KEY}": ...}} is needed')
        if others := sorted(set(given) - {KEY}, key=str):
            raise NotHere(f"multi_modal_data has {str(others[0])[:80]!r}, the models read images ({KEY}); leave it out")
        pictures = given[KEY] if isinstance(given[KEY], list | tuple) else [given[KEY]]
        if not pictures:
            return
        try:
            check_num_images(len(pictures), self._limits)
        except Unsupported as error:
            raise NotHere(error.message) from None
        if self._tokenizer is None:
            raise ParameterError("images need the model's tokenizer; load the model with it")
        most = self._limits.caps.max_bytes
        files = [file_of(picture, index, most) for index, picture in enumerate(pictures)]
        placed = self._reader.place(request.prompt_token_ids, files, self._limits.token_id, self._tokenizer)
        request.prompt_token_ids, request.images = placed.ids, placed.images

    def close(self) -> None:
        self._reader.close()


def file_of(picture: Any, index: int, max_bytes: int) -> bytes:
    """The file of a picture: bytes, a path, a data: URL, or an image of PIL, of which a PNG is made.

    Raises ParameterError and InvalidRequest for what is too large or cannot be read, and TypeError for anything else.
    """
    if isinstance(picture, bytes | bytearray | memoryview):
        data = bytes(picture)
    elif isinstance(picture, str) and (is_url(picture)):
        return of_base64(base64_of_url(f"image {index}", picture, REMEDY), index, max_bytes)
    elif isinstance(picture, str | os.PathLike):
        data = _read(Path(picture), index, max_bytes)
    else:
        data = _png(picture, index)
    check_size(index, len(data), max_bytes)
    return data


def is_url(text: str) -> bool:
    return text[:8].lower().startswith(("data:", "http://", "https://"))


def _read(path: Path, index: int, max_bytes: int) -> bytes:
    """The file, or one byte more of it than is allowed."""
    try:
        with path.expanduser().open("rb") as file:
            return file.read(max_bytes + 1)
    except (
        OSError,
        RuntimeError,
        ValueError,
    ) as error:  # ValueError: a zero byte in the name; RuntimeError: an unknown ~NAME
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "it is no name of a file"
        raise ParameterError(f"image {index}, {str(path)[:200]!r}, cannot be read: {reason}") from None


def _png(picture: Any, index: int) -> bytes:
    from PIL import Image, ImageOps

    if not isinstance(picture, Image.Image):
        raise TypeError(f"image {index} is a {type(picture).__name__}; {REMEDY}")
    upright = ImageOps.exif_transpose(picture)
    plain = upright if upright.mode in _PNG_MODES else upright.convert("RGB")
    file = io.BytesIO()
    plain.save(file, "PNG", compress_level=1)
    return file.getvalue()


def lifted(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[Any]]:
    """The messages as chat templates read them, and the pictures in their parts, in their order."""
    shown, pictures = list[dict[str, Any]](), list[Any]()
    for message in messages:
        parts = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(parts, list):
            pictures += [_picture(part) for part in parts if _is_picture(part)]
            shown.append({**message, "content": [{"type": "image"} if _is_picture(part) else part for part in parts]})
        else:
            shown.append(message)  # type: ignore[arg-type]  # a template says what is wrong with it
    return shown, pictures


def _is_picture(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in _PICTURES


def _picture(part: Mapping[str, Any]) -> Any:
    """The picture of a part: of OpenAI's form, vLLM's, LMDeploy's or transformers'."""
    found = next((part[name] for name in _OF_PART if name in part), None)
    if isinstance(found, Mapping):  # {"image_url": {"url": ...}}, {"image_data": {"data": ...}}
        found = next((found[name] for name in _OF_PART if name in found), None)
    if found is None:
        raise InvalidRequest(f"a part of type {part['type']} of a message has no picture; {REMEDY}")
    return found
