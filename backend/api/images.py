"""An image of a request, as the process that reads images hands it to the engine (serving/intake/image_process.py)."""

from __future__ import annotations

import hashlib
from array import array

from msgspec import Struct

from backend.api.tensor import TensorData

# Token ids of images are the engine's own and lie above all of a model's. They hold 62 bits of the image's hash each, so that
# blocks of KV are found by an image's content as they are found by a text's tokens. The worker gets the model's id instead.
FIRST_ID = 1 << 62


class ImageInput(Struct, frozen=True, forbid_unknown_fields=True):
    """What the model's image processor makes of an image.

    num_tokens: how many tokens of the prompt, whose id is the model's for images, its features stand for.
    inputs: arguments of transformers' `get_image_features` by name; `pixel_values` before they are scaled and normalised, where
    uint8 holds them. scale: (factor, means, deviations) of each channel: (pixel * factor - mean) / deviation; empty for pixels
    that are normalised already.
    """

    num_tokens: int
    inputs: dict[str, TensorData]
    scale: tuple[float, tuple[float, ...], tuple[float, ...]] | tuple[()] = ()

    @property
    def digest(self) -> str:
        """SHA-256 of all that its features depend on, in hexadecimal digits."""
        content = hashlib.sha256(f"{self.num_tokens} {self.scale}".encode())
        for name, tensor in sorted(self.inputs.items()):
            content.update(f"\0{name} {tensor.dtype} {tensor.shape}\0".encode())
            content.update(tensor.data)
        return content.hexdigest()

    @property
    def num_bytes(self) -> int:
        return sum(len(tensor.data) for tensor in self.inputs.values())


def content_ids(digest: str, num_tokens: int) -> list[int]:
    """Token ids for the tokens of an image, the same for the same image: SHAKE-128 of its digest, 62 bits a token."""
    ids = array("Q")
    ids.frombytes(hashlib.shake_128(bytes.fromhex(digest)).digest(8 * num_tokens))
    return [FIRST_ID | (number >> 2) for number in ids]


def with_content_ids(token_ids: list[int], token_id: int, digests: list[tuple[str, int]]) -> list[int]:
    """`token_ids` with those of images in the place of `token_id`. digests: of each image, with the number of its tokens, which
    together are as many as there are tokens `token_id`.
    """
    own = iter([each for digest, count in digests for each in content_ids(digest, count)])
    return [next(own) if each == token_id else each for each in token_ids]


def packed_ids(token_ids: list[int]) -> bytes:
    """Token ids as bytes: 4 each, or 8 each where there are some of images."""
    try:
        return array("i", token_ids).tobytes()
    except OverflowError:
        return array("q", token_ids).tobytes()
