"""Images of a request: files that are read for it, and its form, which is that of model `everbatch` and of no text model."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from client.messages import GenerateRequest

FORMATS = "PNG, JPEG, WebP, GIF, BMP or TIFF"
MOST_BYTES = 20 << 20  # in one file
MODEL = "everbatch"  # the Triton model whose requests may have images; NAME.everbatch on a server of several models
_STARTS = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a", b"BM", b"II*\0", b"MM\0*")
# Field of the JSON request -> attribute of GenerateRequest.
_FIELDS = {
    name: name for name in ("messages", "prompt", "max_tokens", "temperature", "top_k", "top_p", "seed", "stream")
}
_FIELDS |= {name: name for name in ("repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens")}
_FIELDS |= {"stop": "stop_words", "bad_words": "bad_words", "lora_name": "lora_name"}
_NOT_BESIDE = ("end_id", "n", "beam_width", "length_penalty", "return_log_probs", "guide", "session")


def read_image(path: str | os.PathLike[str]) -> str:
    """The bytes of an image file in base64. Raises ValueError, one sentence, for a file that cannot be sent."""
    name = os.fspath(path)
    try:
        with Path(name).expanduser().open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except (
        OSError,
        RuntimeError,
        ValueError,
    ) as error:  # ValueError: a zero byte in the name; RuntimeError: an unknown ~NAME
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "it is no name of a file"
        raise ValueError(f"{name!r} cannot be read: {reason}") from None
    if len(data) > MOST_BYTES:
        raise ValueError(f"{name!r} has more than {MOST_BYTES >> 20} MiB, the limit; make it smaller")
    if not data.startswith(_STARTS) and not (data[:4] == b"RIFF" and data[8:12] == b"WEBP"):
        raise ValueError(f"{name!r} is none of the formats {FORMATS}; convert it")
    return base64.b64encode(data).decode()


def content(text: str, images: Sequence[str]) -> str | list[dict[str, str]]:
    """The content of a message. Each image keeps its bytes beside it, until `lifted` takes them out."""
    if not images:
        return text
    return [*({"type": "image", "data": data} for data in images), {"type": "text", "text": text}]


def lifted(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[str]]:
    """The messages as chat templates read them, and the images in them, in their order."""
    images, shown = list[str](), list[Mapping[str, Any]]()
    for message in messages:
        parts = message["content"]
        if isinstance(parts, list):
            images += [part["data"] for part in parts if part["type"] == "image"]
            parts = [{"type": "image"} if part["type"] == "image" else part for part in parts]
        shown.append({**message, "content": parts})
    return shown, images


def num_characters(message: Mapping[str, Any]) -> int:
    """How long the text of a message is."""
    parts = message["content"]
    return len(parts) if isinstance(parts, str) else sum(len(part.get("text", "")) for part in parts)


def json_request(request: GenerateRequest) -> dict[str, Any]:
    """The request of model `everbatch`. Raises ValueError for an option that it has not beside images."""
    defaults = type(request).__dataclass_fields__
    for name in _NOT_BESIDE:
        if getattr(request, name) != defaults[name].default:
            raise ValueError(f"{name} does not go with images; leave it out")
    if not request.exclude_input:
        raise ValueError("exclude_input=False does not go with images; leave it out")
    found = {field: getattr(request, name) for field, name in _FIELDS.items()}
    return {field: value for field, value in found.items() if value not in (None, [], ())} | {
        "images": list(request.images)
    }


def model_beside(model: str) -> str:
    """The model that takes images on the server on which the text model `model` is."""
    of_several, dot, _ = model.rpartition(".")
    return f"{of_several}{dot}{MODEL}"


def outputs_of(answer: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The outputs that a text model would have sent, from the JSON object of an answer."""
    usage = answer.get("usage") or {}
    prompt, cached = usage.get("prompt_tokens"), usage.get("cached_tokens")
    found = {
        "text_output": answer.get("text", ""),
        "finish_reason": answer.get("finish_reason"),
        "num_output_tokens": len(answer.get("token_ids", ())),
        "num_input_tokens": prompt,
        "num_cached_tokens": cached,
        "num_context_tokens": None if prompt is None or cached is None else prompt - cached,
    }
    return {name: [value] for name, value in found.items() if value is not None}
