"""`bench compare`: ratios, what lies beyond the spread, and the exit status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from benchmarks.compare.__main__ import main
from benchmarks.compare.figures import Figure, Key, read
from benchmarks.compare.ratios import ratios_of
from benchmarks.harness.results import KIND
from deploy.errors import UserError

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
app = typer.Typer()
app.command()(main)


def served(path: Path, rates: list[float], times: list[float], cell: str = "512:512, 1 user") -> Path:
    """Results of one server in one cell."""
    repeats = [{"output_tokens_per_s": rate, "first_token_ms_p50": ms} for rate, ms in zip(rates, times)]
    rows = [{"cell": cell, "lane": "everbatch", "repeats": repeats}]
    path.write_text(json.dumps({"kind": KIND, "rows": rows}))
    return path


def compare(*words: object) -> Result:
    """The command's result."""
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})


def test_more_tokens_and_less_time_are_both_above_one(tmp_path: Path) -> None:
    before = read(served(tmp_path / "a", [100, 100], [20, 20]))
    after = read(served(tmp_path / "b", [150, 150], [10, 10]))
    rate, time = ratios_of(before, after)
    assert (rate.ratio, time.ratio) == (1.5, 2.0)
    assert (rate.mark, time.mark) == ("better", "better")


def test_a_change_within_the_spread_is_not_marked(tmp_path: Path) -> None:
    before = read(served(tmp_path / "a", [90, 100, 130], [20, 20, 20]))
    after = read(served(tmp_path / "b", [120, 140, 150], [40, 41, 42]))
    rate, time = ratios_of(before, after)
    assert (rate.ratio, rate.mark, rate.spread) == (1.4, "", pytest.approx(0.4))
    assert (time.mark, time.spread) == ("worse", pytest.approx(2 / 41))


def test_figures_without_repeats_have_no_spread_and_no_mark() -> None:
    key = Key("cell", "server", "figure")
    (ratio,) = ratios_of({key: Figure([1.0], True)}, {key: Figure([9.0], True)})
    assert (ratio.ratio, ratio.spread, ratio.mark) == (9.0, None, "")


def test_a_figure_that_falls_to_zero_is_no_lost_line(tmp_path: Path) -> None:
    key = Key("cell", "server", "goodput")
    (ratio,) = ratios_of({key: Figure([2.0, 3.0], True)}, {key: Figure([0.0, 0.0], True)})
    assert (ratio.ratio, ratio.mark) == (0.0, "worse")
    (ratio,) = ratios_of({key: Figure([0.0, 0.0], True)}, {key: Figure([0.0, 0.0], True)})
    assert (ratio.ratio, ratio.mark) == (1.0, "")
    before, after = served(tmp_path / "a", [5, 5], [1, 1]), served(tmp_path / "b", [0, 0], [1, 1])
    assert compare(before, after, "--fail-below", 0.95).exit_code == 1


@pytest.mark.parametrize(("limit", "status"), [(0.95, 1), (0.8, 0)])
def test_the_exit_status_says_whether_a_ratio_is_below_the_limit(tmp_path: Path, limit: float, status: int) -> None:
    before, after = served(tmp_path / "a", [100, 101], [20, 20]), served(tmp_path / "b", [90, 91], [20, 20])
    assert compare(before, after).exit_code == 0
    done = compare(before, after, "--fail-below", limit)
    assert done.exit_code == status
    assert ("1 of 2 ratios are below 0.95" in done.output) == bool(status)


def test_lines_are_chosen_by_their_text(tmp_path: Path) -> None:
    before, after = served(tmp_path / "a", [100, 101], [20, 20]), served(tmp_path / "b", [90, 91], [20, 20])
    assert compare(before, after, "--fail-below", 0.95, "--only", "first token").exit_code == 0
    assert compare(before, after, "--only", "nothing of the kind").exit_code == 2


def test_cells_of_one_file_alone_are_named(tmp_path: Path) -> None:
    before = served(tmp_path / "a", [1, 1], [1, 1])
    both = json.loads(before.read_text())
    both["rows"].append(both["rows"][0] | {"cell": "8192:512, 1 user"})
    (tmp_path / "b").write_text(json.dumps(both))
    done = compare(before, tmp_path / "b")
    assert (done.exit_code, "only after: 8192:512, 1 user, everbatch" in done.output) == (0, True)
    other = served(tmp_path / "c", [1, 1], [1, 1], cell="another")
    assert "no figure in common" in compare(before, other).output


@pytest.mark.parametrize("limit", ["nan", "-1", "0", "1e300", "inf"])
def test_a_limit_that_is_no_ratio_is_refused(tmp_path: Path, limit: str) -> None:
    file = served(tmp_path / "a", [1, 1], [1, 1])
    done = compare(file, file, f"--fail-below={limit}")
    assert (done.exit_code, "--fail-below is" in done.output) == (2, True)


@pytest.mark.parametrize("name", ["peers-M-bf16", "peers-L-int4", "served-M", "speculation"])
def test_results_of_other_benchmarks_are_read(name: str) -> None:
    file = RESULTS / f"{name}.json"
    done = compare(file, file, "--fail-below", 1)
    assert done.exit_code == 0, done.output
    assert len(read(file)) > 2


@pytest.mark.parametrize("name", ["gpu", "overhead", "sessions-M"])
def test_results_of_another_shape_are_refused(name: str) -> None:
    with pytest.raises(UserError, match="holds no figures that can be compared; give results of served, load"):
        read(RESULTS / f"{name}.json")


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "{}", "null", "3", '"x"', "[[]]", '{"rows": []}', '{"rows": {}}', "[" * 100_000]
    + [json.dumps({"kind": KIND, "rows": rows}) for rows in ([], [{}], 3, [{"cell": 1, "lane": 2, "repeats": [3]}])]
    + [
        json.dumps({"kind": KIND, "rows": [{"cell": "a", "lane": "b", "repeats": [{"output_tokens_per_s": value}]}]})
        for value in (float("nan"), float("inf"), -1, "x", True, None)
    ],
)
def test_a_file_that_is_no_result_is_refused_with_one_sentence(tmp_path: Path, content: str) -> None:
    (tmp_path / "bad").write_text(content)
    with pytest.raises(UserError, match="cannot be read|holds no figures"):
        read(tmp_path / "bad")


def test_a_file_that_is_not_there_or_far_too_large_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read(tmp_path / "none")
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(65 << 20)
    with pytest.raises(UserError, match="more than 64 MiB"):
        read(tmp_path / "huge")


def test_texts_of_a_file_are_shown_as_they_are(tmp_path: Path) -> None:
    file = served(tmp_path / "a", [1, 1], [1, 1], cell="[red]x[/red] [/nothing]")
    done: Any = compare(file, file)
    assert (done.exit_code, "[red]x[/red] [/nothing]" in done.output) == (0, True)
