"""Checks the images of a request against its tokens and the model."""

from __future__ import annotations

from msgspec import Struct

from backend.api.config.schema import ImagesConfig
from backend.api.errors import InvalidRequest, Unsupported
from backend.api.request import Request


class ImageLimits(Struct, frozen=True):
    """`token_id`: the id that stands for images in prompts; -1: the model takes none, for the reason `refusal`."""

    token_id: int = -1
    refusal: str = ""
    caps: ImagesConfig = ImagesConfig()


NO_IMAGES = ImageLimits()


def check_num_images(count: int, limits: ImageLimits) -> None:
    """Raise Unsupported where the model takes no images, and InvalidRequest for more than are allowed."""
    if count and limits.token_id < 0:
        raise Unsupported(limits.refusal or "the model reads text only, and the request has images; leave them out")
    if count > limits.caps.max_images:
        raise InvalidRequest(
            f"the request has {count} images, the limit is {limits.caps.max_images} (images.max_images); leave some out"
        )


def check_images(request: Request, limits: ImageLimits) -> None:
    """Raise InvalidRequest or Unsupported for images that do not go with the rest of a request."""
    images = request.images
    if not images:
        return
    check_num_images(len(images), limits)
    for is_given, name in (
        (request.session is not None, "a session"),
        (request.context_only or bool(request.kv_state), "context_only or a kv_state"),
        (
            request.prompt_embeddings is not None or request.position_ids is not None,
            "prompt_embeddings or position_ids",
        ),
    ):
        if is_given:
            raise Unsupported(f"images do not go with {name} in this version; send the request without it")
    wanted, found = sum(image.num_tokens for image in images), request.input_token_ids.count(limits.token_id)
    if wanted != found or any(image.token_id != limits.token_id or image.num_tokens < 1 for image in images):
        raise InvalidRequest(
            f"the prompt has {found} tokens {limits.token_id}, which stand for images, and the {len(images)} images of the "
            f"request need {wanted}; give one place in the prompt for each image"
        )
