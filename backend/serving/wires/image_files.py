"""Image files of a request, in base64 or as they are, into its prompt."""

from __future__ import annotations

import binascii
from collections.abc import Sequence

from backend.api.errors import InvalidRequest, Unsupported
from backend.api.image_limits import ImageLimits, check_num_images
from backend.serving.intake.images import Placed
from backend.serving.intake.requests import ServingContext
from backend.serving.wires.front import TextTools


def place_images(encoded: Sequence[str], ids: list[int], context: ServingContext, tools: TextTools) -> Placed:
    """encoded: base64. Raises InvalidRequest or Unsupported."""
    _check_number(len(encoded), context)
    most = context.config.images.max_bytes
    for index, text in enumerate(encoded):
        if len(text) > -(-4 * most // 3) + 4:
            raise _too_large(index, 3 * len(text) // 4, most)
    return place_files([_decoded(text, index) for index, text in enumerate(encoded)], ids, context, tools)


def place_files(files: Sequence[bytes], ids: list[int], context: ServingContext, tools: TextTools) -> Placed:
    """Raises InvalidRequest or Unsupported."""
    _check_number(len(files), context)
    most = context.config.images.max_bytes
    for index, data in enumerate(files):
        if len(data) > most:
            raise _too_large(index, len(data), most)
    if tools.images is None:
        raise Unsupported("this model of the server reads no images; use the model everbatch")
    return tools.images.place(ids, files, context.model.image_token_id, tools.tokenizer)


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
