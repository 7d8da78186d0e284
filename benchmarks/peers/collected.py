"""What runs have measured, as it is kept in benchmarks/results: a run can add to an earlier one of the same kind.

A model that takes long is then measured piece by piece: one concurrency at a time, a few peers beside this engine each time.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from benchmarks.peers.engines import OURS, PEERS, ours
from benchmarks.peers.measure import Contestant, Sample, Work
from deploy.errors import UserError

ENGINES = {**PEERS, OURS: ours()}
Json = dict[str, Any]


def kind_of(work: Work) -> Json:
    """What two runs must have in common for the figures of both to be compared."""
    return {
        "model": work.model.name,
        "weights": work.weights,
        "prompts": list(work.prompts),
        "new": work.new,
        "threads": work.threads,
        "busy": work.busy,
    }


def to_json(work: Work, contestants: Sequence[Contestant]) -> Json:
    return {"kind": kind_of(work), "contestants": [_contestant_to_json(contestant) for contestant in contestants]}


def earlier(path: Path, work: Work) -> list[Contestant]:
    """The contestants of the run whose results are in this file, none if there is no file. Raises UserError."""
    if not path.exists():
        return []
    measured = json.loads(path.read_text()).get("measured")
    if measured is None or measured["kind"] != kind_of(work):
        found = "keeps no samples" if measured is None else f"is of {measured['kind']}, not of {kind_of(work)}"
        raise UserError(f"{path.name} {found}; without --add it is written anew")
    return [_contestant_from_json(each) for each in measured["contestants"]]


def merged(old: Sequence[Contestant], new: Sequence[Contestant]) -> list[Contestant]:
    """All contestants, those of `new` with the samples of both. Who was measured before does not count as skipped."""
    known = {(contestant.engine.name, contestant.setting): contestant for contestant in old}
    result = []
    for contestant in new:
        before = known.pop((contestant.engine.name, contestant.setting), None)
        if before is not None and before.samples:
            contestant = _with_samples_of(contestant, before)
        result.append(contestant)
    return result + [contestant for contestant in known.values() if contestant.samples or not _has(new, contestant)]


def concurrencies_of(contestants: Sequence[Contestant]) -> tuple[int, ...]:
    """The numbers of streams at which any contestant was measured."""
    return tuple(sorted({concurrency for contestant in contestants for concurrency in contestant.samples}))


def _with_samples_of(contestant: Contestant, before: Contestant) -> Contestant:
    """`contestant` with the samples of both; one that could not be measured this time stays as it was."""
    if not contestant.samples:
        return before
    for concurrency, samples in before.samples.items():
        contestant.samples[concurrency] = samples + contestant.samples.get(concurrency, [])
        contestant.peak_rss_gib.setdefault(concurrency, before.peak_rss_gib[concurrency])
    return contestant


def _has(contestants: Sequence[Contestant], wanted: Contestant) -> bool:
    """Whether the engine is among them, in whatever setting."""
    return any(contestant.engine.name == wanted.engine.name for contestant in contestants)


def _contestant_to_json(contestant: Contestant) -> Json:
    return {
        "engine": contestant.engine.name,
        "setting": contestant.setting,
        "skipped": contestant.skipped,
        "load_s": contestant.load_s,
        "versions": contestant.versions,
        "note": contestant.note,
        "samples": {str(at): [astuple(sample) for sample in some] for at, some in contestant.samples.items()},
        "peak_rss_gib": {str(at): peak for at, peak in contestant.peak_rss_gib.items()},
    }


def _contestant_from_json(values: Json) -> Contestant:
    contestant = Contestant(ENGINES[values["engine"]], values["setting"], values["skipped"])
    contestant.load_s, contestant.versions, contestant.note = values["load_s"], values["versions"], values["note"]
    contestant.samples = {int(at): [Sample(*each) for each in some] for at, some in values["samples"].items()}
    contestant.peak_rss_gib = {int(at): peak for at, peak in values["peak_rss_gib"].items()}
    return contestant
