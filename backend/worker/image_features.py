"""ImageFeatures: encodes images on a thread of its own, and holds their features: those of live requests, and others as long as
there is room, least recently used first.

    begin -> (waits for its turn) -> tower.features -> tell       while other requests run
    of(digest)                                                    when the step begins that has the tokens

An image that several requests have is encoded once. Namespaces take turns.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from backend.api.errors import EngineFault, EverbatchError, InvalidRequest, Overloaded
from backend.api.images import ImageInput
from backend.api.request import RequestId
from backend.api.stats import ImageStats
from backend.core.round_robin import RoundRobin
from backend.core.step import OnEncoded
from backend.hosted.features import Features

log = logging.getLogger("everbatch.worker")


class Tower(Protocol):
    """backend/hosted/images.py has the real one."""

    bytes_per_token: int  # each token of an image has features of so many

    def features(self, image: ImageInput) -> Features: ...


@dataclass(slots=True)
class _Held:
    image: ImageInput | None  # None: its features are there
    features: Features | None = None
    num_bytes: int = 0
    users: set[RequestId] = field(default_factory=set)


class ImageFeatures:
    """Implements core.step.ImageEncoder. `of` is called by the thread that runs steps, the others by the engine's."""

    def __init__(self, tower: Tower, capacity: int) -> None:
        """capacity: bytes"""
        self._tower, self.capacity = tower, capacity
        self._held: OrderedDict[str, _Held] = OrderedDict()  # by digest, the least recently used first
        self._lacks: dict[RequestId, set[str]] = {}  # digests that a request waits for
        self._of_request: dict[RequestId, tuple[str, ...]] = {}
        self._pixels: dict[RequestId, int] = {}  # bytes that the images of a live request have themselves
        self._line: RoundRobin[str] = RoundRobin(share=1)
        self._num_encoded = self._num_reused = self._num_failed = 0
        self._encoding_s = 0.0
        self._changed = threading.Condition()
        self._is_closed = False
        self._tell: OnEncoded = lambda request_id, error: None
        self._thread = threading.Thread(target=self._encode_all, name="images", daemon=True)
        self._thread.start()

    def on_encoded(self, tell: OnEncoded) -> None:
        self._tell = tell

    def begin(self, request_id: RequestId, images: Sequence[ImageInput], namespace: str) -> bool:
        own = {image.digest: image for image in images}
        with self._changed:
            new = [image for digest, image in own.items() if digest not in self._held]
            in_use = sum(each.num_bytes for digest, each in self._held.items() if each.users or digest in own)
            in_use += sum(self._pixels.values())
            pixels = sum(image.num_bytes for image in images)
            needed = pixels + sum(image.num_tokens for image in new) * self._tower.bytes_per_token
            limit = f"{self.capacity} that there are (images.cache_bytes)"
            if needed > self.capacity:
                raise InvalidRequest(
                    f"the features of the request's images need {needed} bytes, pixels included, of the {limit}; send smaller "
                    f"images"
                )
            if in_use + needed > self.capacity:
                raise Overloaded(
                    f"the features of the request's images need {needed} bytes, pixels included, those of live requests have "
                    f"{in_use} of the {limit}; try again later, or send smaller images"
                )
            self._pixels[request_id] = pixels
            self._num_reused += len(own) - len(new)
            for image in new:
                self._held[image.digest] = _Held(image, None, image.num_tokens * self._tower.bytes_per_token)
            for digest in own:
                self._held[digest].users.add(request_id)
                self._held.move_to_end(digest)
            self._of_request[request_id] = tuple(own)
            lacks = {digest for digest in own if self._held[digest].features is None}
            for digest in lacks:
                self._line.put(namespace, digest)
            if lacks:
                self._lacks[request_id] = lacks
                self._changed.notify()
            self._evict()
            return not lacks

    def end(self, request_id: RequestId) -> None:
        with self._changed:
            self._lacks.pop(request_id, None)
            self._pixels.pop(request_id, None)
            for digest in self._of_request.pop(request_id, ()):
                if (held := self._held.get(digest)) is None:
                    continue
                held.users.discard(request_id)
                if not held.users and held.features is None:  # no request waits for it any more
                    del self._held[digest]
                    self._line.discard(digest)

    def of(self, digest: str) -> Features:
        """The features of an image of a live request. Raises KeyError for others."""
        with self._changed:
            held = self._held[digest]
            if held.features is None:
                raise KeyError(digest)
            return held.features

    def stats(self) -> ImageStats:
        with self._changed:
            used = self.num_bytes + sum(self._pixels.values())
            counts = self._num_encoded, self._num_reused, self._num_failed
            return ImageStats(self.capacity, used, *counts, self._encoding_s)

    @property
    def num_bytes(self) -> int:
        """Bytes of all features that are held or coming."""
        return sum(each.num_bytes for each in self._held.values())

    def close(self) -> None:
        """End the thread, after the image that it encodes."""
        with self._changed:
            self._is_closed = True
            self._line.clear()
            self._changed.notify()
        self._thread.join()

    def _encode_all(self) -> None:
        while True:
            with self._changed:
                while (taken := self._line.take()) is None and not self._is_closed:
                    self._changed.wait()
                if taken is None:
                    return
                held = self._held.get(taken.key)
                image = None if held is None or held.features is not None else held.image
            began = time.perf_counter()
            features, error = (None, None) if image is None else self._encode(image)
            with self._changed:
                self._line.done(taken.namespace)
                self._encoding_s += time.perf_counter() - began
                told = self._settle(taken.key, features, error) if image is not None else []
            for request_id in told:
                self._tell(request_id, error)

    def _encode(self, image: ImageInput) -> tuple[Features | None, EverbatchError | None]:
        try:
            return self._tower.features(image), None
        except EverbatchError as error:
            return None, error
        except (
            Exception
        ) as error:  # module code of any family: it ends the requests that have the image, and nothing else
            log.exception("an image cannot be encoded")
            return None, EngineFault(f"the image cannot be encoded ({type(error).__name__}); the engine's log says why")

    def _settle(self, digest: str, features: Features | None, error: EverbatchError | None) -> list[RequestId]:
        """Note the outcome of an image. Returns the requests that wait for nothing more."""
        held = self._held.get(digest)
        self._num_encoded += features is not None
        self._num_failed += features is None
        if held is not None and features is not None:
            held.image, held.features = None, features
        elif held is not None:
            del self._held[digest]
        told = []
        for request_id, lacks in list(self._lacks.items()):
            if digest not in lacks:
                continue
            lacks.discard(digest)
            if error is not None or not lacks:
                del self._lacks[request_id]
                told.append(request_id)
        return told

    def _evict(self) -> None:
        """Let features of no live request go, least recently used first, until the rest fits."""
        total = self.num_bytes
        for digest, held in list(self._held.items()):
            if total <= self.capacity:
                return
            if not held.users:
                del self._held[digest]
                total -= held.num_bytes
