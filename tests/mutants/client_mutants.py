"""Planted bugs of the client, of replicas and of LMDeploy's interfaces, each with the tests that must notice it."""

from __future__ import annotations

from backend.replicas import placement
from backend.replicas.front import ReplicaFront
from backend.replicas.placement import Placement
from backend.wire import address
from backend.wire.engine_server import EngineServer
from backend.wire.heartbeat import HeartbeatSender
from client import http_messages, messages
from client.grpc_transport import GrpcTransport
from client.history import History
from client.http_transport import HttpTransport
from compat.config_object import ConfigObject
from compat.llm import arguments
from compat.lmdeploy import sampling
from compat.lmdeploy.pipeline import _response
from gateway import interactive
from gateway.interactive import RunningTurns
from tests.mutants.changes import change, change_everywhere

CLI = "tests/client/test_cli.py::"
RAISED = "raise Unavailable(NO_END)"

PLACEMENT = ["tests/replicas/test_placement.py"]
FRONT = ["tests/replicas/test_front.py"]
ADDRESS = ["tests/wire/test_address.py"]

PIPELINE = ["tests/lmdeploy/test_pipeline.py"]
CONFIGS = ["tests/lmdeploy/test_configs.py"]
CLASSES = ["tests/llm/test_configs.py"]
ROUTE = ["tests/gateway/test_interactive.py"]

MUTANTS = {
    "every_request_samples_alike": (
        change(messages.GenerateRequest, "with_seed", ("secrets.randbelow(MAX_FRESH_SEED)", "0")),
        [CLI + "test_what_samples_has_another_seed_each_time_that_is_told_and_can_be_given_again"],
    ),
    "count_of_zero_is_no_count": (
        change(messages, "_last", ("is not None", "")),
        ["tests/client/test_messages.py::test_a_count_of_zero_is_told_and_the_last_one_holds"],
    ),
    "stream_cut_short_is_a_whole_answer": (
        change(GrpcTransport, "stream", (RAISED, "return")),
        ["tests/client/test_transports.py::test_a_stream_that_ends_without_a_final_response_is_an_error"],
    ),
    "each_event_renews_the_deadline": (
        change(HttpTransport, "_events", ("remaining = deadline - time.monotonic()", "remaining = 10.0")),
        ["tests/client/test_transports.py::test_the_deadline_is_that_of_the_whole_stream"],
    ),
    "turn_that_adds_to_its_session_is_sent_twice": (
        change(messages.GenerateRequest, "repeatable", (" or self.session.full_history", " or True")),
        ["tests/client/test_retry.py::test_a_turn_that_would_be_added_twice_is_not_sent_again"],
    ),
    "failed_turn_keeps_old_turns_out": (
        change(History, "_finish", ("self.messages, self.left_out = self._before", "self.messages.pop()")),
        ["tests/client/test_conversation.py::test_a_turn_that_fits_nowhere_is_refused_and_no_old_turn_is_lost"],
    ),
    "a_proxys_502_is_no_reason_to_ask_again": (
        lambda set_attribute: set_attribute(http_messages, "_CODES", {**http_messages._CODES, 502: "INTERNAL"}),
        ["tests/client/test_http.py"],
    ),
    "a_prompts_beginning_does_not_matter": (
        change(placement, "_pieces", ("(so_far, *tokens", "(0, *tokens")),
        PLACEMENT,
    ),
    "clients_are_taken_for_one": (
        change(placement, "_pieces", ("hash(request.namespace)", "0")),
        PLACEMENT,
    ),
    "prompts_are_never_forgotten": (change(Placement, "_remember", ("> self._max_pieces", "< 0")), PLACEMENT),
    "begun_requests_stay_in_the_load": (
        change(ReplicaFront, "_take_answer", ("waiting_tokens -= live.num_new_tokens", "waiting_tokens -= 0")),
        FRONT,
    ),
    "silence_ends_all_streams": (
        change(ReplicaFront, "_look", ("not any(each.is_connected for each in self._replicas)", "not self.is_serving")),
        FRONT,
    ),
    "silent_replicas_look_ready": (change(HeartbeatSender, "_run", ("if self._is_alive():", "if True:")), FRONT),
    "records_come_after_the_answers_that_end_them": (
        change(
            ReplicaFront,
            "_turn",
            ("    self._publish_records()\n", ""),
            ("    if self._answers and", "    self._publish_records()\n    if self._answers and"),
        ),
        FRONT,
    ),
    "any_server_is_the_engine": (
        change(
            address,
            "_agree",
            (
                "for step in steps if challenges_first else reversed(steps)",
                "for step in steps[:1] if challenges_first else steps[1:]",
            ),
        ),
        ADDRESS,
    ),
    "strangers_take_any_number_of_threads": (
        change(
            EngineServer,
            "_accept",
            ("not self._greetings.acquire(blocking=False)", "self._greetings.acquire(blocking=False) and False"),
        ),
        ADDRESS,
    ),
    "defaults_of_a_class_reach_the_engine": (
        change(ConfigObject, "given", ("dict(vars(self))", "self.to_dict()")),
        CLASSES,
    ),
    "a_mistyped_field_is_ignored": (
        change(ConfigObject, "__init__", ("if name not in self.fields:", "if not name:")),
        CLASSES,
    ),
    "a_build_config_wins_over_the_arguments": (
        change(
            arguments.LlmArguments,
            "__init__",
            ("**_of_build_config(flat), **given", "**given, **_of_build_config(flat)"),
        ),
        CLASSES,
    ),
    "all_samples_have_one_seed": (
        change_everywhere(sampling.sampling_params, ("secrets.randbits(63)", "1")),
        CONFIGS,
    ),
    "an_answer_has_no_index": (
        change_everywhere(_response, ("index=index,", "index=0,")),
        PIPELINE,
    ),
    "a_session_may_have_two_turns": (
        change(RunningTurns, "turn", ("if (namespace, session_id) in self._stops:", "if session_id < -1:")),
        ROUTE,
    ),
    "sessions_of_all_keys_are_one": (
        change_everywhere(interactive._session, ("gateway.store.get(context.namespace,", 'gateway.store.get("",')),
        ROUTE,
    ),
}
