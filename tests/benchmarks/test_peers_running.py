"""The plan, the line protocol, and runners as real processes: paused, failing, ended."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.peers import commands, environments, llamacpp_source, plan
from benchmarks.peers.engines import PEERS, EngineSpec
from benchmarks.peers.errors import Skipped
from benchmarks.peers.plan import Action
from benchmarks.peers.protocol import Load, Measure, Stopwatch
from benchmarks.peers.runners import Runner
from deploy.processes import read_stat
from deploy.progress import SteppedProgress

LOAD = Load("model", "bf16", "", threads=1, max_concurrency=2, max_length=16, kv_bytes_per_token=64)
MEASURE = Measure(lengths=[4, 6], new=3, seed=1, vocab_size=100)
ENGINE = "tests.benchmarks.echo_engine"


def of(steps: list[plan.Step], *actions: Action) -> list[tuple[int, int, int]]:
    return [(step.concurrency, step.repeat, step.contestant) for step in steps if step.action in actions]


def test_engines_alternate_within_each_concurrency_and_repeat() -> None:
    steps = plan.alternating(contestants=2, concurrencies=(1, 8), repeats=2)
    assert of(steps, Action.MEASURE) == [(c, r, i) for c in (1, 8) for r in (0, 1) for i in (0, 1)]
    assert [step.action for step in steps[:2]] == [Action.LOAD, Action.LOAD]
    assert steps[2:4] == [plan.Step(Action.WARM_UP, 0, 1), plan.Step(Action.WARM_UP, 1, 1)]


def test_one_by_one_an_engine_is_ended_before_the_next_is_loaded() -> None:
    steps = plan.one_by_one(contestants=2, concurrencies=(1, 8), repeats=2)
    lives = [(step.action, step.contestant) for step in steps if step.action in (Action.LOAD, Action.END)]
    assert lives == [(Action.LOAD, 0), (Action.END, 0), (Action.LOAD, 1), (Action.END, 1)]


def test_both_plans_measure_the_same() -> None:
    sizes = (3, (1, 8, 32), 5)
    alternating, one_by_one = plan.alternating(*sizes), plan.one_by_one(*sizes)
    for action in (Action.WARM_UP, Action.MEASURE):
        assert sorted(of(alternating, action)) == sorted(of(one_by_one, action))


def test_prompts_follow_the_seed_and_stay_in_the_vocabulary() -> None:
    prompts = MEASURE.prompts()
    assert prompts == Measure([4, 6], 3, 1, 100).prompts() != Measure([4, 6], 3, 2, 100).prompts()
    assert [len(prompt) for prompt in prompts] == [4, 6] and prompts[0] != prompts[1][:4]
    assert all(5 <= token < 100 for prompt in prompts for token in prompt)


def test_decoding_counts_from_when_every_request_has_its_first_token() -> None:
    watch = Stopwatch(2)
    for request, count in ((0, 1), (0, 1), (1, 1)):
        assert not watch.all_started
        watch.add(request, count)
    assert watch.all_started
    watch.add(0, 1)
    watch.add(1, 2)
    timing = watch.timing(new=3)
    assert timing.decode_tokens == 3  # three of the six had come by then
    assert timing.prefill_s > 0 and timing.decode_s > 0


def test_a_request_with_too_few_tokens_is_an_error() -> None:
    watch = Stopwatch(2)
    watch.add(0, 3)
    watch.add(1, 2)
    with pytest.raises(RuntimeError, match=r"\[2, 3\] tokens, 3 were asked for"):
        watch.timing(new=3)


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[Runner]:
    runner = Runner(Path(sys.executable), ENGINE, 1, tmp_path / "log", lambda: None)
    yield runner
    runner.close()


def test_a_runner_loads_and_measures_whatever_its_engine_prints(runner: Runner) -> None:
    assert runner.load(LOAD)["versions"].keys() == {"pytest"}
    answer = runner.measure(MEASURE)
    assert answer["decode_tokens"] == 4
    assert 0 < answer["peak_rss_gib"] < 1


def test_a_paused_runner_is_stopped_and_goes_on(runner: Runner) -> None:
    runner.load(LOAD)
    runner.pause()
    wait_for_state(runner.pid, "T")
    runner.resume()
    assert runner.measure(MEASURE)["decode_tokens"] == 4


def test_a_paused_runner_can_be_ended(runner: Runner) -> None:
    runner.load(LOAD)
    runner.pause()
    runner.close()
    assert read_stat(runner.pid) is None


def test_an_error_of_the_engine_is_the_reason_why_it_is_skipped(runner: Runner) -> None:
    runner.load(LOAD)
    with pytest.raises(Skipped, match="RuntimeError: 13 tokens are unlucky"):
        runner.measure(Measure([4, 6], 13, 1, 100))


def test_a_runner_that_dies_is_skipped_with_its_signal_and_last_words(runner: Runner) -> None:
    runner.load(LOAD)
    with pytest.raises(Skipped, match="ended by signal SIGSEGV; its last words: going down"):
        runner.measure(Measure([4, 6], signal.SIGSEGV, 1, 100))


def test_a_command_that_fails_says_so_with_its_last_line() -> None:
    script = "print('fetching'); print(); raise SystemExit('no such wheel')"
    with pytest.raises(commands.CommandFailed, match="no such wheel") as failure:
        commands.run([sys.executable, "-c", script], SteppedProgress(), "a command")
    assert failure.value.output == ["fetching", "no such wheel"]


def test_a_command_leaves_no_child_behind() -> None:
    sleeper = "[sys.executable, '-c', 'import signal; signal.pause()']"
    quiet = "stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL"
    script = f"import subprocess, sys; print(subprocess.Popen({sleeper}, {quiet}).pid)"
    (pid,) = commands.run([sys.executable, "-c", script], SteppedProgress(), "a command")
    wait_for_state(int(pid), "ZX")


def test_an_environment_is_complete_only_with_the_stamp_of_its_recipe(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    assert not environments.is_complete(tmp_path, "recipe")
    (tmp_path / "everbatch.json").write_text('{"recipe": "recipe"}\n')
    assert environments.is_complete(tmp_path, "recipe")
    assert not environments.is_complete(tmp_path, "another")


@pytest.mark.parametrize("engine", [peer for peer in PEERS.values() if peer.requirements], ids=lambda peer: peer.name)
def test_every_requirement_of_a_peer_is_pinned(engine: EngineSpec) -> None:
    lines = (environments.REQUIREMENTS / engine.requirements).read_text().splitlines()
    assert all("==" in line for line in lines if line and not line.startswith("#"))


def test_a_peer_that_cannot_be_installed_is_skipped_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "env-vllm").write_text("a file where the environment should be")
    monkeypatch.setattr(environments, "BENCH", tmp_path)
    with pytest.raises(Skipped, match="it cannot be installed"):
        environments.python_of(PEERS["vllm"], SteppedProgress())


def test_the_line_for_amx_is_put_before_the_call_and_an_unknown_source_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "mmq.cpp"
    source.write_text(f"void init() {{\n{llamacpp_source.CALL}}}\n")
    llamacpp_source.mend(source)
    assert source.read_text() == f"void init() {{\n{llamacpp_source.MENDED}}}\n"
    source.write_text("void init() {}\n")
    with pytest.raises(Skipped, match="no single call"):
        llamacpp_source.mend(source)


def wait_for_state(pid: int, states: str) -> None:
    """Until it is in one of the states (X: also when it is gone). The test's own time limit ends this."""
    while (stat.state if (stat := read_stat(pid)) else "X") not in states:
        pass
