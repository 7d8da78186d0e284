"""GuideCompiler: off the caller's thread, bounded in time and bytes, everybody told once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from backend.api.config import GuidedConfig
from backend.api.errors import ConfigError, InvalidRequest, Overloaded
from backend.api.guide import Guide, GuideType, check_guide
from backend.api.request import RequestId
from backend.guided.compiler import GuideCompiler
from backend.guided.protocol import CompiledGuide, GuideBackend, GuideError, Matcher


class Stub:
    """A backend whose guides compile when `gate` is open; a text of `bad` cannot be compiled, `crash` is a library's bug."""

    name = "stub"

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.compiled: list[str] = []

    def compile(self, guide: Guide) -> CompiledGuide:
        self.gate.wait(10)
        if guide.text == "bad":
            raise GuideError("it is bad", ".structures[3]")
        if guide.text == "crash":
            raise RuntimeError("/secret/path")
        self.compiled.append(guide.text)
        return _Compiled()


class _Compiled:
    num_bytes = 100

    def matcher(self) -> Matcher:
        raise NotImplementedError


class Told:
    def __init__(self) -> None:
        self.news: list[tuple[int, str]] = []

    def __call__(self, request_id: RequestId, error: str) -> None:
        self.news.append((request_id, error))

    def wait(self, count: int) -> list[tuple[int, str]]:
        until = time.monotonic() + 10
        while len(self.news) < count and time.monotonic() < until:
            time.sleep(0.002)
        return self.news


def guide(text: str) -> Guide:
    return Guide(GuideType.REGEX, text)


def make(
    stub: Stub, make_backend: Callable[[], GuideBackend] | None = None, **config: object
) -> tuple[GuideCompiler, Told]:
    compiler, told = GuideCompiler(GuidedConfig(**config), make_backend or (lambda: stub)), Told()  # type: ignore[arg-type]
    compiler.on_compiled(told)
    return compiler, told


def test_a_guide_is_compiled_once_for_all_who_give_it() -> None:
    stub = Stub()
    compiler, told = make(stub)
    stub.gate.clear()
    assert not compiler.begin(RequestId(1), guide("a"))
    assert not compiler.begin(RequestId(2), guide("a"))
    assert told.news == []
    stub.gate.set()
    assert sorted(told.wait(2)) == [(1, ""), (2, "")]
    assert compiler.begin(RequestId(3), guide("a")) and stub.compiled == ["a"]


def test_a_guide_that_cannot_be_compiled_is_told_in_a_sentence_without_paths() -> None:
    compiler, told = make(Stub())
    compiler.begin(RequestId(1), guide("bad"))
    compiler.begin(RequestId(2), guide("crash"))
    news = dict(told.wait(2))
    assert news[1] == "guide.structures[3]: it is bad"
    assert news[2].startswith("guide: it cannot be compiled (RuntimeError)") and "secret" not in news[2]


def test_who_waits_too_long_is_told_so_though_nobody_waited_for_a_while() -> None:
    """The watch sleeps without a limit once the first guide's 0.05 s are over; the second one's wait must wake it."""
    stub = Stub()
    compiler, told = make(stub, compile_timeout_s=0.05)
    compiler.begin(RequestId(1), guide("quick"))
    assert told.wait(1) == [(1, "")]
    time.sleep(0.15)
    stub.gate.clear()
    compiler.begin(RequestId(2), guide("slow"))
    compiler.begin(RequestId(3), guide("slow"))
    news = told.wait(3)
    assert [request_id for request_id, _ in news] == [1, 2, 3] and "within 0.05 s" in news[2][1]
    stub.gate.set()


def test_who_waits_too_long_is_told_so_and_others_go_on() -> None:
    stub = Stub()
    compiler, told = make(stub, compile_timeout_s=0.05)
    stub.gate.clear()
    compiler.begin(RequestId(1), guide("slow"))
    assert "within 0.05 s (guided.compile_timeout_s)" in told.wait(1)[0][1]
    stub.gate.set()
    compiler.end(RequestId(1))
    time.sleep(0.05)
    assert len(told.news) == 1, "told twice"
    assert compiler.begin(RequestId(2), guide("slow")), "what was finished late is kept"


def test_the_cache_is_bounded_by_bytes_and_keeps_what_live_requests_use() -> None:
    """Guides of 100 bytes and room for 250: of five that nobody uses two stay; one in use stays whatever its age."""
    compiler, told = make(Stub(), cache_bytes=250)
    compiler.begin(RequestId(100), guide("used"))
    told.wait(1)
    for i in range(5):
        compiler.begin(RequestId(i), guide(f"g{i}"))
        told.wait(2 + i)
        compiler.end(RequestId(i))
    assert compiler.num_bytes == 200
    assert compiler.begin(RequestId(101), guide("used")) and compiler.begin(RequestId(102), guide("g4"))
    assert not compiler.begin(RequestId(103), guide("g0"))


def test_too_many_guides_at_once_are_refused() -> None:
    stub = Stub()
    compiler, _ = make(stub, max_compiling=2)
    stub.gate.clear()
    compiler.begin(RequestId(1), guide("a"))
    compiler.begin(RequestId(2), guide("b"))
    with pytest.raises(Overloaded, match=r"2 guides wait .* \(guided.max_compiling\)"):
        compiler.begin(RequestId(3), guide("c"))
    assert not compiler.begin(RequestId(4), guide("a")), "one that is compiled already, or soon, costs nothing"
    stub.gate.set()


def test_a_backend_that_cannot_be_made_is_not_set_up() -> None:
    def fail() -> GuideBackend:
        raise ConfigError("the model directory has no tokenizer.json")

    compiler, told = make(Stub(), fail)
    compiler.begin(RequestId(1), guide("a"))
    assert told.wait(1) == [(1, "GuidedDecoder is not setup: the model directory has no tokenizer.json")]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (Guide(GuideType.JSON, "{}"), "has no text"),
        (Guide(GuideType.REGEX), "needs a text"),
        (guide("a" * 11), r"11 bytes, the limit is 10 \(guided.max_bytes\)"),
        (guide("\udc80"), "lone surrogate"),
        (guide("a\0"), "zero character"),
    ],
)
def test_guides_that_nobody_should_compile_are_refused_at_once(given: Guide, sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        check_guide(given, "", 10, None)


@pytest.mark.parametrize("min_tokens", [None, 0, 1])
def test_one_token_is_what_any_output_has(min_tokens: int | None) -> None:
    """TensorRT-LLM's runtime default is 1, and many clients send it."""
    check_guide(guide("a"), "", 10, min_tokens)
    with pytest.raises(InvalidRequest, match="min_tokens is 2, the limit beside a guide is 1"):
        check_guide(guide("a"), "", 10, 2)


def test_nesting_is_bounded() -> None:
    check_guide(guide("(" * 64 + ")" * 64), "", 1000, None)
    with pytest.raises(InvalidRequest, match="nested 65 deep, the limit is 64"):
        check_guide(guide("(" * 65 + ")" * 65), "", 1000, None)
