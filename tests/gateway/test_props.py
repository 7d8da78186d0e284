"""llama-server's /props and /slots, and vLLM's prompt_logprobs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.logprobs import prompt_scores
from gateway.props import slots_of
from gateway.turns import Turns
from tests.gateway.conftest import Served
from tests.gateway.fake_triton import TOKENIZER, FakeTriton
from tests.gateway.test_keys import ALICE, BOB, write
from tests.gateway.views import view

CHAT = {"model": "everbatch", "messages": [{"role": "user", "content": "ab"}]}
TEXT = {"model": "everbatch", "prompt": "ab"}


def test_props_are_facts_of_the_model_and_the_batch(served: Served) -> None:
    _, told, _ = served.request("GET", "/props")
    assert told["default_generation_settings"] == {"n_ctx": 2048} and told["total_slots"] == 8
    assert (told["chat_template"], told["eos_token"]) == (TOKENIZER["chat_template"], TOKENIZER["eos_token"])
    assert told["modalities"] == {"vision": False, "audio": False} and told["model_alias"] == "everbatch"
    assert served.request("GET", "/props?model=nope")[0] == 404


def test_slots_are_the_places_of_the_batch_and_a_full_one_says_so(
    served: Served, triton: FakeTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, slots, _ = served.request("GET", "/slots?fail_on_no_slot=1")
    assert [slot["is_processing"] for slot in slots] == [True] + [False] * 7
    assert slots[0]["next_token"] == [{"has_next_token": True, "n_remain": 90, "n_decoded": 10}]
    full = view()
    full["rows"] *= 8
    assert all(slot["is_processing"] for slot in slots_of(full, 1))
    monkeypatch.setattr(triton, "live", full)
    assert served.request("GET", "/slots")[0] == 200
    status, answer, headers = served.request("GET", "/slots?fail_on_no_slot=1")
    assert status == 503 and "all 8 places" in answer["error"]["message"] and headers["retry-after"]


def test_the_batch_is_shown_to_keys_with_the_word_metrics_only(
    triton: FakeTriton, serve: Callable[..., AbstractContextManager[Served]], tmp_path: Path
) -> None:
    keys = write(tmp_path / "keys", f"alice {ALICE} metrics\nbob {BOB}\n")
    with serve(api_keys=keys) as served:
        seen = {}
        for key in (ALICE, BOB):
            headers = {"Authorization": f"Bearer {key}"}
            slots, props = (served.request("GET", path, headers=headers) for path in ("/slots", "/props"))
            seen[key] = (slots[0], props[0], "total_slots" in props[1])
    assert seen == {ALICE: (200, 200, True), BOB: (403, 200, False)}


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
def test_prompt_logprobs_have_vllms_form(path: str, body: dict[str, Any], served: Served, triton: FakeTriton) -> None:
    _, answer, _ = served.request("POST", path, {**body, "prompt_logprobs": 1})
    holder = answer if path.startswith("/v1/chat") else answer["choices"][0]
    expected = [None, *({"1": {"logprob": -0.5, "rank": 1, "decoded_token": letter}} for letter in "ab")]
    assert holder["prompt_logprobs"] == expected and triton.last().body["prompt_logprobs"] == 1
    assert answer["choices"][0]["logprobs"] is None, "the answer's own were not asked for"
    _, plain, _ = served.request("POST", path, body)
    assert "prompt_logprobs" not in str(plain)


def test_a_token_that_is_none_of_the_likeliest_has_no_rank() -> None:
    likely = [{"token_id": number, "token": str(number), "logprob": -float(number)} for number in (1, 2)]
    tokens = [{"token_id": 9, "token": "<s>", "logprob": None}]
    tokens += [{"token_id": number, "token": str(number), "logprob": -5.0, "top": likely} for number in (7, 2)]
    raw = [msgspec.Raw(msgspec.json.encode(token)) for token in tokens]
    first, second, third = msgspec.json.decode(asyncio.run(prompt_scores(raw, Turns())))
    assert first is None and [(key, one["rank"]) for key, one in second.items()] == [("7", None), ("1", 1), ("2", 2)]
    assert {key: one["rank"] for key, one in third.items()} == {"2": 2, "1": 1}
    many = msgspec.json.decode(asyncio.run(prompt_scores(raw * 100, Turns())))
    assert many == [first, second, third] * 100


@pytest.mark.parametrize("more", [{"stream": True}, {"echo": True}, {"suffix": "z"}])
def test_prompt_logprobs_are_refused_beside_what_they_cannot_be_had_with(more: dict[str, Any], served: Served) -> None:
    status, answer, _ = served.request("POST", "/v1/completions", {**TEXT, "prompt_logprobs": 1, **more})
    (name,) = more
    assert status == 400 and answer["error"]["param"] == "prompt_logprobs"
    assert f"cannot be had with {name}" in answer["error"]["message"]
