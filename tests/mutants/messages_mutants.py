"""Planted bugs of Anthropic's Messages API, and of the ids of tokens that answers tell."""

from __future__ import annotations

# This one goes first: it brings the triton_python_backend_utils that backend.serving needs.
from tests.serving import conftest  # noqa: F401

# isort: split

from backend.serving.wires import everbatch
from gateway import anthropic_turns, middleware
from gateway.answers import Running
from gateway.anthropic_answers import MessageWriter
from gateway.chunks import Chunks, _Ids
from tests.mutants.changes import Plant, change

ANSWERS = ["tests/gateway/test_anthropic.py"]
ERRORS = ["tests/gateway/test_anthropic_errors.py"]
EVERBATCH = ["tests/serving/test_everbatch_model.py"]
IDS = ["tests/gateway/test_token_ids.py"]
SESSION = ["tests/gateway/test_agent_session.py"]

MUTANTS: dict[str, tuple[Plant, list[str]]] = {
    "every_prompt_was_written_to_the_cache": (
        change(MessageWriter, "__init__", ("wants_caching(message)", "True")),
        ANSWERS,
    ),
    "white_space_at_the_end_is_lost": (
        change(MessageWriter, "take", ("and self._blank and", "and False and")),
        ANSWERS,
    ),
    "what_differs_from_request_to_request_is_shown_first": (
        change(anthropic_turns, "_system", ("one.text.startswith(ACCOUNTS)", "False")),
        SESSION,
    ),
    "only_one_header_has_keys": (
        change(middleware, "_client", ('headers.get("x-api-key", "").strip()', '""')),
        ERRORS,
    ),
    "a_client_s_share_is_the_server_s": (
        change(Running, "enter", ("too_many_of_one(", "overloaded(")),
        ERRORS,
    ),
    "the_prompt_is_told_with_each_event": (change(_Ids, "fields", ("prompt, self._prompt = b", "prompt, _ = b")), IDS),
    "the_ids_of_one_choice_are_those_of_all": (change(Chunks, "of", ("self._ids[index]", "self._ids[0]")), IDS),
    "only_the_first_sequence_is_told_of_the_prompt": (
        change(everbatch, "renderer", ("untold.remove(delta.sequence)", "untold.clear()")),
        EVERBATCH,
    ),
}
