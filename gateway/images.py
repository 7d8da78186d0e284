"""Images of requests, without I/O: where they stand in a conversation, and their bytes where the request brings them.

Translations put a Picture into the content of a turn, between its texts. `lifted` then takes all of them out, in the order in
which the model meets them, and leaves what chat templates expect: {"type": "image"}.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from gateway.errors import GatewayError

FORMATS = "PNG, JPEG, WebP, GIF, BMP or TIFF"
LONGEST_SHOWN = 60  # characters of a URL in a sentence
_HEAD = 200  # characters ahead of the comma of a data: URL, at most
_STARTS = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a", b"BM", b"II*\0", b"MM\0*")
_MIB = 1 << 20
OF_IMAGES = ("user", "tool")  # roles whose messages may have images
Content = str | list[Any]  # a text, or texts and images in the order in which they were written


class Picture(NamedTuple):
    """An image of a request. `place`: the field that holds it. Either a `url` (data:, http: or https:), or `data` in base64."""

    place: str
    url: str = ""
    data: str = ""


def content_of(parts: Iterable[str | Picture], between: str = "") -> Content:
    """The content of a turn: one text where there is no image. `between` stands between two texts that follow each other."""
    found: list[str | Picture] = []
    texts: list[str] = []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
            continue
        found += [*_joined(texts, between), part]
        texts = []
    if not found:
        return between.join(texts)
    found += _joined(texts, between)
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in found]


def _joined(texts: list[str], between: str) -> list[str]:
    text = between.join(texts)
    return [text] if text else []


def parts_of(content: Content) -> list[str | Picture]:
    """The texts and images of a content."""
    if isinstance(content, str):
        return [content]
    return [part if isinstance(part, Picture) else part["text"] for part in content]


def check_image_role(role: str, place: str) -> None:
    """Raise GatewayError for an image in a message of another role."""
    if role not in OF_IMAGES:
        text = f"{place} is an image in a message of role {role}; send it in one of role user"
        raise GatewayError(400, text, place, "invalid_value")


def lifted(turns: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[Picture]]:
    """The turns as a chat template reads them, and the images that stand in them."""
    pictures: list[Picture] = []
    shown = []
    for turn in turns:
        if not isinstance(content := turn.get("content"), list):
            shown.append(turn)
            continue
        pictures += [part for part in content if isinstance(part, Picture)]
        plain = [{"type": "image"} if isinstance(part, Picture) else part for part in content]
        shown.append({**turn, "content": plain})
    return shown, pictures


def brought(pictures: Sequence[Picture], limit: int) -> list[bytes | None]:
    """The bytes of each image that the request brings along; None for one that is to be fetched. `limit`: bytes of one image.
    Raises GatewayError(400).
    """
    return [_brought(picture, limit) for picture in pictures]


def _brought(picture: Picture, limit: int) -> bytes | None:
    text, named = picture.data, f"the image at {picture.place}"
    if picture.url:
        scheme = picture.url[:8].partition(":")[0].lower()
        if scheme in ("http", "https"):
            return None
        if scheme != "data":
            start = shown(picture.url)
            raise refused(
                picture,
                f"{named} begins with {start}; send a data: URL with base64, or the https: URL of an allowed host",
            )
        text = _data_of(picture, named)
    if len(text) > limit * 4 // 3 + 4 + len(text) // 32:  # line ends apart
        raise refused(picture, too_large(named, limit))
    try:
        data = binascii.a2b_base64(text.translate(_SPACE) if _has_space(text) else text, strict_mode=True)
    except ValueError:  # also for letters beyond ASCII
        raise refused(
            picture, f"{named} is not base64 of the standard alphabet with its padding; encode it so"
        ) from None
    return checked(picture, data, limit)


_SPACE = {ord(letter): None for letter in "\r\n"}


def _has_space(text: str) -> bool:
    return "\n" in text or "\r" in text


def _data_of(picture: Picture, named: str) -> str:
    """The base64 of a data: URL. Raises GatewayError."""
    head, comma, data = picture.url[:_HEAD].partition(",")
    kind, *parameters = head[len("data:") :].lower().split(";")
    if not comma or "base64" not in parameters:
        text = f"{named} is a data: URL without base64; write data:image/png;base64,... with the bytes in base64"
        raise refused(picture, text)
    if kind and not kind.strip().startswith("image/"):
        raise refused(picture, f"{named} is a data: URL of type {kind[:40]!r}; an image has a type such as image/png")
    return picture.url[len(head) + 1 :]


def checked(picture: Picture, data: bytes, limit: int) -> bytes:
    """The same bytes. Raises GatewayError where they are too many, or do not begin as an image does."""
    named = f"the image at {picture.place}"
    if len(data) > limit:
        raise refused(picture, too_large(named, limit))
    if not data:
        raise refused(picture, f"{named} is empty; send the bytes of a file, or leave it out")
    is_webp = data[:4] == b"RIFF" and data[8:12] == b"WEBP"
    if not is_webp and not data.startswith(_STARTS):
        raise refused(picture, f"{named} is none of the formats {FORMATS}; convert it")
    return data


def encoded(data: bytes) -> str:
    """As the model's wire takes it."""
    return base64.b64encode(data).decode()


def too_large(named: str, limit: int) -> str:
    return f"{named} has more than {size(limit)}, the limit; send it smaller"


def size(count: int) -> str:
    """A number of bytes for people."""
    return f"{count >> 20} MiB" if count % _MIB == 0 and count else f"{count} bytes"


def shown(url: str) -> str:
    """The beginning of a URL, for a sentence."""
    return repr(url) if len(url) <= LONGEST_SHOWN else f"{url[:LONGEST_SHOWN]!r}..."


def refused(picture: Picture, text: str, code: str = "invalid_image") -> GatewayError:
    return GatewayError(400, text, picture.place, code)
