"""Planted bugs of the executor and of the engine's outer parts, each with the test files of which one must notice it."""

from __future__ import annotations

from backend.api.back_off import BackOff
from backend.api.silence import Silence
from backend.engine.core import EngineCore
from backend.engine.deadlines import Deadlines
from backend.engine.loop import EngineLoop
from backend.engine.recorder import Recorder
from backend.engine.statistics import Statistics
from backend.executor import engine_process
from backend.executor.engine_supervisor import EngineProcess
from backend.executor.executor import Executor
from backend.executor.mailbox import Mailboxes
from backend.executor.record_shelf import RecordShelf
from backend.executor.watch import Watch
from backend.kvcache.events import KvEventLog
from backend.kvcache.prefix_trie import PrefixTrie
from backend.wire import framing
from backend.wire.client import SocketTransport
from backend.wire.engine_server import Connection, EngineServer
from backend.wire.heart import Heart
from backend.wire.outgoing import Outgoing
from tests.mutants.changes import Plant, change

CORE = ["tests/engine/test_core_guards.py"]
LOOP = ["tests/engine/test_loop.py", "tests/engine/test_core_guards.py"]
SERVER = ["tests/wire/test_engine_server.py"]
OUTGOING = ["tests/wire/test_outgoing.py", "tests/wire/test_engine_server.py"]
PROCESS = ["tests/executor/test_engine_process.py"]
EXECUTOR = ["tests/executor/test_answers.py", "tests/executor/test_executor.py", "tests/executor/test_socket.py"]
RECORDS = ["tests/engine/test_recorder.py", "tests/executor/test_records.py", "tests/kvcache/test_events.py"]
SUPERVISOR = ["tests/executor/test_supervisor.py", "tests/api/test_back_off.py"]
WATCH = ["tests/executor/test_watch.py"]

# Those that a review of the landed system planted, and that survived it.
REVIEWED: dict[str, tuple[Plant, list[str]]] = {
    "deadline_of_an_earlier_use_of_the_id": (
        change(Deadlines, "pop_due", (" and seq.deadline_ns == deadline_ns", "")),
        CORE,
    ),
    "prompt_tokens_with_history": (change(EngineCore, "_accept", (" - seq.num_history_tokens", "")), CORE),
    "step_time_with_the_step_before": (
        change(Statistics, "record", ("max(flight.started_ns, before_ns)", "flight.started_ns")),
        CORE,
    ),
    "client_gone_only_after_a_clean_end": (
        change(
            Connection,
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
            ("self._is_over):\n", "self._is_over):\n        self._core.begin_poll()\n"),
        ),
        LOOP,
    ),
    "a_timeout_for_each_of_several_ids": (
        change(Mailboxes, "take_each", ("max(0.0, end - time.monotonic())", "timeout_s")),
        EXECUTOR,
    ),
    "answer_and_exception_both": (
        change(Executor, "_send_or_forget", ("if not answered:", "if True:")),
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
        change(BackOff, "delay_after_end", ("== self._ends.maxlen", "== -1")),
        SUPERVISOR,
    ),
    "error_of_a_later_start_ends_supervision": (
        change(EngineProcess, "_listen", ("if not self._first_known.is_set():", "if True:")),
        SUPERVISOR,
    ),
}

OWN: dict[str, tuple[Plant, list[str]]] = {
    "a_slow_engine_is_dead": (
        change(Executor, "_on_message", ("self._watch.pid = self._transport.engine_pid", "pass")),
        ["tests/executor/test_watch.py"],
    ),
    "the_reason_of_an_engine_that_is_gone_is_its_silence": (
        change(Executor, "why_not_ready", ("self._connected and ", "")),
        ["tests/executor/test_watch.py"],
    ),
    "a_moments_work_makes_a_stuck_engine_well": (
        change(Silence, "tick", ("self._idle = self.is_too_long", "pass")),
        ["tests/executor/test_watch.py"],
    ),
    "rest_of_a_frame_sent_from_its_beginning": (
        change(Outgoing, "send", ("memoryview(frame)[sent:]", "memoryview(frame)")),
        OUTGOING,
    ),
    "backlog_not_bounded_in_bytes": (
        change(Outgoing, "send", (" or self._num_bytes >= MAX_BACKLOG_BYTES", "")),
        OUTGOING,
    ),
    "bytes_that_were_sent_still_count": (
        change(Outgoing, "_write", ("self._num_bytes -= len(self._backlog.popleft())", "self._backlog.popleft()")),
        OUTGOING,
    ),
    "commands_under_the_ids_of_others": (
        change(Connection, "_accept", ("!= self.index", "== 0")),
        SERVER,
    ),
    "any_user_may_connect": (
        change(EngineServer, "_accept", ("not in (os.getuid(), 0)", "is None")),
        SERVER,
    ),
    "stop_does_not_wait_for_a_drain": (
        change(
            EngineLoop, "_is_over", (" and not (self._drain and (self._core.has_work or self._core.preparation))", "")
        ),
        LOOP,
    ),
    "live_requests_unanswered_at_the_end": (
        change(EngineLoop, "run", ("self._core.fail_all(", "str(")),
        LOOP,
    ),
    "statistics_in_every_turn": (
        change(EngineLoop, "_report", ("now + self._stats_period_s", "now")),
        LOOP,
    ),
    "a_failed_start_is_not_told": (
        change(engine_process, "main", ('_tell({"error": error.message})', "pass")),
        PROCESS,
    ),
    "a_frame_takes_from_the_next_one": (
        change(framing, "_receive_exactly", ("min(1 << 20, length - len(chunks))", "1 << 20")),
        SERVER,
    ),
    "cancels_of_what_is_over_are_sent": (
        change(Executor, "cancel_request", ("if known:", "if True:")),
        EXECUTOR,
    ),
    "an_end_after_the_end": (
        change(Executor, "_tell", ("self._live.pop(response.request_id, None) if is_final else self", "self")),
        EXECUTOR,
    ),
    "mailboxes_stay_open": (
        change(Mailboxes, "_empty", ("        del self._boxes[request_id]", "        pass")),
        EXECUTOR,
    ),
    "a_closed_client_connects_again": (
        change(SocketTransport, "close", ("        self._closed.set()\n", "")),
        ["tests/executor/test_socket.py::test_a_client_that_was_shut_down_stays_away"],  # all others take long then
    ),
    "time_in_which_it_hung_counts_as_quiet": (
        change(EngineProcess, "_count_death", (" - self._stuck_s", "")),
        SUPERVISOR,
    ),
    "a_new_process_inherits_silence": (
        change(Watch, "_judge", ("        self._silence.end()\n        self._turn_age_s = 0.0\n", "")),
        WATCH,
    ),
    "a_busy_loop_looks_hung": (
        change(Heart, "beat", (" and turn == self._turn", "")),
        SERVER,
    ),
    "debug_tensors_are_told_again": (
        change(Recorder, "take", ("    self._debug_tensors.clear()\n", "")),
        ["tests/model/test_debug_tensors.py"],
    ),
    "a_slow_client_is_sent_debug_tensors": (
        change(Connection, "send", ("waiting > MAX_FRAME_BYTES and", "False and")),
        SERVER,
    ),
    "records_are_told_again": (
        change(Recorder, "take", ("    self._iterations.clear()\n", "")),
        RECORDS,
    ),
    "who_returns_from_a_pause_counts_as_new": (
        change(Recorder, "record", (" if seq.first_scheduled_ns == flight.started_ns", "")),
        RECORDS,
    ),
    "a_waiter_for_events_sleeps_on": (
        change(RecordShelf, "put", ("        self._changed.notify_all()\n", "")),
        RECORDS,
    ),
    "blocks_below_a_removed_one_are_not_told": (
        change(PrefixTrie, "forget", ("removed.append(cut.hash)", "removed = [node.hash]")),
        RECORDS,
    ),
    "events_start_at_one": (
        change(KvEventLog, "__init__", ("self._next_id = 0", "self._next_id = 1")),
        RECORDS,
    ),
}

GONE: dict[str, tuple[Plant, list[str]]] = {  # what must be gone afterwards, and values that were all alike
    "connections_that_ended_are_remembered": (
        change(EngineServer, "_forget", ("self._connections.pop(index, None)", "pass")),
        SERVER,
    ),
    "the_writer_of_a_client_that_left_waits_for_ever": (
        change(Connection, "_read", ("self._outgoing.finish()", "pass")),
        SERVER,
    ),
    "the_writer_of_a_lost_connection_waits_for_ever": (
        change(SocketTransport, "_disconnect", ("outgoing.finish()", "pass")),
        SERVER,
    ),
    "a_connection_leaves_its_socket_open": (change(Outgoing, "_write", ("self._sock.close()", "pass")), SERVER),
    "records_of_requests_have_the_limit_of_those_of_steps": (
        change(RecordShelf, "limit", ("config.max_request_iterations", "config.max_iterations")),
        ["tests/executor/test_records.py"],
    ),
    "records_of_events_have_the_limit_of_those_of_tensors": (
        change(RecordShelf, "limit", ("config.max_kv_events", "config.max_debug_iterations")),
        ["tests/executor/test_records.py"],
    ),
}

MUTANTS = REVIEWED | OWN | GONE
