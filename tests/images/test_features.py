"""ImageFeatures: images are encoded once, in turns of namespaces, held as long as requests use them, within a limit."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import pytest
import torch

from backend.api.errors import EverbatchError, InvalidRequest, Overloaded
from backend.api.images import ImageInput
from backend.api.request import RequestId
from backend.api.stats import ImageStats
from backend.hosted.features import Features
from backend.worker.image_features import ImageFeatures

Told = tuple[RequestId, EverbatchError | None]


class _Tower:
    """Encodes when it is let, and refuses images whose digest says so."""

    bytes_per_token = 10

    def __init__(self) -> None:
        self.may, self.encoded = threading.Semaphore(0), list[str]()

    def features(self, image: ImageInput) -> Features:
        assert self.may.acquire(timeout=10)
        self.encoded.append(image.digest)
        if image.digest == "broken":
            raise InvalidRequest("the image is broken")
        if image.digest == "fault":
            raise ZeroDivisionError
        return Features(torch.zeros(image.num_tokens, 5))


def image(digest: str, num_tokens: int = 4) -> ImageInput:
    return ImageInput(7, num_tokens, digest, {})


class _Case:
    def __init__(self, capacity: int) -> None:
        self.tower, self.told = _Tower(), queue.SimpleQueue[Told]()
        self.features = ImageFeatures(self.tower, capacity)
        self.features.on_encoded(lambda *outcome: self.told.put(outcome))

    def begin(self, number: int, *digests: str, namespace: str = "a") -> bool:
        return self.features.begin(RequestId(number), [image(digest) for digest in digests], namespace)

    def let(self, count: int = 1) -> list[Told]:
        """Let so many images be encoded, each of which ends the wait of one request."""
        self.tower.may.release(count)
        return [self.told.get(timeout=10) for _ in range(count)]


@pytest.fixture
def case() -> Iterator[_Case]:
    made = _Case(capacity=120)  # room for three images
    yield made
    made.tower.may.release(100)
    made.features.close()


def test_an_image_is_encoded_once_for_all_requests(case: _Case) -> None:
    assert not case.begin(1, "x") and not case.begin(2, "x", "x")
    case.tower.may.release()
    assert {case.told.get(timeout=10)[0] for _ in range(2)} == {1, 2}
    assert case.begin(3, "x") and case.tower.encoded == ["x"]
    assert case.features.of("x").vectors.shape == (4, 5)


def test_what_happens_to_images_is_counted(case: _Case) -> None:
    case.begin(1, "x", "y")
    case.tower.may.release(2)
    case.told.get(timeout=10)
    case.begin(2, "x", "x", "fault")
    case.let()
    case.features.end(RequestId(1))
    found = case.features.stats()
    assert found.image_encoding_s_total > 0
    assert found == ImageStats(120, 80, 2, 1, 1, found.image_encoding_s_total)


def test_a_request_is_told_when_all_of_its_images_are_there(case: _Case) -> None:
    assert not case.begin(1, "x", "y")
    case.tower.may.release()
    with pytest.raises(queue.Empty):
        case.told.get(timeout=0.2)
    assert case.let() == [(1, None)]


def test_a_broken_image_ends_the_requests_that_have_it_alone(case: _Case) -> None:
    case.begin(1, "broken")
    case.begin(2, "x")
    (first, error), second = case.let(2)
    assert first == 1 and isinstance(error, InvalidRequest) and second == (2, None)
    case.features.end(RequestId(1))
    assert not case.begin(3, "broken")  # it is tried anew


def test_a_fault_of_the_tower_is_an_error_that_names_it(case: _Case) -> None:
    case.begin(1, "fault")
    ((_, error),) = case.let()
    assert error is not None and "ZeroDivisionError" in error.message


def test_features_of_live_requests_are_kept_and_the_oldest_others_go(case: _Case) -> None:
    for number, digest in enumerate("xyz"):
        case.begin(number, digest)
        case.let()
    for number in (0, 1):
        case.features.end(RequestId(number))
    assert case.begin(5, "x")  # used again: y is the oldest now
    assert not case.begin(6, "w")
    case.let()
    with pytest.raises(KeyError):
        case.features.of("y")
    assert len(case.features.of("z").vectors) == len(case.features.of("x").vectors) == 4


def test_no_more_than_fits_is_taken(case: _Case) -> None:
    case.begin(1, "x", "y")
    with pytest.raises(Overloaded, match="need 80 bytes, pixels included, those of live requests have 80 of the 120"):
        case.begin(2, "z", "w")
    with pytest.raises(InvalidRequest, match="need 160 bytes, pixels included, of the 120"):
        case.begin(2, "z", "w", "v", "u")
    assert not case.begin(3, "z")  # the refusal has changed nothing
    case.features.end(RequestId(2))  # the engine notes the end of a request that was refused, too


def test_an_image_that_nobody_waits_for_is_not_encoded(case: _Case) -> None:
    case.begin(1, "x")
    case.begin(2, "y")
    case.features.end(RequestId(2))
    case.begin(3, "z")
    assert [number for number, _ in case.let(2)] == [1, 3] and case.tower.encoded == ["x", "z"]


def test_namespaces_take_turns(case: _Case) -> None:
    case.begin(1, "x")
    while case.features._line:  # until the thread has begun
        threading.Event().wait(0.001)
    for number, digest in ((2, "y"), (3, "w")):
        case.begin(number, digest)
    case.features.end(RequestId(1))
    case.begin(4, "z", namespace="b")
    case.tower.may.release(4)
    assert {case.told.get(timeout=10)[0] for _ in range(3)} == {2, 3, 4}
    assert case.tower.encoded == ["x", "y", "z", "w"]


def test_features_of_a_live_request_stay_however_old_they_are(case: _Case) -> None:
    for number, digest in enumerate("xyz"):
        case.begin(number, digest)
        case.let()
    for number in (1, 2):
        case.features.end(RequestId(number))
    assert not case.begin(3, "w")
    case.let()
    assert len(case.features.of("x").vectors) == 4
    with pytest.raises(KeyError):
        case.features.of("y")
