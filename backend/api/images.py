"""An image of a request, as the process that reads images hands it to the engine (images/process.py)."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence

from msgspec import Struct

from backend.api.tensor import TensorData

# Token ids of images are the engine's own and lie above all of a model's. They hold 62 bits of the image's hash each, so that
# blocks of KV are found by an image's content as they are found by a text's tokens. The worker gets the model's id instead.
FIRST_ID = 1 << 62


class ImageInput(Struct, frozen=True, forbid_unknown_fields=True):
    """The result of the model's image processor for an image.

    token_id: the model's for images. num_tokens: how many tokens of the prompt have it because of this image.
    digest: SHA-256 of all that its features depend on, in hexadecimal digits.
    inputs: arguments of transformers' `get_image_features` by name; `pixel_values` before they are scaled and normalised, where
    uint8 holds them. scale: (factor, means, deviations) of each channel: (pixel * factor - mean) / deviation; None for pixels
    that are normalised already.
    """

    token_id: int
    num_tokens: int
    digest: str
    inputs: dict[str, TensorData]
    scale: tuple[float, tuple[float, ...], tuple[float, ...]] | None = None

    @property
    def num_bytes(self) -> int:
        return sum(len(tensor.data) for tensor in self.inputs.values())


def digest_of(num_tokens: int, inputs: dict[str, TensorData], scale: object) -> str:
    content = hashlib.sha256(f"{num_tokens} {scale}".encode())
    for name, tensor in sorted(inputs.items()):
        content.update(f"\0{name} {tensor.dtype} {tensor.shape}\0".encode())
        content.update(tensor.data)
    return content.hexdigest()


def content_ids(digest: str, num_tokens: int) -> list[int]:
    """Token ids for the tokens of an image, the same for the same image: SHAKE-128 of its digest, 62 bits a token."""
    ids = array("Q")
    ids.frombytes(hashlib.shake_128(bytes.fromhex(digest)).digest(8 * num_tokens))
    return [FIRST_ID | (number >> 2) for number in ids]


def with_content_ids(token_ids: list[int], images: Sequence[ImageInput]) -> list[int]:
    """Token ids with those of images in the place of the model's, of which there are as many as the images have tokens."""
    if not images:
        return token_ids
    own = iter([each for image in images for each in content_ids(image.digest, image.num_tokens)])
    return [next(own) if each == images[0].token_id else each for each in token_ids]


def with_model_ids(token_ids: list[int], images: Sequence[ImageInput]) -> list[int]:
    """The reverse."""
    return [images[0].token_id if each >= FIRST_ID else each for each in token_ids] if images else list(token_ids)


def packed_ids(token_ids: Iterable[int]) -> array[int]:
    """Token ids in 4 bytes each, or in 8 bytes each where there are some of images."""
    ids = list(token_ids)
    return array("q" if ids and max(ids) >= FIRST_ID else "i", ids)
