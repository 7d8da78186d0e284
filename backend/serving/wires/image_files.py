"""Images of a request into its prompt: files in base64, data: URLs, pixels."""

from __future__ import annotations

from collections.abc import Sequence

from backend.api.errors import InvalidRequest, Unsupported
from backend.api.image_limits import ImageLimits, check_num_images
from backend.images.files import MAX_HEAD, base64_of_url, bitmap, check_size, of_base64
from backend.images.reader import Placed
from backend.serving.intake.batch import Batch
from backend.serving.intake.requests import ServingContext
from backend.serving.wires.front import TextTools
from backend.serving.wires.limits import check_length

TWICE = "twice images.max_bytes in base64"
REMEDY = (
    "send a URL data:image/png;base64,... with the file in it, or send the request to the OpenAI endpoint, which fetches from "
    "hosts of --allow-image-hosts"
)


def most_encoded_bytes(context: ServingContext) -> int:
    """The most bytes in base64 that the images of a request have together."""
    return -(-4 * 2 * context.config.images.max_bytes // 3)


def check_encoded(batch: Batch, name: str, context: ServingContext) -> None:
    """Raise InvalidRequest for more images, or longer ones, than a row of a STRING input may have. Nothing is decoded."""
    count = max(1, context.config.images.max_images)  # an empty text is none
    for row in range(batch.num_rows):
        batch.check_texts(name, row, count, most_encoded_bytes(context) + count * MAX_HEAD, TWICE)


def place_images(encoded: Sequence[str], ids: list[int], context: ServingContext, tools: TextTools) -> Placed:
    """encoded: base64. Raises InvalidRequest or Unsupported."""
    _check_number(len(encoded), context)
    most = context.config.images.max_bytes
    return _placed([of_base64(text, index, most) for index, text in enumerate(encoded)], ids, context, tools)


def place_inputs(
    batch: Batch, row: int, ids: list[int], context: ServingContext, tools: TextTools, *, urls: str, pixels: str = ""
) -> Placed:
    """The images of a row of a request. urls: the STRING input that has data: URLs. pixels: the UINT8 input [images, height,
    width, 3]. Raises InvalidRequest or Unsupported.
    """
    texts, array = [text for text in batch.texts(urls, row) if text], batch.array(pixels) if pixels else None
    if array is None or not array[row].size:
        encoded = [base64_of_url(urls, text, REMEDY) for text in texts]
        return place_images(encoded, ids, context, tools) if texts else Placed(ids, ())
    if texts:
        raise InvalidRequest(f"{urls} and {pixels} both have images; send all in one of them")
    _check_number(len(array[row]), context)
    return _placed([bitmap(pixels, each) for each in array[row]], ids, context, tools)


def _placed(files: Sequence[bytes], ids: list[int], context: ServingContext, tools: TextTools) -> Placed:
    for index, data in enumerate(files):
        check_size(index, len(data), context.config.images.max_bytes)
    if tools.images is None:
        raise Unsupported("this model of the server reads no images; use the model everbatch")
    placed = tools.images.place(ids, files, context.model.image_token_id, tools.tokenizer)
    check_length(len(placed.ids), context)
    return placed


def _check_number(count: int, context: ServingContext) -> None:
    model = context.model
    check_num_images(count, ImageLimits(model.image_token_id, model.image_refusal, context.config.images))
