"""Keys of other servers' clients and routers: taken where they ask for nothing or are honoured, refused by name otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gateway.conftest import Served
from tests.gateway.fake_triton import FakeTriton

CHATS = "chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHATS: {"messages": [{"role": "user", "content": "hi"}]},
    "completions": {"prompt": "hi"},
    "responses": {"input": "hi"},
}
ROUTER = {  # what the routers of vLLM and SGLang put into every request
    "no_stop_trim": False,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "include_reasoning": True,
    "return_hidden_states": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
}
OF_CHATS = {"continue_final_message": False, "add_generation_prompt": True, "chat_template_kwargs": None}
LMDEPLOY = {  # what the client of LMDeploy 0.10 sends with each request
    **dict.fromkeys(("stop", "user", "stream_options")),
    **{"temperature": 0.7, "top_p": 1.0, "top_k": 40, "n": 1, "stream": False, "kwargs": {}},
    **{"repetition_penalty": 1.0, "ignore_eos": False},
    **{"skip_special_tokens": True, "spaces_between_special_tokens": True},
}
LMDEPLOY_CHAT = {
    **dict.fromkeys(("max_completion_tokens", "max_tokens", "min_new_tokens", "logit_bias")),
    **{"logprobs": False, "top_logprobs": 0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_p": 0.0},
}
LMDEPLOY_COMPLETION = {"suffix": None, "max_completion_tokens": 16, "max_tokens": 16}
TOOL = {"type": "function", "function": {"name": "f"}}
TWO_FORMS = {"guided_regex": "a", "structured_outputs": {"regex": "a"}}
CONTINUED = {"continue_final_message": True}


@pytest.mark.parametrize("path", BODIES)
def test_what_routers_put_into_every_request_changes_nothing(path: str, served: Served, triton: FakeTriton) -> None:
    added = ROUTER | (OF_CHATS if path == CHATS else {})
    for keys in ({}, added):
        status, answer, _ = served.request("POST", f"/v1/{path}", {"model": "everbatch", **BODIES[path], **keys})
        assert status == 200, answer
    plain, routed = triton.requests
    assert plain.body == routed.body


@pytest.mark.parametrize(("path", "own"), [(CHATS, LMDEPLOY_CHAT), ("completions", LMDEPLOY_COMPLETION)])
def test_lmdeploys_client_is_served(path: str, own: dict[str, Any], served: Served, triton: FakeTriton) -> None:
    body = {"model": "everbatch", **BODIES[path], **LMDEPLOY, **own}
    status, answer, _ = served.request("POST", f"/v1/{path}", body)
    assert status == 200, answer
    assert triton.last().body["top_k"] == 40 and triton.last().body.get("max_tokens") == own["max_tokens"]


@pytest.mark.parametrize(
    ("path", "keys", "sent"),
    [
        (CHATS, {"add_generation_prompt": False}, {"add_generation_prompt": False}),
        (CHATS, CONTINUED, CONTINUED),
        (CHATS, CONTINUED | {"add_generation_prompt": False}, CONTINUED | {"add_generation_prompt": False}),
        (CHATS, {"min_new_tokens": 3}, {"min_tokens": 3}),
        ("completions", {"max_completion_tokens": 5}, {"max_tokens": 5}),
        (CHATS, {"chat_template_kwargs": {"a": [1]}}, {"chat_template_kwargs": {"a": [1]}}),
        (
            CHATS,
            {"reasoning_effort": "low", "verbosity": "high"},
            {"chat_template_kwargs": {"reasoning_effort": "low", "verbosity": "high"}},
        ),
        (
            CHATS,
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "own"}},
            {"chat_template_kwargs": {"reasoning_effort": "own"}},
        ),
        (
            "responses",
            {"reasoning": {"effort": "minimal", "summary": "auto"}, "text": {"verbosity": "low"}},
            {"chat_template_kwargs": {"reasoning_effort": "minimal", "verbosity": "low"}},
        ),
        ("responses", {"reasoning": {"summary": "detailed"}}, {}),
        *((path, {"skip_special_tokens": False}, {"skip_special_tokens": False}) for path in BODIES),
        ("completions", {"guided_regex": "a+"}, {"guide": {"type": "regex", "text": "a+"}}),
        (
            "completions",
            {"guided_json": {"type": "null"}},
            {"guide": {"type": "json_schema", "text": '{"type":"null"}'}},
        ),
        (CHATS, {"guided_json": "{}"}, {"guide": {"type": "json_schema", "text": "{}"}}),
        (CHATS, {"guided_choice": ["a+", "b"]}, {"guide": {"type": "regex", "text": r"a\+|b"}}),
        (CHATS, {"guided_grammar": "root ::= x"}, {"guide": {"type": "ebnf_grammar", "text": "root ::= x"}}),
    ],
)
def test_keys_that_change_the_answer_are_honoured(
    path: str, keys: dict[str, Any], sent: dict[str, Any], served: Served, triton: FakeTriton
) -> None:
    for added in ({}, keys):
        status, answer, _ = served.request("POST", f"/v1/{path}", {"model": "everbatch", **BODIES[path], **added})
        assert status == 200, answer
    plain, asked = triton.requests
    assert asked.body == plain.body | sent


@pytest.mark.parametrize("path", BODIES)
def test_the_answer_tells_the_service_tier_where_one_is_asked_for(path: str, served: Served) -> None:
    for tier in ("auto", "flex", "priority"):
        body = {"model": "everbatch", **BODIES[path], "service_tier": tier}
        assert served.request("POST", f"/v1/{path}", body)[1]["service_tier"] == "default"
    assert not served.request("POST", f"/v1/{path}", {"model": "everbatch", **BODIES[path]})[1].get("service_tier")


@pytest.mark.parametrize(
    ("path", "keys", "param", "words"),
    [
        (CHATS, {"no_stop_trim": True}, "no_stop_trim", "use include_stop_str_in_output"),
        ("completions", {"return_hidden_states": True}, "return_hidden_states", "true is not served here"),
        ("completions", {"reasoning_effort": "low"}, "reasoning_effort", "is told to a chat template"),
        ("responses", {"reasoning_effort": "low"}, "reasoning_effort", "use reasoning.effort"),
        (CHATS, {"reasoning": {"effort": "low"}}, "reasoning", "use reasoning_effort"),
        (CHATS, {"tools": [TOOL], "guided_regex": "a"}, "guided_regex", "guided_regex and tools both say"),
        ("completions", TWO_FORMS, "guided_regex", "structured_outputs and guided_regex both say"),
        ("responses", {"guided_json": {}}, "guided_json", "use text.format"),
        (CHATS, CONTINUED | {"add_generation_prompt": True}, "continue_final_message", "exclude each other"),
        (CHATS, {"kwargs": {"session_id": 1}}, "kwargs", "is taken when it is empty only"),
        ("completions", {"min_tokens": 3, "min_new_tokens": 4}, "min_tokens", "mean the same and differ"),
        (CHATS, {"skip_special_tokens": "no"}, "skip_special_tokens", "is 'no'; it should be"),
    ],
)
def test_what_is_not_built_is_refused_by_name(
    path: str, keys: dict[str, Any], param: str, words: str, served: Served
) -> None:
    status, answer, _ = served.request("POST", f"/v1/{path}", {"model": "everbatch", **BODIES[path], **keys})
    assert (status, answer["error"]["param"]) == (400, param) and words in answer["error"]["message"]


def test_a_form_by_its_older_name_is_blamed_by_it(served: Served) -> None:
    body = {"model": "everbatch", "prompt": "error [INVALID_ARGUMENT] guide: no regex", "guided_regex": "("}
    status, answer, _ = served.request("POST", "/v1/completions", body)
    assert (status, answer["error"]["param"]) == (400, "guided_regex")
    assert answer["error"]["message"] == "guided_regex: no regex"
