"""Texts under whose reading a stub has died: a stub is a fork of this process, which is killed with SIGKILL."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from backend.api import InvalidRequest
from backend.serving.intake.batch import Batch
from backend.serving.intake.suspects import DIGEST_BYTES, Suspects
from backend.serving.server import ModelServer
from backend.serving.wires.trtllm_tensors import ENSEMBLE
from tests.serving.fake_triton import InferenceRequest
from tests.serving.helpers import ints, strings

GUILTY, BESIDE, BEFORE, AFTER = (bytes([number]) * DIGEST_BYTES for number in range(1, 5))


def a_stub_dies(file: Path) -> None:
    """It has read one text, reads two at once, and is killed."""
    pid = os.fork()
    if not pid:
        try:
            suspects = Suspects(file)
            with suspects.reading(BEFORE):
                pass
            with suspects.reading(BESIDE), suspects.reading(GUILTY):
                os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def may_read(suspects: Suspects, digest: bytes) -> bool:
    try:
        with suspects.reading(digest):
            return True
    except InvalidRequest as error:
        assert "the server ended while it read this request, so it is not read again" in error.message
        return False


def test_what_a_stub_was_reading_when_it_died_is_not_read_by_the_next(tmp_path: Path) -> None:
    file = tmp_path / "reading"
    a_stub_dies(file)
    suspects = Suspects(file)
    for _ in range(2):
        assert [may_read(suspects, each) for each in (GUILTY, BESIDE, BEFORE, AFTER)] == [False, False, True, True]
    suspects.close()
    again = Suspects(file)  # that one ended in peace
    assert may_read(again, GUILTY)
    again.close()


def test_a_text_that_has_been_read_makes_room_for_one_text(tmp_path: Path) -> None:
    """Texts end in another order than they began: those that are being read keep their places."""
    with ExitStack() as first, ExitStack() as others:
        suspects = Suspects(tmp_path / "reading")
        first.enter_context(suspects.reading(BEFORE))
        others.enter_context(suspects.reading(GUILTY))
        first.close()
        for digest in (BESIDE, AFTER):
            others.enter_context(suspects.reading(digest))
        held = (tmp_path / "reading").read_bytes()
        assert {held[i : i + DIGEST_BYTES] for i in range(0, len(held), DIGEST_BYTES)} == {GUILTY, BESIDE, AFTER}
        copy = tmp_path / "copy"
        copy.write_bytes(held)
    suspects.close()
    successor = Suspects(copy)
    assert [may_read(successor, each) for each in (BEFORE, GUILTY, BESIDE, AFTER)] == [True, False, False, False]
    successor.close()


def test_a_text_whose_reading_fails_is_none_of_them(tmp_path: Path) -> None:
    suspects = Suspects(tmp_path / "reading")
    with pytest.raises(ZeroDivisionError), suspects.reading(GUILTY):
        raise ZeroDivisionError
    suspects.close()
    again = Suspects(tmp_path / "reading")
    assert may_read(again, GUILTY)
    again.close()


def test_without_a_directory_nothing_is_noted() -> None:
    suspects = Suspects(None)
    assert may_read(suspects, GUILTY) and may_read(suspects, GUILTY)


def test_requests_are_the_same_if_all_of_their_content_is() -> None:
    def digest(salt: str = "", **inputs: list[bytes]) -> bytes:
        arrays = {name: np.array([values], object) for name, values in inputs.items()}
        return Batch({}, arrays, 1, 0).digest(salt)

    same = digest("a", x=[b"1", b"2"])
    assert same == digest("a", x=[b"1", b"2"]) and len(same) == DIGEST_BYTES
    others = [
        digest("b", x=[b"1", b"2"]),
        digest("a", y=[b"1", b"2"]),
        digest("a", x=[b"1", b"3"]),
        digest("a", x=[b"12"]),
    ]
    assert len({same, *others}) == 5


def test_a_stub_refuses_the_text_under_which_the_one_before_died(
    make_server: Callable[..., ModelServer], tmp_path: Path
) -> None:
    file, digests = tmp_path / "reading", []

    def parse(batch: Batch, context: object, parameters: object) -> list[object]:
        digests.append(file.read_bytes()[:DIGEST_BYTES])
        raise InvalidRequest("read")

    def told(server: ModelServer, text: str) -> str:
        request = InferenceRequest({"text_input": strings(text), "max_tokens": ints(1)})
        server.execute([request])
        (response,) = request.sender.wait()
        return str(response.error().message())

    options = {"check_text": lambda batch, context: None, "reading_file": file}
    server = make_server(ENSEMBLE, parse, **options)
    assert "read" in told(server, "bad") and file.read_bytes() == bytes(DIGEST_BYTES)
    file.write_bytes(digests[0])  # as if it had died there
    after = make_server(ENSEMBLE, parse, **options)
    assert "it is not read again" in told(after, "bad") and "[INVALID_ARGUMENT] read" in told(after, "good")
