"""Pictures of LMDeploy's prompts, under the names of `lmdeploy.vl`."""

from __future__ import annotations

import io
from typing import Any

from compat.llm import ParameterError
from compat.llm.images import file_of

IMAGE_TOKEN = "<IMAGE_TOKEN>"  # where a picture stands in a text; without it all stand in front
MAX_BYTES = 256 << 20


def load_image(image_url: Any) -> Any:
    """An RGB image of PIL, upright, from the path of a file, its bytes, a data: URL, or an image of PIL.

    Raises ParameterError and InvalidRequest for what is no image, and for a URL that would have to be fetched.
    """
    from PIL import Image, ImageOps

    try:
        return ImageOps.exif_transpose(Image.open(io.BytesIO(file_of(image_url, 0, MAX_BYTES)))).convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:
        if isinstance(error, ParameterError):
            raise
        raise ParameterError(f"the image cannot be decoded ({type(error).__name__}); convert it") from None


def with_pictures(prompt: Any) -> tuple[str, list[Any]]:
    """The text of a prompt and its pictures: a text alone, or with an image or a list of them. Raises ParameterError."""
    if isinstance(prompt, str):
        return prompt, []
    if not isinstance(prompt, tuple) or len(prompt) != 2 or not isinstance(prompt[0], str):
        raise ParameterError(
            f"a prompt is a {type(prompt).__name__}; a text, (text, image), (text, [image, ...]) or a list of messages is needed"
        )
    text, given = prompt
    return text, list(given) if isinstance(given, list | tuple) else [given]


def content_of(text: str, pictures: list[Any]) -> Any:
    """The content of a message. Raises ParameterError where the text has other places than there are pictures."""
    if not pictures:
        return text
    texts, parts = text.split(IMAGE_TOKEN), [{"type": "image", "image": picture} for picture in pictures]
    if len(texts) == 1:
        return [*parts, {"type": "text", "text": text}]
    if len(texts) != len(parts) + 1:
        raise ParameterError(
            f"a prompt has {len(texts) - 1} times {IMAGE_TOKEN}, and {len(parts)} pictures; write it once for each, or not at all"
        )
    content = [{"type": "text", "text": texts[0]}] if texts[0] else []
    for part, behind in zip(parts, texts[1:]):
        content += [part, *([{"type": "text", "text": behind}] if behind else [])]
    return content
