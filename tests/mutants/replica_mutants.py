"""Bugs planted in replicas: where requests go, what is counted, who may connect."""

from __future__ import annotations

from backend.replicas import placement
from backend.replicas.front import Front
from backend.replicas.placement import Placement
from backend.wire import address
from backend.wire.engine_server import EngineServer
from backend.wire.heartbeat import HeartbeatSender
from tests.mutants.changes import change

PLACEMENT = ["tests/replicas/test_placement.py"]
FRONT = ["tests/replicas/test_front.py"]
ADDRESS = ["tests/wire/test_address.py"]

MUTANTS = {
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
        change(Front, "_take_answer", ("waiting_tokens -= live.num_new_tokens", "waiting_tokens -= 0")),
        FRONT,
    ),
    "silence_ends_all_streams": (
        change(Front, "_look", ("not any(each.is_connected for each in self._replicas)", "not self.is_serving")),
        FRONT,
    ),
    "silent_replicas_look_ready": (change(HeartbeatSender, "_run", ("if self._is_alive():", "if True:")), FRONT),
    "records_come_after_the_answers_that_end_them": (
        change(
            Front,
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
    "strangers_have_all_the_time": (
        change(address, "_agree", ("    limit.start()\n", "")),
        ADDRESS,
    ),
}
