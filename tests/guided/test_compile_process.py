"""The process that compiles guides, with the library that it has: hostile guides beside simple ones, and nothing left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from backend.api.config.schema import GuidedConfig
from backend.api.errors import EverbatchError
from backend.api.guide import Guide, GuideType
from backend.api.request import RequestId
from backend.core import limited_process
from backend.core.limited_messages import Ending, Limits
from backend.core.limited_process import LimitedJob
from backend.executor.executor import Executor
from backend.guided.compile_jobs import CompileProcess, CompileSetup, Materials
from backend.guided.compiler import GuideCompiler
from backend.guided.setup import make_guides
from tests.descriptors import open_descriptors
from tests.guided.processes import all_children, children_of, is_alive, wait_for
from tests.guided.tools import MODEL, VOCAB, accepts, backend

MATERIALS = Materials("llguidance", VOCAB, (2,), str(MODEL))
KIB, MIB = 1 << 10, 1 << 20
SIMPLE = Guide(GuideType.JSON_SCHEMA, '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}')


@pytest.fixture(scope="module")
def process() -> Iterator[CompileProcess]:
    process = CompileProcess(CompileSetup(MATERIALS, Limits(0.5, 64 * MIB)))
    yield process
    process.close()


def test_what_comes_of_the_process_is_the_guide(process: CompileProcess) -> None:
    outcome = process.run(LimitedJob(), SIMPLE)
    assert outcome.ending is Ending.DONE and 10 * KIB < outcome.num_bytes < 2 * MIB
    guide = backend().load(outcome.result)
    assert accepts(guide, '{"a": 5}') and not accepts(guide, '{"a": "5"}')


def test_a_process_that_is_killed_loses_its_guides_and_another_one_takes_the_next(process: CompileProcess) -> None:
    process.run(LimitedJob(), SIMPLE)
    assert process.process._running is not None
    first, outcomes = process.process._running, []
    slow = Guide(GuideType.JSON_SCHEMA, '{"type": "integer", "multipleOf": 99999989}')
    thread = threading.Thread(target=lambda: outcomes.append(process.run(LimitedJob(), slow)))
    thread.start()
    wait_for(lambda: children_of(first._process.pid))
    first._process.kill()
    thread.join(20)
    assert [each.ending for each in outcomes] == [Ending.LOST]
    assert process.run(LimitedJob(), SIMPLE).ending is Ending.DONE and process.process._running is not first
    wait_for(lambda: not Path(f"/proc/{first._process.pid}").exists())
    assert first._connection.fileno() == -1 and not first._jobs


def test_a_job_that_is_dropped_ends_its_child_though_it_might_go_on_for_minutes() -> None:
    process, outcomes = CompileProcess(CompileSetup(MATERIALS, Limits(600.0, 1 << 33))), []
    job, slow = LimitedJob(), Guide(GuideType.JSON_SCHEMA, '{"type": "integer", "multipleOf": 99999989}')
    thread = threading.Thread(target=lambda: outcomes.append(process.run(job, slow)))
    thread.start()
    wait_for(lambda: process.process._running is not None and children_of(process.process._running._process.pid))
    job.drop()
    thread.join(20)
    assert process.process._running is not None and [each.ending for each in outcomes] == [Ending.DROPPED]
    wait_for(lambda: not children_of(process.process._running._process.pid))  # type: ignore[union-attr]
    assert not process.process._running._jobs
    process.close()


def test_a_process_that_is_closed_leaves_nothing() -> None:
    before, descriptors, threads = all_children(), open_descriptors(), set(threading.enumerate())
    process = CompileProcess(CompileSetup(MATERIALS, Limits(0.5, 64 * MIB)))
    process.start()
    process.run(LimitedJob(), SIMPLE)
    assert len(all_children() - before) == 1
    process.close()
    assert not all_children() - before and not open_descriptors() - descriptors
    assert not set(threading.enumerate()) - threads
    with pytest.raises(OSError, match="no longer"):
        process.run(LimitedJob(), SIMPLE)


def test_a_process_that_cannot_be_started_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    descriptors = open_descriptors()
    monkeypatch.setenv("EVERBATCH_PYTHON", "/nowhere/python")
    process = CompileProcess(CompileSetup(MATERIALS, Limits(0.5, 64 * MIB)))
    with pytest.raises(OSError):
        process.run(LimitedJob(), SIMPLE)
    assert not open_descriptors() - descriptors
    process.close()


def test_a_process_outlives_no_engine_that_is_killed() -> None:
    """A program with a slow guide is killed with SIGKILL, and so ends without a word to anybody."""
    program = f"""if True:
        import threading
        from backend.api.guide import Guide, GuideType
        from backend.core.limited_messages import Limits
        from backend.core.limited_process import LimitedJob
        from backend.guided.compile_jobs import CompileProcess, CompileSetup
        from backend.guided.compile_jobs import Materials
        process = CompileProcess(CompileSetup(Materials("llguidance", {VOCAB}, (2,), {str(MODEL)!r}), Limits(60, 1 << 32)))
        process.start()
        print(process.process._running._process.pid, flush=True)
        process.run(LimitedJob(), Guide(GuideType.JSON_SCHEMA, '{{"type": "integer", "multipleOf": 99999989}}'))
    """
    arguments = [sys.executable, "-c", program]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, cwd=limited_process.ROOT) as engine:
        assert engine.stdout is not None
        server = int(engine.stdout.readline())
        wait_for(lambda: children_of(server))
        (child,) = children_of(server)
        engine.kill()
    wait_for(lambda: not is_alive(server) and not is_alive(child))


class Compiling:
    """A GuideCompiler as an engine makes it, and who has been told what and when."""

    def __init__(self, compiler: GuideCompiler) -> None:
        self.compiler = compiler
        self.told: dict[int, tuple[float, EverbatchError | None]] = {}
        self._number = 0
        compiler.on_compiled(lambda request_id, error: self.told.update({request_id: (time.monotonic(), error)}))

    def begin(self, guide: Guide, namespace: str) -> int:
        self._number += 1
        if self.compiler.begin(RequestId(self._number), guide, namespace):
            self.told[self._number] = time.monotonic(), None
        return self._number

    def error(self, number: int) -> EverbatchError | None:
        wait_for(lambda: number in self.told)
        return self.told[number][1]


@pytest.fixture(scope="module")
def compiling() -> Iterator[Compiling]:
    compiler, _ = make_guides(GuidedConfig(compile_timeout_s=60, compile_cpu_s=0.25), MODEL, VOCAB, (2,))
    assert compiler is not None
    made = Compiling(compiler)
    assert made.error(made.begin(SIMPLE, "warm")) is None
    yield made
    compiler.close()


def _schema(**schema: object) -> Guide:
    return Guide(GuideType.JSON_SCHEMA, json.dumps(schema, separators=(",", ":")))


TWICE = "{" + ",".join(f'"k{i}":0' for i in range(5500)) + ',"k5499":0}'
HOSTILE = {
    "multiple_of_a_prime": _schema(type="integer", multipleOf=99999989),
    "pattern_properties": _schema(type="object", patternProperties={f"^a{i}.*b{i}$": {} for i in range(1500)}),
    "optional_letters": Guide(GuideType.REGEX, "a?" * 16000 + "a" * 16000),
    "letters_of_unicode": Guide(GuideType.REGEX, "".join(rf"(\pL+{i})?" for i in range(4000))),
    "keys_twice": Guide(GuideType.JSON_SCHEMA, TWICE),
}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_guide_holds_up_no_other_namespace_s(compiling: Compiling, name: str) -> None:
    """Three of the kind, of which two run at once. Another namespace's guide beside them is compiled before they are all
    answered, and what they took is not left in the engine's process.
    """
    before, kind = resident_bytes(), HOSTILE[name]
    end = "b" if kind.type is GuideType.REGEX else " "
    assert len(kind.text) <= GuidedConfig().max_bytes - 2
    hostile = [compiling.begin(Guide(kind.type, kind.text + i * end), "attacker") for i in range(3)]
    simple = compiling.begin(Guide(GuideType.REGEX, f"[a-z]+ {name}"), "somebody else")
    assert compiling.error(simple) is None
    errors = [compiling.error(each) for each in hostile]
    assert all(error is not None and error.message.startswith("guide: ") for error in errors)
    if name != "keys_twice":  # which is refused within milliseconds
        assert compiling.told[simple][0] < max(compiling.told[each][0] for each in hostile)
    assert resident_bytes() - before < 64 * MIB
    for each in (*hostile, simple):
        compiling.compiler.end(RequestId(each))


def test_a_guide_within_the_limits_is_compiled_and_its_bytes_are_booked(compiling: Compiling) -> None:
    """a?^2000 a^2000 holds some 15 MB, which nobody could tell from its 6,000 bytes of text."""
    before = compiling.compiler.num_bytes
    number = compiling.begin(Guide(GuideType.REGEX, "a?" * 2000 + "a" * 2000), "a")
    assert compiling.error(number) is None
    assert compiling.compiler.num_bytes - before > 4 * MIB
    compiling.compiler.end(RequestId(number))


def test_a_request_that_ends_takes_its_guide_s_process_along(compiling: Compiling) -> None:
    server = compiling.compiler._jobs.process._running._process.pid  # type: ignore[attr-defined]
    wait_for(lambda: not children_of(server))
    number = compiling.begin(_schema(type="integer", multipleOf=99999971), "a")
    wait_for(lambda: children_of(server))
    compiling.compiler.end(RequestId(number))
    wait_for(lambda: not children_of(server))
    assert number not in compiling.told
    wait_for(lambda: not compiling.compiler._jobs.process._running._jobs)  # type: ignore[attr-defined]


@pytest.mark.parametrize("of_process", [False, True], ids=["in_process", "engine_process"])
def test_an_executor_leaves_no_process(of_process: bool, tmp_path: Path) -> None:
    from backend.api import EngineConfig, Request
    from backend.api.config.schema import KvCacheConfig, ModelConfigSection, SchedulerConfig

    config = EngineConfig(
        model=ModelConfigSection(path=str(MODEL)),
        kv_cache=KvCacheConfig(max_tokens=1024),
        scheduler=SchedulerConfig(max_batch_size=2),
    )
    before = all_children()
    made = (
        Executor.launch(config, str(tmp_path / "s" / "engine.sock"))
        if of_process
        else Executor.from_directory(MODEL, config)
    )
    with made as executor:
        request_id = executor.enqueue_request(Request([1, 2, 3], 4, guide=SIMPLE))
        (response, *_) = executor.await_responses(request_id, timeout=60)
        assert not response.has_error(), response.error_msg  # type: ignore[union-attr]
        mine = all_children() - before
        servers = {child for each in mine for child in children_of(each)} if of_process else mine
        assert len(servers) == 1
    assert all_children() == before
    wait_for(lambda: not any(map(is_alive, servers)))
