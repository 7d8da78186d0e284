"""The images of a request on their way to the model: which may come, and how many; their bytes, brought along or fetched."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from gateway.errors import GatewayError, unavailable
from gateway.image_fetch import ImageFetcher
from gateway.images import Picture, brought, encoded, lifted, refused
from gateway.settings import Settings

Aside = Callable[..., Awaitable[Any]]  # runs a function with these arguments, in a thread where that takes long
NOT_ASKED = "the model cannot be asked whether it takes images; try again when /health answers 200"


class ImageIntake:
    def __init__(self, settings: Settings, fetcher: ImageFetcher | None = None) -> None:
        self._most, self._limit = settings.max_images, settings.max_image_bytes
        self._together = settings.max_image_body_bytes
        self._fetcher = fetcher or ImageFetcher(settings.allow_image_hosts, settings.image_timeout_s)

    async def filled(
        self, request: dict[str, Any], model: str, takes_images: Callable[[], Awaitable[bool | None]], aside: Aside
    ) -> dict[str, Any]:
        """The request with its images in the field `images`; the request itself where it has none. `takes_images` says None
        while the model cannot be asked. Raises GatewayError.
        """
        if "messages" not in request:
            return request
        turns, pictures = lifted(request["messages"])
        if not pictures:
            return request
        if len(pictures) > self._most:
            text = f"the request has {len(pictures)} images, the limit is {self._most}; send fewer"
            raise GatewayError(400, text, pictures[self._most].place, "invalid_value")
        if not (takes := await takes_images()):
            raise unavailable(NOT_ASKED) if takes is None else _not_taken(pictures[0], model)
        found = await aside(brought, pictures, self._limit)
        to_fetch = [picture for picture, data in zip(pictures, found) if data is None]
        fetched = iter(await self._fetcher.fetched(to_fetch, self._limit, self._together) if to_fetch else ())
        images = [next(fetched) if data is None else data for data in found]
        texts = []
        for data in images:
            texts.append(encoded(data))
            await asyncio.sleep(0)  # a large one takes milliseconds
        return {**request, "messages": turns, "images": texts}

    async def close(self) -> None:
        await self._fetcher.close()


def _not_taken(picture: Picture, model: str) -> GatewayError:
    text = (
        f"the image at {picture.place} is not served: the model {model[:80]!r} reads text only; leave the image out, or"
        " name a model whose input_modalities in /v1/models have image"
    )
    return refused(picture, text, "unsupported_parameter")
