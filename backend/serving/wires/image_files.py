"""Images of a request into its prompt: files in base64, data: URLs, files as they are, pixels."""

from __future__ import annotations

import binascii
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backend.api.errors import InvalidRequest, Unsupported
from backend.api.image_limits import ImageLimits, check_num_images
from backend.serving.intake.batch import Batch
from backend.serving.intake.images import Placed
from backend.serving.intake.requests import ServingContext
from backend.serving.wires.front import TextTools
from backend.serving.wires.limits import check_length

TWICE = "twice images.max_bytes in base64"
_HEAD = 200  # characters of a data: URL ahead of its comma, at most
_LONGEST_SHOWN = 60
_BMP = struct.Struct("<2sIHHIIiiHHIIiiII")  # the header of the file, 14 bytes, and that of the picture, 40


def most_encoded_bytes(context: ServingContext) -> int:
    """The most bytes in base64 that the images of a request have together."""
    return -(-4 * 2 * context.config.images.max_bytes // 3)


def check_encoded(batch: Batch, name: str, context: ServingContext) -> None:
    """Raise InvalidRequest for more images, or longer ones, than a row of a STRING input may have. Nothing is decoded."""
    count = max(1, context.config.images.max_images)  # an empty text is none
    for row in range(batch.num_rows):
        batch.check_texts(name, row, count, most_encoded_bytes(context) + count * _HEAD, TWICE)


def place_images(encoded: Sequence[str], ids: list[int], context: ServingContext, tools: TextTools) -> Placed:
    """encoded: base64. Raises InvalidRequest or Unsupported."""
    _check_number(len(encoded), context)
    most = context.config.images.max_bytes
    for index, text in enumerate(encoded):
        if len(text) > -(-4 * most // 3) + 4:
            raise _too_large(index, 3 * len(text) // 4, most)
    return place_files([_decoded(text, index) for index, text in enumerate(encoded)], ids, context, tools)


def place_inputs(
    batch: Batch, row: int, ids: list[int], context: ServingContext, tools: TextTools, *, urls: str, pixels: str = ""
) -> Placed:
    """The images of a row of a request. urls: the STRING input that has data: URLs. pixels: the UINT8 input [images, height,
    width, 3]. Raises InvalidRequest or Unsupported.
    """
    texts, array = [text for text in batch.texts(urls, row) if text], batch.array(pixels) if pixels else None
    if array is None or not array[row].size:
        return place_images(data_of_urls(urls, texts), ids, context, tools) if texts else Placed(ids, ())
    if texts:
        raise InvalidRequest(f"{urls} and {pixels} both have images; send all in one of them")
    _check_number(len(array[row]), context)
    return place_files([bitmap(pixels, each) for each in array[row]], ids, context, tools)


def data_of_urls(name: str, urls: Sequence[str]) -> list[str]:
    """The base64 of data: URLs. name: the input that has them. Raises InvalidRequest for another URL, which a model does not
    fetch.
    """
    return [_data_of(name, url) for url in urls]


def _data_of(name: str, url: str) -> str:
    head, comma, _ = url[:_HEAD].partition(",")
    scheme, _, parameters = head.partition(":")
    if scheme.lower() != "data" or not comma or "base64" not in parameters.lower().split(";"):
        shown = repr(url) if len(url) <= _LONGEST_SHOWN else f"{url[:_LONGEST_SHOWN]!r}..."
        raise InvalidRequest(
            f"{name} has {shown}, and a model of this server fetches nothing; send a URL data:image/png;base64,... with the "
            f"file in it, or send the request to the OpenAI endpoint, which fetches from hosts of --allow-image-hosts"
        )
    return url[len(head) + 1 :]


def bitmap(name: str, pixels: NDArray[Any]) -> bytes:
    """A file (BMP) of pixels, uint8 [height, width, 3] in RGB. Raises InvalidRequest for another number of channels."""
    height, width, channels = pixels.shape
    if channels != 3:
        raise InvalidRequest(
            f"{name} has pictures of the shape {list(pixels.shape)}; send [height, width, 3], the channels being red, green, blue"
        )
    rows = np.zeros((height, -(-3 * width // 4) * 4), np.uint8)
    rows[:, : 3 * width] = pixels[..., ::-1].reshape(height, 3 * width)
    header = _BMP.pack(b"BM", _BMP.size + rows.size, 0, 0, _BMP.size, 40, width, -height, 1, 24, 0, 0, 0, 0, 0, 0)
    return header + rows.tobytes()


def place_files(files: Sequence[bytes], ids: list[int], context: ServingContext, tools: TextTools) -> Placed:
    """Raises InvalidRequest or Unsupported."""
    _check_number(len(files), context)
    most = context.config.images.max_bytes
    for index, data in enumerate(files):
        if len(data) > most:
            raise _too_large(index, len(data), most)
    if tools.images is None:
        raise Unsupported("this model of the server reads no images; use the model everbatch")
    placed = tools.images.place(ids, files, context.model.image_token_id, tools.tokenizer)
    check_length(len(placed.ids), context)
    return placed


def _check_number(count: int, context: ServingContext) -> None:
    model = context.model
    check_num_images(count, ImageLimits(model.image_token_id, model.image_refusal, context.config.images))


def _too_large(index: int, size: int, most: int) -> InvalidRequest:
    return InvalidRequest(
        f"image {index} has {size} bytes, the limit is {most} (images.max_bytes); send a smaller file"
    )


def _decoded(text: str, index: int) -> bytes:
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError:
        raise InvalidRequest(
            f"image {index} is no base64 (the standard alphabet, without line breaks); encode it so"
        ) from None
