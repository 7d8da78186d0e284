"""Tables of other projects' parameters: what a check of given values gives, and what it refuses."""

from __future__ import annotations

import pytest

from backend.api import EngineConfig
from backend.api.foreign import (
    Checked,
    ForeignTable,
    RefusedParameter,
    Setting,
    UnknownParameter,
    honoured,
    no_effect,
    put,
    refused,
)
from tools.write_parameter_table import TABLES

TABLE = ForeignTable(
    "{} of file.json",
    honoured("flag", "scheduler.max_batch_size", convert=lambda wanted: 8 if wanted else None),
    honoured("rows", "scheduler.max_batch_size", convert=int),
    honoured("tokenizer"),
    *no_effect("nothing polls", "poll_ms"),
    *refused("one node runs the model", "nodes", neutral=(1, "one")),
)


def test_a_check_gives_settings_and_remarks_and_the_later_row_of_a_target_wins() -> None:
    given = {"rows": "4", "flag": True, "poll_ms": 5, "tokenizer": "x"}
    settings = {"scheduler.max_batch_size": Setting("rows", 4)}
    assert TABLE.check(given) == Checked(settings, ["poll_ms of file.json has no effect here: nothing polls"])
    assert TABLE.check({"flag": False, "tokenizer": None}) == Checked({}, [])
    tree = {"scheduler": {"max_batch_size": 1, "policy": "x"}}
    put(settings, tree)
    assert tree == {"scheduler": {"max_batch_size": 4, "policy": "x"}}


@pytest.mark.parametrize("value", [1, "One", None, False, []])
def test_a_refused_parameter_may_ask_for_nothing(value: object) -> None:
    assert TABLE.check({"nodes": value}) == Checked({}, [])


def test_what_is_refused_or_wrong_is_named_with_value_reason_and_remedy() -> None:
    sentence = "nodes of file.json is 2, which this version does not serve: one node runs the model; leave it out or set it to 1"
    with pytest.raises(RefusedParameter, match=f"^{sentence}$"):
        TABLE.check({"nodes": 2})
    with pytest.raises(RefusedParameter, match="^rows of file.json is 'x': invalid literal"):
        TABLE.check({"rows": "x"})
    with pytest.raises(RefusedParameter) as caught:
        TABLE.check({"nodes": "y" * 10_000})
    assert len(caught.value.message) < 300


def test_an_unknown_parameter_is_named_with_the_nearest_known_one() -> None:
    with pytest.raises(UnknownParameter, match="^nodez of file.json is no known parameter; did you mean nodes[?]$"):
        TABLE.check({"nodez": 2, "rows": "x"})
    with pytest.raises(UnknownParameter, match="zzz of file.json is no known parameter; docs/parameters.md lists"):
        TABLE.check({"zzz": 2})


@pytest.mark.parametrize("interface", TABLES)
def test_every_table_sets_keys_that_exist_and_says_why_it_does_not(interface: str) -> None:
    for parameter in TABLES[interface]:
        section, _, name = parameter.target.partition(".")
        assert not parameter.target or hasattr(getattr(EngineConfig(), section), name)
        assert parameter.fate == "honoured" or (parameter.note and not parameter.target)
