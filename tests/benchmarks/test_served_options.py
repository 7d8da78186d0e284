"""The options of `bench served`, hostile ones too, and the cells that come of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.work import Cell, asks_of, kv_tokens_for
from benchmarks.served.options import PAIRS, Plan, Raw, checked
from deploy.errors import UserError

MOST_TOKENS = 2048


def plan(out: Path, **changes: Any) -> Plan:
    """The plan of usual options with some changes."""
    raw = Raw("", "vllm", "openai", 0.25, "1,4", PAIRS, 30.0, 4, 3, 16, 4, 2000.0, 100.0, "auto", 0, out)
    return checked(replace(raw, **changes), MOST_TOKENS)


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("scale", [-1.0, 0.0, float("nan"), float("inf"), 1e300]),
        ("seconds", [-5.0, 0.0, float("nan"), float("inf"), 1e9]),
        ("requests", [-1, 0, 10**12]),
        ("repeats", [-1, 0, 10**12]),
        ("conversations", [-1, 1, 10**12]),
        ("turns", [-1, 0, 1, 10**12]),
        ("second_level", [-1, 65_537, 10**12]),
        ("first_token_limit_ms", [-1.0, 0.0, float("nan"), float("inf")]),
        ("inter_token_limit_ms", [-1.0, 0.0, float("nan"), float("inf")]),
        ("users", ["", "0", "-1", "1,x", "nan", "1e9", "257", "99999999999999999999", "1,2,3,4,5,6,7,8,9", "٣"]),
        ("pairs", ["", "512", "512:", ":512", "0:1", "-1:5", "1:2:3", "9999999:1", "a:b", ",".join(["1:2"] * 17)]),
        ("peers", ["nobody", "vllm,x", "name=ftp://h:1", "name=http://h", "name=http://h:99999", "A=http://h:1"]),
        (
            "peers",
            [
                "vllm=http://h:1",
                "everbatch=http://h:1",
                "a=http://h:1,a=http://h:2",
                "a=http://u@h:1",
                "a=http://h:1/x",
            ],
        ),
        ("wires", ["soap"]),
        ("driver", ["genai"]),
    ],
)
def test_an_option_that_is_out_of_bounds_is_refused_by_its_name(tmp_path: Path, option: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(UserError, match=f"^--{option.replace('_', '-')} "):
            plan(tmp_path, **{option: value})


def test_a_directory_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--out .* cannot be written to"):
        plan(tmp_path / "file" / "below")


def test_the_five_pairs_are_scaled_and_what_does_not_fit_is_named(tmp_path: Path) -> None:
    found = plan(tmp_path)
    assert {(cell.prompt, cell.new) for cell in found.single} == {(128, 128), (256, 256), (512, 64), (64, 512)}
    assert {cell.users for cell in found.single} == {1, 4}
    assert [sentence for sentence in found.left_out if sentence.startswith("2048:128")] == list(found.left_out)
    assert len(found.left_out) == 2


def test_lengths_that_never_fit_are_refused_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="give a smaller --scale"):
        plan(tmp_path, scale=4.0, pairs="8192:512")


def test_peers_that_run_already_are_kept_beside_those_that_are_started(tmp_path: Path) -> None:
    found = plan(tmp_path, peers="llamacpp, ovms=http://127.0.0.1:8100/,vllm,vllm")
    assert (found.peers, found.urls) == (("llamacpp", "vllm"), {"ovms": "http://127.0.0.1:8100"})


def test_prompts_are_the_same_for_every_server_and_new_in_each_repeat() -> None:
    cell = Cell(16, 8, users=3)
    first = asks_of(cell, 100, repeat=0, per_user=2)
    assert first == asks_of(cell, 100, repeat=0, per_user=2)
    prompts = [tuple(ask.prompt) for repeat in range(3) for ask in asks_of(cell, 100, repeat, per_user=2)]
    assert len(set(prompts)) == len(prompts) == 18
    assert {len(prompt) for prompt in prompts} == {16}


def test_between_two_turns_of_a_conversation_come_all_others_and_the_history_grows() -> None:
    cell = Cell(10, 4, users=1, conversations=3, turns=2)
    asks = asks_of(cell, 100, repeat=0, per_user=9)
    assert [ask.name for ask in asks] == ["c0t0", "c1t0", "c2t0", "c0t1", "c1t1", "c2t1"]
    for first, second in zip(asks[:3], asks[3:]):
        assert second.prompt[:10] == first.prompt
        assert len(second.prompt) == 24


def test_conversations_get_kv_for_half_of_them_but_enough_for_the_users() -> None:
    many = Cell(100, 28, users=1, conversations=40, turns=4)
    assert kv_tokens_for([many]) == 40 * 512 // 2
    assert kv_tokens_for([Cell(2, 2, users=4, conversations=16, turns=2)]) >= 4 * 128
    assert kv_tokens_for([Cell(512, 512, users=4)]) >= 4 * 1024
