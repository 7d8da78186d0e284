"""Bugs planted in replicas: where requests go, what is counted, who may connect."""

from __future__ import annotations

from backend.replicas import placement, totals
from backend.replicas.front import ReplicaFront
from backend.replicas.placement import Placement
from backend.wire import address
from backend.wire.engine_server import EngineServer
from backend.wire.heartbeat import HeartbeatSender
from tests.mutants.changes import change

PLACEMENT = ["tests/replicas/test_placement.py"]
FRONT = ["tests/replicas/test_front.py"]
ADDRESS = ["tests/wire/test_address.py"]

MUTANTS = {
    "only_the_last_loss_is_remembered": (
        change(ReplicaFront, "_take_answer", ("(*live.lost_by, live.replica)", "(live.replica,)")),
        ["tests/replicas/test_front_rules.py"],
    ),
    "a_replicas_load_does_not_count": (
        change(Placement, "place", ("new[each] + loads[each].tokens", "new[each]")),
        PLACEMENT,
    ),
    "only_the_load_counts": (
        change(Placement, "place", ("new[each] + loads[each].tokens", "loads[each].tokens")),
        PLACEMENT,
    ),
    "a_session_goes_where_there_is_room": (
        change(Placement, "_of_session", ("at if at in ready else otherwise", "otherwise")),
        PLACEMENT,
    ),
    "a_session_waits_for_a_lost_replica": (
        change(Placement, "_of_session", ("at if at in ready else otherwise", "at")),
        PLACEMENT,
    ),
    "a_prompts_beginning_does_not_matter": (
        change(placement, "_pieces", ("(so_far, *tokens", "(0, *tokens")),
        PLACEMENT,
    ),
    "clients_are_taken_for_one": (
        change(placement, "_pieces", ("hash(request.namespace)", "0")),
        PLACEMENT,
    ),
    "a_restarted_replica_is_thought_to_remember": (
        change(Placement, "forget", ("mask & others", "mask")),
        PLACEMENT,
    ),
    "prompts_are_never_forgotten": (change(Placement, "_remember", ("> self._max_pieces", "< 0")), PLACEMENT),
    "uptimes_are_added": (
        change(totals, "_combined", ("min(values) if name in _LEAST else ", "")),
        ["tests/replicas/test_totals.py"],
    ),
    "begun_streams_are_sent_again": (
        change(ReplicaFront, "_take_answer", ("request is not None and is_lost", "is_lost")),
        FRONT,
    ),
    "lost_requests_are_not_sent_again": (
        change(ReplicaFront, "_take_answer", ("request is not None and is_lost", "False and is_lost")),
        FRONT,
    ),
    "ended_requests_stay_in_the_load": (
        change(ReplicaFront, "_take_answer", (".num_live -= 1", ".num_live -= 0")),
        FRONT,
    ),
    "begun_requests_stay_in_the_load": (
        change(ReplicaFront, "_take_answer", ("waiting_tokens -= live.num_new_tokens", "waiting_tokens -= 0")),
        FRONT,
    ),
    "cancelled_requests_are_sent_again": (
        change(ReplicaFront, "_take_answer", (" and not live.is_cancelled", "")),
        FRONT,
    ),
    "silence_ends_all_streams": (
        change(ReplicaFront, "_look", ("not any(each.is_connected for each in self._replicas)", "not self.is_serving")),
        FRONT,
    ),
    "silent_replicas_look_ready": (change(HeartbeatSender, "_run", ("if self._is_alive():", "if True:")), FRONT),
    "the_door_stays_open_without_replicas": (
        change(ReplicaFront, "_look", ("self._door is not None and not any", "False and not any")),
        FRONT,
    ),
    "a_client_that_leaves_is_served_on": (
        change(ReplicaFront, "_apply", ("each >> CLIENT_SHIFT == client_index", "False")),
        FRONT,
    ),
    "records_come_after_the_answers_that_end_them": (
        change(
            ReplicaFront,
            "_turn",
            ("    self._publish_records()\n", ""),
            ("    if self._answers and", "    self._publish_records()\n    if self._answers and"),
        ),
        FRONT,
    ),
    "strangers_are_clients": (change(address.NetworkAddress, "admits", ("if _agree(", "if True or _agree(")), ADDRESS),
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
