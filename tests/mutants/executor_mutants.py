"""Planted bugs of the executor and of the engine's outer parts, each with the test files of which one must notice it."""

from __future__ import annotations

from backend.api.processes.back_off import BackOff
from backend.engine.loop import EngineLoop
from backend.engine.recorder import Recorder
from backend.executor.executor import Executor
from backend.executor.mailbox import Mailboxes
from backend.executor.spare import Spare
from backend.executor.statistics_history import StatisticsHistory
from backend.executor.watch import Watch
from backend.kvcache.prefix_trie import PrefixTrie
from backend.wire.address import FileAddress
from backend.wire.client import SocketTransport
from backend.wire.engine_server import ClientConnection
from backend.wire.outgoing import Outgoing
from tests.mutants.changes import Plant, change

LOOP = ["tests/engine/test_loop.py", "tests/engine/test_core_guards.py"]
SERVER = ["tests/wire/test_engine_server.py"]
OUTGOING = ["tests/wire/test_outgoing.py", "tests/wire/test_engine_server.py"]
EXECUTOR = ["tests/executor/test_answers.py", "tests/executor/test_executor.py", "tests/executor/test_socket.py"]
RECORDS = ["tests/engine/test_recorder.py", "tests/executor/test_records.py", "tests/kvcache/test_events.py"]
SUPERVISOR = ["tests/executor/test_supervisor.py", "tests/api/test_back_off.py"]
WATCH = ["tests/executor/test_watch.py"]

# Those that a review of the landed system planted, and that survived it.
REVIEWED: dict[str, tuple[Plant, list[str]]] = {
    "client_gone_only_after_a_clean_end": (
        change(
            ClientConnection,
            "_read",
            ("            pass\n", "            pass\n        self._post(ClientGone(self.index))\n"),
            ("        self._on_closed(self.index)\n        self._post(ClientGone(self.index))\n", ""),
        ),
        SERVER,
    ),
    "begin_poll_only_when_idle": (
        change(
            EngineLoop,
            "_poll",
            ("    self._core.begin_poll()\n", ""),
            (".waits_for_loads):\n", ".waits_for_loads):\n        self._core.begin_poll()\n"),
        ),
        LOOP,
    ),
    "a_timeout_for_each_of_several_ids": (
        change(Mailboxes, "take_each", ("max(0.0, end - time.monotonic())", "timeout_s")),
        EXECUTOR,
    ),
    "callback_under_the_lock": (
        change(
            Executor,
            "_tell",
            ("        on_response(response)\n", "        with self._lock:\n            on_response(response)\n"),
        ),
        EXECUTOR,
    ),
    "mailboxes_closed_before_the_loss_is_told": (
        change(
            Executor,
            "shutdown",
            ("    self._on_lost()\n    self._mailboxes.close()", "    self._mailboxes.close()\n    self._on_lost()"),
        ),
        EXECUTOR,
    ),
    "never_given_up": (
        change(BackOff, "delay_after_end", ("== self._max_restarts", "== -1")),
        SUPERVISOR,
    ),
}

OWN: dict[str, tuple[Plant, list[str]]] = {
    "bytes_that_were_sent_still_count": (
        change(Outgoing, "_write", ("self._num_bytes -= len(self._backlog.popleft())", "self._backlog.popleft()")),
        OUTGOING,
    ),
    "commands_under_the_ids_of_others": (
        change(ClientConnection, "_accept", ("!= self.index", "== 0")),
        SERVER,
    ),
    "any_user_may_connect": (
        change(FileAddress, "admits", ("in (os.getuid(), 0)", "is not None")),
        [*SERVER, "tests/wire/test_address.py"],
    ),
    "live_requests_unanswered_at_the_end": (
        change(EngineLoop, "run", ("self._core.fail_all(", "str(")),
        LOOP,
    ),
    "a_closed_client_connects_again": (
        change(SocketTransport, "close", ("        self._closed.set()\n", "")),
        ["tests/executor/test_socket.py::test_a_client_that_was_shut_down_stays_away"],  # all others take long then
    ),
    "a_new_process_inherits_silence": (
        change(Watch, "_judge", ("        self._silence.end()\n        self._turn_age_s = 0.0\n", "")),
        WATCH,
    ),
    "debug_tensors_are_told_again": (
        change(Recorder, "take", ("    self._debug_tensors.clear()\n", "")),
        ["tests/model/test_debug_tensors.py"],
    ),
    "records_are_told_again": (
        change(Recorder, "take", ("    self._iterations.clear()\n", "")),
        RECORDS,
    ),
    "a_waiter_for_events_sleeps_on": (
        change(StatisticsHistory, "put", ("        self._changed.notify_all()\n", "")),
        RECORDS,
    ),
    "blocks_below_a_removed_one_are_not_told": (
        change(PrefixTrie, "forget", ("removed.append(cut.hash)", "removed = [node.hash]")),
        RECORDS,
    ),
}

GONE: dict[str, tuple[Plant, list[str]]] = {  # what must be gone afterwards, and values that were all alike
    "records_of_requests_have_the_limit_of_those_of_steps": (
        change(StatisticsHistory, "limit", ("config.max_request_iterations", "config.max_iterations")),
        ["tests/executor/test_records.py"],
    ),
    "records_of_events_have_the_limit_of_those_of_tensors": (
        change(StatisticsHistory, "limit", ("config.max_kv_events", "config.max_debug_iterations")),
        ["tests/executor/test_records.py"],
    ),
}

SPARES = ["tests/executor/test_spare.py"]
SPARE: dict[str, tuple[Plant, list[str]]] = {
    "a_spare_is_prepared_once": (
        change(Spare, "take", ("process, self._process = self._process, None", "process = self._process")),
        SPARES,
    ),
}

MUTANTS = REVIEWED | OWN | GONE | SPARE
