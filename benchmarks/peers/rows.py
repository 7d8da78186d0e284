"""From samples to rows: one for each engine and concurrency, with its ratio to the best peer and its share of the roof.

`decode_tokens_per_s`, `prefill_tokens_per_s` and `output_tokens_per_s` (generated tokens over the whole time) are the best of the
repeats, as are the ratios made of them; each has a `median_` beside it. An engine that was measured in several settings stands,
at each concurrency, with the one that decodes fastest; `settings` has them all, and a ratio is to the best peer in the setting
that is best for that rate. `roof_fraction` is the median over the repeats of the share that each reached of the roof at that
moment; `bandwidth_gb_per_s` and `roof_tokens_per_s` are medians too. Figures that there are none of are null, and `skipped` says
why.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.peers import roof
from benchmarks.peers.engines import OURS
from benchmarks.peers.measure import Contestant, Outcome, Sample, Work

Row = dict[str, Any]
RATIOS = {
    "ratio_to_best_peer": "decode_tokens_per_s",
    "median_ratio_to_best_peer": "median_decode_tokens_per_s",
    "prefill_ratio_to_best_peer": "prefill_tokens_per_s",
    "output_ratio_to_best_peer": "output_tokens_per_s",
}


def make_rows(work: Work, outcome: Outcome) -> list[Row]:
    """Rows in the order of concurrencies, then of engines."""
    engines: dict[str, list[Contestant]] = {}
    for contestant in outcome.contestants:
        engines.setdefault(contestant.engine.name, []).append(contestant)
    rows = []
    for concurrency in work.concurrencies:
        some = [_row(work, outcome, settings, concurrency) for settings in engines.values()]
        add_ratios(some)
        rows += some
    return rows


def add_ratios(rows: Sequence[Row]) -> None:
    """Divide by the best peer among rows of one model, weights and concurrency; null where no peer was measured."""
    for ratio, rate in RATIOS.items():
        peers = [row for row in rows if row["engine"] != OURS]
        rates = [figures[rate] for row in peers for figures in row["settings"].values()]
        for row in rows:
            known = rates and row[rate] is not None
            row[ratio] = row[rate] / max(rates) if known else None


def _row(work: Work, outcome: Outcome, settings: list[Contestant], concurrency: int) -> Row:
    measured = [contestant for contestant in settings if contestant.samples.get(concurrency)]
    figures = {contestant.setting: summarise(contestant.samples[concurrency]) for contestant in measured}
    best = max(measured, key=lambda contestant: figures[contestant.setting]["decode_tokens_per_s"], default=settings[0])
    own = figures.get(best.setting, dict.fromkeys(summarise([Sample(1.0, 1.0, 1.0, 1.0)])))
    return {
        "engine": best.engine.name,
        "model": work.model.name,
        "weights": work.weights,
        "concurrency": concurrency,
        "setting": best.setting,
        **own,
        **dict.fromkeys(RATIOS),
        **_roof(work, concurrency, best.samples.get(concurrency, [])),
        "prompt": work.prompts[0] if len(work.prompts) == 1 else list(work.prompts),
        "new": work.new,
        "repeats": len(best.samples.get(concurrency, [])),
        "threads": work.threads,
        "busy": work.busy,
        "alternated": outcome.alternated,
        "load_s": best.load_s,
        "peak_rss_gib": best.peak_rss_gib.get(concurrency),
        "versions": best.versions,
        "note": best.note,
        "settings": figures,
        "skipped": None if measured else best.skipped,
    }


def _roof(work: Work, concurrency: int, samples: Sequence[Sample]) -> dict[str, float | None]:
    if not samples:
        return dict.fromkeys(("roof_fraction", "roof_tokens_per_s", "bandwidth_gb_per_s"))
    length = statistics.mean(work.lengths(concurrency)) + work.new / 2
    step_bytes = work.model.step_bytes(work.weights, concurrency, length)
    roofs = [roof.tokens_per_s(concurrency, step_bytes, sample.bandwidth) for sample in samples]
    return {
        "roof_fraction": statistics.median(sample.decode / rate for sample, rate in zip(samples, roofs)),
        "roof_tokens_per_s": statistics.median(roofs),
        "bandwidth_gb_per_s": statistics.median(sample.bandwidth for sample in samples) / 1e9,
    }


def summarise(samples: Sequence[Sample]) -> dict[str, float]:
    """Best and median of each rate."""
    columns: dict[str, Callable[[Sample], float]] = {
        "decode_tokens_per_s": lambda sample: sample.decode,
        "prefill_tokens_per_s": lambda sample: sample.prefill,
        "output_tokens_per_s": lambda sample: sample.output,
    }
    return {
        f"{prefix}{name}": choose(map(column, samples))
        for name, column in columns.items()
        for prefix, choose in (("", max), ("median_", statistics.median))
    }
