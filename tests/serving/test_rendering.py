"""RenderProcess: chats are rendered as in this process, and no template's time or memory is any other request's."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from backend.api.errors import EngineUnavailable, EverbatchError, InvalidRequest
from backend.core.limited_messages import Limits
from backend.serving.intake.rendering import RenderProcess
from backend.text.chat import ChatTemplate
from backend.text.template import Renderer, Templates
from tests.descriptors import open_descriptors
from tests.guided.processes import all_children, children_of, wait_for

MIB = 1 << 20
SMALL = Limits(cpu_s=0.3, num_bytes=96 * MIB)
# One template with many faces, so that one process serves all tests: the first message says what happens.
FACES = """{% set what = messages[0].content %}{% if what == 'double' %}
{%- set ns = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}
{%- elif what == 'repeat' %}{{ 'a' * 10 ** 10 }}
{%- elif what == 'format' %}{{ '%4000000000s' | format('x') }}
{%- elif what == 'list' %}{{ ([0] * 10 ** 10) | length }}
{%- elif what == 'power' %}{{ 10 ** 9999999 }}
{%- elif what == 'loop' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}
{%- elif what == 'recursion' %}{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}
{%- elif what == 'refuse' %}{{ raise_exception('no such role') }}
{%- elif what == 'role' %}{{ raise_exception(messages[0].role) }}
{%- elif what == 'fail' %}{{ messages.nothing.at_all }}
{%- elif what == 'long' %}{% for i in range(2000) %}{{ 'a' * 1000 }}{% endfor %}
{%- else %}{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content | tojson }}{% endfor %}
{{- extra | tojson }}{% endif %}"""
TEMPLATES = Templates(FACES, "{{ tools | tojson }}", {"bos_token": "<s>"}, 1_000_000)


def variables(content: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "extra": None, **more}


@pytest.fixture(scope="module")
def process() -> Iterator[RenderProcess]:
    process = RenderProcess(TEMPLATES, SMALL, patience_s=20.0)
    yield process
    process.close()


def test_a_refusal_that_quotes_a_lone_surrogate_arrives(process: RenderProcess) -> None:
    with pytest.raises(InvalidRequest, match=r"refuses these messages: \?x$"):
        process(False, {"messages": [{"role": "\ud800x", "content": "role"}], "extra": None})


@pytest.mark.parametrize(
    "extra", [None, True, -1, 10**400, 1e308, float("inf"), "\ud800", "\x00 é 人 🎉", {"b": [1, {"a": None}], "a": 2.5}]
)
@pytest.mark.parametrize("tools", [None, [{"name": "f", "nested": {"z": 1, "a": [1.0, "\udfff"]}}]])
def test_it_renders_as_this_process_does(process: RenderProcess, extra: Any, tools: Any) -> None:
    given = variables("hello", extra=extra, tools=tools)
    assert process(tools is not None, given) == Renderer(TEMPLATES)(tools is not None, given)


@pytest.mark.parametrize("what", ["refuse", "fail", "recursion", "long"])
def test_a_refusal_is_told_in_the_same_words(process: RenderProcess, what: str) -> None:
    told = []
    for render in (process, Renderer(TEMPLATES)):
        with pytest.raises(InvalidRequest) as caught:
            render(False, variables(what))
        told.append(caught.value.message)
    assert told[0] == told[1]


@pytest.mark.parametrize(
    "what, limit",
    [
        ("double", "more than 100663296 bytes of memory"),
        ("repeat", "more than 100663296 bytes of memory"),
        ("format", "more than 100663296 bytes of memory"),
        ("list", "more than 100663296 bytes of memory"),
        ("power", "more than 0.3 s of processor time"),
        ("loop", "more than 0.3 s of processor time"),
    ],
)
def test_a_chat_over_a_limit_is_refused_and_those_beside_it_go_on(
    process: RenderProcess, what: str, limit: str
) -> None:
    errors: list[EverbatchError] = []

    def hostile() -> None:
        with pytest.raises(InvalidRequest) as caught:
            process(False, variables(what))
        errors.append(caught.value)

    thread = threading.Thread(target=hostile)
    thread.start()
    while thread.is_alive():
        assert process(False, variables("hello")).startswith("<s>[user]")
        time.sleep(0.01)
    thread.join()
    (error,) = errors
    assert f"rendering these messages with the chat template takes {limit}; send other messages" in error.message
    assert process(False, variables("hello")).startswith("<s>[user]")


def test_one_child_renders_one_chat_after_the_other(process: RenderProcess) -> None:
    process(False, variables("hello"))
    pid = process.process._running._process.pid  # type: ignore[union-attr]
    before = set(children_of(pid))  # some may be about to end
    for _ in range(20):
        process(False, variables("hello"))
    assert set(children_of(pid)) <= before


def test_a_child_that_dies_between_two_chats_is_given_none(process: RenderProcess) -> None:
    process(False, variables("hello"))
    pid = process.process._running._process.pid  # type: ignore[union-attr]
    dead = children_of(pid)
    for child in dead:
        os.kill(child, signal.SIGKILL)
    wait_for(lambda: not set(dead) & set(children_of(pid)))
    for _ in range(2):
        assert process(False, variables("hello")).startswith("<s>[user]")


def test_a_chat_that_waits_for_a_processor_too_long_is_given_up() -> None:
    process = RenderProcess(TEMPLATES, Limits(cpu_s=600.0, num_bytes=96 * MIB), patience_s=0.2)
    process.process.wait_until_ready()
    with pytest.raises(InvalidRequest, match=r"takes longer than 0\.2 s"):
        process(False, variables("loop"))
    running = process.process._running
    assert running is not None and not running._jobs, "it is not waited for any more"
    wait_for(lambda: not children_of(running._process.pid))
    process.close()


def test_a_process_that_was_killed_is_started_again_and_a_closed_one_leaves_nothing() -> None:
    before, descriptors = all_children(), open_descriptors()
    process = RenderProcess(TEMPLATES)
    process.start()
    assert process(False, variables("hello"))
    process.process._running._process.kill()  # type: ignore[union-attr]
    assert process(False, variables("hello"))
    process.close()
    assert not all_children() - before and not open_descriptors() - descriptors
    with pytest.raises(EngineUnavailable, match="try again later"):
        process(False, variables("hello"))


def test_a_process_that_cannot_be_started_is_the_server_s_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERBATCH_PYTHON", "/nowhere/python")
    with pytest.raises(EngineUnavailable, match="try again later"):
        RenderProcess(TEMPLATES)(False, variables("hello"))


def test_a_chat_template_has_its_limits_of_messages_and_its_end_where_it_renders_elsewhere() -> None:
    given: list[tuple[bool, dict[str, Any]]] = []

    def elsewhere(templates: Templates) -> Any:
        assert templates == Templates("x", "y", {"bos_token": "<s>"}, 100)
        return lambda with_tools, variables: given.append((with_tools, variables)) or "text: hi there"

    template = ChatTemplate("x", {"bos_token": "<s>"}, max_chars=100, tools_source="y", make_renderer=elsewhere)
    messages = [{"role": "assistant", "content": "hi"}]
    assert template.render(messages, tools=[], continue_final=True) == "text: hi"
    assert [with_tools for with_tools, _ in given] == [True] and given[0][1]["messages"] == messages
    with pytest.raises(InvalidRequest, match="allowed is 100"):
        template.render([{"role": "user", "content": "x" * 200}])
    assert len(given) == 1
