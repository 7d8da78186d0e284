"""Kills a real engine process at random moments under one request of each kind, and compares what their clients get."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from backend.api import EngineConfig, Request
from backend.api.config.schema import KvCacheConfig, LoraSection, ModelConfigSection, SchedulerConfig, SpeculationConfig
from backend.api.processes.back_off import BackOff
from backend.executor import Executor
from backend.text.stream import TextStream
from backend.text.tokenizer import Tokenizer
from backend.wire.client import wait_until
from tests.crashes.kinds import Heard, Kind, copies, kinds
from tests.model.adapters import make_adapter

MODEL = Path(__file__).resolve().parents[2] / "models" / "default"
CONFIG = EngineConfig(
    model=ModelConfigSection(
        path=str(MODEL),
        dtype="float32",
        num_threads=1,
        gather_context_logits=True,
        gather_generation_logits=True,
    ),
    kv_cache=KvCacheConfig(max_tokens=8192),
    scheduler=SchedulerConfig(max_batch_size=24, max_beam_width=3),
    lora=LoraSection(enabled=True),
    speculation=SpeculationConfig(mode="lookup"),
)
TWICE = 0.15  # share of the rounds whose engine is killed a second time, as soon as it is back


@dataclass
class Outcome:
    """Of all rounds."""

    num_kills: int = 0
    num_requests: int = 0  # that had to end with the same bytes
    num_cut: dict[str, int] = field(default_factory=dict)  # by kind: those killed in their midst
    differences: list[str] = field(default_factory=list)
    num_adopted: int = (
        0  # KV blocks that an engine has found in the pool of the one before it, as far as it has said so
    )
    pauses_s: list[float] = field(default_factory=list)  # from each kill to the first response after it


@contextmanager
def launched() -> Iterator[tuple[Executor, dict[str, Kind]]]:
    """The owner of an engine process that is never given up, and the kinds."""
    with tempfile.TemporaryDirectory(prefix="everbatch-crashes-") as directory:
        adapter = make_adapter(MODEL, Path(directory) / "adapter", seed=3)
        with Executor.launch(CONFIG, f"{directory}/run/engine.sock") as owner:
            owner._process._back_off = BackOff(None)  # type: ignore[union-attr]
            yield owner, kinds(Tokenizer.from_directory(MODEL), adapter)


def run(num_kills: int, seed: int = 0, num_streams: int | None = None, progress: bool = True) -> Outcome:
    """Rounds until so many kills are done, each under `num_streams` requests; None: under one of each kind."""
    rng, outcome, tokenizer = random.Random(seed), Outcome(), Tokenizer.from_directory(MODEL)
    with launched() as (owner, each_kind):
        all_kinds = copies(each_kind, num_streams or len(each_kind))
        undisturbed = _round(owner, all_kinds, tokenizer)
        right = {name: each.told() for name, each in undisturbed.items()}
        num_responses = _num_responses(undisturbed)
        while outcome.num_kills < num_kills:
            _disturbed_round(owner, all_kinds, tokenizer, right, num_responses, rng, outcome)
            if progress:
                print(f"{outcome.num_kills} kills, {len(outcome.differences)} differences", end="\r", flush=True)
    if progress:
        print()
    return outcome


def _disturbed_round(
    owner: Executor,
    all_kinds: dict[str, Kind],
    tokenizer: Tokenizer,
    right: dict[str, object],
    num_responses: int,
    rng: random.Random,
    outcome: Outcome,
) -> None:
    heard, moment = _begin(owner, all_kinds, tokenizer), rng.uniform(0.0, num_responses)
    while _num_responses(heard) < moment and not all(each.done.is_set() for each in heard.values()):
        time.sleep(0.0005)
    _kill(owner, heard, outcome)
    if rng.random() < TWICE and not all(each.done.is_set() for each in heard.values()):
        _kill(owner, heard, outcome)
    for name, each in heard.items():
        if not each.done.wait(120):
            outcome.differences.append(f"{name}: no end")
        elif each.told() != right[name]:
            outcome.differences.append(f"{name}: {each.error or 'other bytes'}")
        outcome.num_requests += 1
    assert wait_until(owner.is_ready, 120), "the engine is back"
    if any(each.num_responses for each in heard.values()):
        wait_until(lambda: _num_adopted(owner) > 0, 3)  # statistics come once a second
    outcome.num_adopted += _num_adopted(owner)


def _num_responses(heard: dict[str, Heard]) -> int:
    return sum(each.num_responses for each in heard.values())


def _num_adopted(owner: Executor) -> int:
    stats = owner.latest_stats()
    return 0 if stats is None else stats.latest.kv_cache.adopted_blocks_total


def _kill(owner: Executor, heard: dict[str, Heard], outcome: Outcome) -> None:
    """Kill the engine process, and wait until it is back."""
    process = owner._process
    assert process is not None and process.pid is not None  # it is the owner's
    owner._process._back_off._delay_s = 0.05  # type: ignore[union-attr]
    before = process.num_deaths
    os.kill(process.pid, signal.SIGKILL)
    killed = time.monotonic()
    assert wait_until(lambda: process.num_deaths > before, 30)
    cut = [name for name, each in heard.items() if not each.done.is_set()]
    counts = {name: heard[name].num_responses for name in cut}
    for name in cut:
        kind = name.partition(" #")[0]
        outcome.num_cut[kind] = outcome.num_cut.get(kind, 0) + (heard[name].num_responses > 0)
    wait_until(lambda: not cut or any(heard[name].num_responses > counts[name] for name in cut), 120)
    if cut:
        outcome.pauses_s.append(time.monotonic() - killed)
    assert wait_until(owner.is_ready, 120), "the engine is back"
    outcome.num_kills += 1


def _round(owner: Executor, all_kinds: dict[str, Kind], tokenizer: Tokenizer) -> dict[str, Heard]:
    """One request of each kind, undisturbed."""
    heard = _begin(owner, all_kinds, tokenizer)
    for name, each in heard.items():
        assert each.done.wait(120) and not each.error, f"{name}: {each.error}"
    return heard


def _begin(owner: Executor, all_kinds: dict[str, Kind], tokenizer: Tokenizer) -> dict[str, Heard]:
    for kind in all_kinds.values():
        for request in kind.before:
            earlier = Heard(owner, Kind(request))
            earlier.start(request)
            assert earlier.done.wait(120) and not earlier.error, earlier.error
    heard = {name: Heard(owner, kind, _text_of(kind, tokenizer)) for name, kind in all_kinds.items()}
    for each in heard.values():
        each.start(each.kind.request)
    return heard


def _text_of(kind: Kind, tokenizer: Tokenizer) -> TextStream | None:
    request: Request = kind.request
    return TextStream(tokenizer, request.input_token_ids, kind.stops) if kind.stops or kind.is_text else None
