"""The tables that a run ends with, and the same as JSON."""

from __future__ import annotations

from typing import Any

from tests.hostile import answers
from tests.hostile.tally import Tally


def table(head: list[str], rows: list[list[str]]) -> str:
    """Columns as wide as they need to be, the first one to the left."""
    widths = [max(len(row[n]) for row in [head, *rows]) for n in range(len(head))]
    lines = []
    for row in [head, ["-" * width for width in widths], *rows]:
        lines.append(
            "  ".join(
                cell.ljust(width) if n == 0 else cell.rjust(width) for n, (cell, width) in enumerate(zip(row, widths))
            )
        )
    return "\n".join(lines)


def by_class(tally: Tally) -> str:
    quantiles = tally.quantiles()
    rows = []
    for found in answers.ALL:
        for protocol in ("http", "grpc"):
            if number := tally.classes[protocol, found]:
                p50, p99 = quantiles[f"{protocol} {found}"]
                rows.append([f"{found} ({protocol})", str(number), f"{p50:.1f}", f"{p99:.1f}"])
    return table(["answer", "cases", "p50 ms", "p99 ms"], rows)


def by_kind(tally: Tally) -> str:
    found = [name for name in (*answers.ALL, "lost with the server") if any(key[1] == name for key in tally.kinds)]
    short = [name.split(" ")[0].lower().replace("_argument", "") for name in found]
    kinds = sorted({kind for kind, _ in tally.kinds})
    return table(
        ["request", *short], [[kind, *(str(tally.kinds[kind, name] or "") for name in found)] for kind in kinds]
    )


def memory(tally: Tally) -> str:
    """Resident memory at the start, in the middle and at the end."""
    if not tally.samples:
        return ""
    chosen = [tally.samples[0], tally.samples[len(tally.samples) // 2], tally.samples[-1]]
    names = [name for name in tally.samples[0] if name not in ("cases", "other")]
    head = ["resident MB, open files", *(f"after {sample['cases']:.0f}" for sample in chosen)]
    return table(head, [[name, *(f"{sample.get(name, 0.0):.0f}" for sample in chosen)] for name in sorted(names)])


def text(tally: Tally, show: int = 8) -> str:
    """The whole report for a person."""
    parts = [by_class(tally), by_kind(tally), memory(tally)]
    honest = f"{tally.witnessed} honest requests among them ({tally.witnesses_refused} refused by a full queue)"
    parts.append(
        f"{tally.num_cases} cases, {tally.canaries} canaries, {honest}, {len(tally.deaths)} deaths, "
        f"log of {tally.log_bytes >> 10} KiB"
    )
    for death in tally.deaths:
        said = death["explained by"] or "NOT EXPLAINED"
        parts.append(
            f"death of {death['who']} (status {death['status']}) after {death['after']} cases: {said}; log {death['log']}"
        )
        parts += [f"    {line}" for line in (death["backtrace"][:6] if not death["explained by"] else [])]
    for what, examples in tally.examples.items():
        parts.append(f"{what}: {len(examples)}")
        parts += [f"    {e['index']} {e['kind']}, {e['case']}: {e['said']}" for e in _varied(examples)[:show]]
    parts += [f"canary: {problem}" for problem in tally.canary_failures[:show]]
    failures = tally.failures()
    parts.append("FAILED: " + "; ".join(failures) if failures else "passed")
    return "\n\n".join(parts[:3]) + "\n\n" + "\n".join(parts[3:])


def _varied(examples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Examples that differ in kind or in the beginning of what was said, then the others."""
    first = {(e["kind"], e["said"][:60]): e for e in reversed(examples)}
    return list(first.values())


def as_json(tally: Tally) -> dict[str, Any]:
    return {
        "cases": tally.num_cases,
        "canaries": tally.canaries,
        "honest requests among them": tally.witnessed,
        "classes": {f"{protocol} {found}": number for (protocol, found), number in sorted(tally.classes.items())},
        "kinds": {f"{kind}: {found}": number for (kind, found), number in sorted(tally.kinds.items())},
        "milliseconds (p50, p99)": tally.quantiles(),
        "examples": tally.examples,
        "error texts": dict(tally.texts.most_common()),
        "deaths": tally.deaths,
        "canary failures": tally.canary_failures,
        "resident MB": tally.samples,
        "log bytes": tally.log_bytes,
        "failures": tally.failures(),
    }
