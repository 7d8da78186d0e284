"""Checks the images of a request against its tokens and the model."""

from __future__ import annotations

from msgspec import Struct

from backend.api.config.schema import ImagesConfig
from backend.api.errors import InvalidRequest, Unsupported
from backend.api.request import Request


class ImageLimits(Struct, frozen=True):
    """`token_id`: the id that stands for images in prompts; -1: the model takes none, for the reason `refusal`.

    `step_tokens`: where an image must be computed in one step, the most tokens that one may have; None: it need not.
    """

    token_id: int = -1
    refusal: str = ""
    caps: ImagesConfig = ImagesConfig()
    step_tokens: int | None = None


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
    if limits.step_tokens is not None:
        _check_steps(request, limits.step_tokens)
    wanted, found = sum(image.num_tokens for image in images), request.input_token_ids.count(limits.token_id)
    if wanted != found or any(image.token_id != limits.token_id or image.num_tokens < 1 for image in images):
        raise InvalidRequest(
            f"the prompt has {found} tokens {limits.token_id}, which stand for images, and the {len(images)} images of the "
            f"request need {wanted}; give one place in the prompt for each image"
        )


def _check_steps(request: Request, most: int) -> None:
    """Raise where an image could not be computed in one step."""
    output = request.output_config
    if output.prompt_log_probs is not None or output.return_context_logits or output.prompt_logits_of:
        raise Unsupported(
            "log-probabilities and logits of a prompt with images cannot be had of this model, which sees an image as a whole; "
            "leave them out"
        )
    if any(one.gather_context for one in output.additional_outputs):
        raise Unsupported("gather_context of an additional output does not go with images of this model; leave it out")
    if (size := max(image.num_tokens for image in request.images)) > most:
        raise InvalidRequest(
            f"an image has {size} tokens, which must be computed in one step, and a step has {most} beside a full batch; "
            f"serve with a larger scheduler.max_num_tokens, or with a smaller scheduler.max_batch_size"
        )
