"""GuideCompiler: guides that need not be held in full, and what is ready before the first of them."""

from __future__ import annotations

import json
import logging
import threading

import pytest

from backend.api.guide import Guide, GuideType
from backend.api.request import RequestId
from backend.core.limited_messages import Ending
from tests.guided.fake_jobs import FakeJobs, Stub
from tests.guided.test_compiler import _closing, begin, make, wait_for  # noqa: F401


def test_a_guide_over_a_limit_is_compiled_in_its_loosest_form_where_it_may_be() -> None:
    """Once; a guide that must be held in full is refused."""
    tag = {"triggers": ["<"], "structures": [{"begin": "<", "schema": {"enum": [1]}, "end": ">", "hold": "most"}]}
    for ending in (Ending.OVER_CPU, Ending.OVER_MEMORY, Ending.FAILED):
        jobs = FakeJobs()
        jobs.endings = [ending]
        compiler, told = make(jobs)
        compiler.begin(RequestId(1), Guide(GuideType.STRUCTURAL_TAG, json.dumps(tag)), "")
        assert told.wait(1) == [(1, "")]
        assert [json.loads(text)["structures"][0]["hold"] for text in jobs.begun] == ["most", "object"]
        jobs.endings = [ending, ending]
        compiler.begin(RequestId(2), Guide(GuideType.STRUCTURAL_TAG, json.dumps(tag) + " "), "")
        assert told.wait(2)[1][1].startswith("guide: ") and len(jobs.begun) == 4


def test_what_is_not_held_is_said_once_in_the_log_without_the_client_s_words(caplog: pytest.LogCaptureFixture) -> None:
    compiler, told = make(FakeJobs())
    with caplog.at_level(logging.WARNING, "everbatch.guided"):
        for request_id in (1, 2):
            begin(compiler, request_id, "noted .secret:a .secret:b")
        told.wait(1)
        assert begin(compiler, 3, "noted .secret:a .secret:b")
    assert all(compiler.notes(RequestId(request_id)) == (".secret:a", ".secret:b") for request_id in (1, 2, 3))
    assert [record.getMessage() for record in caplog.records] == ["a guide is held without a, b, which cannot be held"]


def test_it_is_warm_before_the_first_guide() -> None:
    made: list[bool] = []
    jobs = FakeJobs()
    jobs.is_ready.clear()
    compiler, _ = make(jobs, lambda: made.append(True) or Stub())  # type: ignore[func-returns-value]
    compiler.start()
    wait_for(lambda: made == [True])
    waiting = threading.Thread(target=compiler.wait_until_ready)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive(), "the process is not ready"
    jobs.is_ready.set()
    waiting.join(10)
    assert not waiting.is_alive()
