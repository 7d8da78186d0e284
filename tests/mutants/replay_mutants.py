"""Bugs planted in what outlives an engine: commands that are held, requests that go on, trials, the log of sessions."""

from __future__ import annotations

from backend.api.processes.back_off import BackOff
from backend.engine import resume, session_log
from backend.engine.intake import Intake
from backend.engine.loop import EngineLoop
from backend.engine.preparation import Preparation
from backend.engine.session_log import SessionLog
from backend.engine.sessions import SessionTable
from backend.engine.trials import Trials
from backend.executor import repeats
from backend.executor.kept_files import KeptFiles
from backend.executor.live import Live
from backend.executor.replay import Replay
from backend.replicas.front import ReplicaFront
from backend.scheduler.scheduler import Scheduler
from backend.serving.observe.metrics import MetricsPublisher
from tests.mutants.changes import change, change_everywhere

RULES = ["tests/crashes/test_rules.py"]
TRIALS = ["tests/crashes/test_trials.py"]
FORMER = ["tests/crashes/test_former.py"]
CONTRACT = ["tests/crashes/test_contract.py"]
LOG = ["tests/engine/test_session_log.py"]
ORDERS = ["tests/engine/test_session_log_orders.py"]

MUTANTS = {
    "cancels_are_lost_with_the_engine": (
        change(Replay, "_once_more", ("for cancel in live.cancels:", "for cancel in ():")),
        RULES,
    ),
    "a_cancel_in_the_window_is_lost": (
        change(Replay, "let_go", ("live.cancels[live.num_cancels_sent :]", "live.cancels[len(live.cancels) :]")),
        RULES,
    ),
    "a_deadline_begins_anew": (change(Replay, "_once_more", (" - (now_s - live.accepted_s)", "")), RULES),
    "sums_begin_anew": (
        change(Live, "note", ("output.cum_log_prob = result.cum_log_probs[0]", "pass")),
        [*RULES, *CONTRACT],
    ),
    "callers_see_the_new_id": (
        change(Replay, "take", ("if response.request_id != live.request_id:", "if False:")),
        RULES,
    ),
    "a_broken_connection_is_a_death": (
        change(Replay, "greet", ("hello.engine != self._engine", "True")),
        RULES,
    ),
    "everybody_is_blamed_for_a_trial": (
        change(Replay, "_blame", ("if self._trial is None:", "if self._trial != self._there(live.request_id):")),
        RULES,
    ),
    "nobody_is_ended_by_a_trial": (
        change(Replay, "_blame", ("elif self._trial == self._there(live.request_id):", "elif False:")),
        RULES,
    ),
    "one_death_makes_a_suspect": (
        change(Replay, "_resume", (">= MAX_CRASHES", ">= MAX_CRASHES - 1")),
        RULES,
    ),
    "the_trial_of_the_hello_is_not_noticed": (
        change(Replay, "greet", ("hello.client_index, hello.trial", "hello.client_index, None")),
        RULES,
    ),
    "adapters_of_another_namespace": (
        change(
            Replay,
            "_note_adapter",
            ("self._adapters[request.cache_salt, lora.task_id]", 'self._adapters["another", lora.task_id]'),
        ),
        RULES,
    ),
    "tensors_are_kept_without_bound": (
        change(Replay, "add", ("<= MAX_HELD_BYTES", "<= MAX_HELD_BYTES * 1000")),
        RULES,
    ),
    "tensors_count_for_ever": (
        change(Replay, "pop", ("self._num_held_bytes -= live.num_held_bytes or 0", "pass")),
        RULES,
    ),
    "rows_come_twice": (change_everywhere(repeats._rows_from, ("[first * num_bytes :]", "")), RULES),
    "log_probs_come_twice": (
        change_everywhere(repeats._tail, ("[result.log_probs[0][cut:]]", "result.log_probs")),
        RULES,
    ),
    "context_rows_come_twice": (
        change_everywhere(repeats._tail, ("context_logits=None", "context_logits=result.context_logits")),
        RULES,
    ),
    "beams_are_counted_one_short": (
        change_everywhere(repeats.without_repeats, ("live.num_repeated < 0", "live.num_repeated <= 0")),
        CONTRACT,
    ),
    "a_stop_that_was_done_is_an_error": (
        change_everywhere(repeats._done_before, ("if stopped or", "if False or")),
        RULES,
    ),
    "output_counts_as_unpublished": (
        change(resume, "_take_up", ("seq.num_published_tokens = len(seq.token_ids)", "pass")),
        CONTRACT,
    ),
    "the_sum_is_not_taken_up": (
        change(resume, "_take_up", ("seq.cum_log_prob = delivered.cum_log_prob", "pass")),
        CONTRACT,
    ),
    "log_probs_are_not_padded": (
        change(resume, "_take_up", ("seq.log_probs = [0.0] * len(delivered.token_ids)", "pass")),
        CONTRACT,
    ),
    "a_full_sequence_goes_on": (
        change_everywhere(resume.check_room, (">= max_output", "> max_output")),
        RULES,
    ),
    "a_full_queue_ends_what_was_accepted": (
        change(Intake, "accept", ("if resume is None or not resume.is_again:", "if True:")),
        RULES,
    ),
    "a_turn_is_appended_twice": (
        change(Intake, "_accept_turn", ("and resume.is_life_of(known.turn)", "and False")),
        RULES,
    ),
    "an_earlier_life_runs_on": (
        change(EngineLoop, "_supersede", ("self._core.cancel(seq.request_id)", "pass")),
        RULES,
    ),
    "a_cancel_undoes_a_turn_that_goes_on": (
        change(Preparation, "goes_on", ("bool(waiting.resume.delivered)", "False")),
        RULES,
    ),
    "the_former_engine_s_trial_is_not_noticed": (
        change(Replay, "greet", ("if former.engine:", "if False:")),
        FORMER,
    ),
    "the_trial_of_any_former_engine_counts": (
        change(Replay, "greet", (" if former.engine == self._engine else None", "")),
        FORMER,
    ),
    "a_torn_record_of_a_trial_counts": (
        change(KeptFiles, "former", ("or crc != _CRC.pack(zlib.crc32(body))", "")),
        FORMER,
    ),
    "others_run_beside_a_trial": (
        change(Scheduler, "_sets_others_aside", ("if self.only is None:", "if True:")),
        TRIALS,
    ),
    "others_are_admitted_beside_a_trial": (
        change(Scheduler, "_line", ("self.only in (None, seq.request_id)", "True")),
        TRIALS,
    ),
    "a_trial_ends_at_once": (change(Trials, "_is_over", (">= self._num_tokens", ">= 0")), TRIALS),
    "a_trial_outlives_its_request": (
        change(Trials, "_is_over", ("return request_id not in self._core.preparation", "return False")),
        TRIALS,
    ),
    "what_clients_have_had_counts_in_a_trial": (
        change(
            Trials,
            "advance",
            ("dict(enumerate(len(each.token_ids) for each in waiting.resume.delivered))", "{}"),
        ),
        TRIALS,
    ),
    "a_new_log_counts_before_it_is_there": (
        change(
            SessionLog,
            "_begin",
            ("_write(file, records, HEADER_BYTES)", "self._put_header(False); _write(file, records, HEADER_BYTES)"),
        ),
        ORDERS,
    ),
    "the_old_log_goes_before_the_new_one_counts": (
        change(
            SessionLog,
            "_begin",
            ("self._put_header(is_closed=False)", "os.ftruncate(self._files[before], 0); self._put_header(False)"),
        ),
        ORDERS,
    ),
    "closing_leaves_what_ended_last": (
        change(SessionLog, "close", ("self.flush(sessions)\n    self.flush(sessions)", "self.flush(sessions)")),
        ORDERS,
    ),
    "what_a_poison_request_did_is_not_forgiven": (
        change(BackOff, "forgive", ("self._ends.pop()", "pass")),
        ["tests/api/test_back_off.py"],
    ),
    "an_erased_session_comes_back": (
        change(SessionTable, "erase", ("self.log.forget(key)", "pass")),
        LOG,
    ),
    "turns_are_not_written": (change(SessionTable, "settle", ("self.log.note(seq)", "pass")), LOG),
    "records_are_not_checked": (
        change_everywhere(session_log._records, ("or _checksum(body) != checksum", "")),
        LOG,
    ),
    "half_a_record_is_damage": (
        change_everywhere(
            session_log._records, ("            return  # half", '            raise Damaged("is cut")  # half')
        ),
        LOG,
    ),
    "a_log_of_another_model_is_used": (
        change(SessionLog, "_read", ("fingerprint != self._fingerprint", "False")),
        LOG,
    ),
    "a_log_of_a_machine_that_ended_is_used": (
        change(SessionLog, "_read", ("not is_closed and", "False and")),
        LOG,
    ),
    "a_full_disk_leaves_an_old_log": (
        change(SessionLog, "_break", ("os.ftruncate(file, 0)", "pass")),
        LOG,
    ),
    "idle_time_begins_anew": (
        change(SessionLog, "_read", ("self._used_s = {key", "self._used_s = {} and {key")),
        LOG,
    ),
    "the_other_file_keeps_its_bytes": (
        change(SessionLog, "_begin", ("os.ftruncate(self._files[before], 0)", "pass")),
        LOG,
    ),
    "the_random_stream_begins_anew": (
        change(SessionLog, "_turn", ("(seq.seed, seq.num_sampled_before) if is_idle", "(seq.seed, 0) if is_idle")),
        LOG,
    ),
    "streams_wait_for_their_own_replica": (
        change(ReplicaFront, "_look", ("self._move_held()", "pass")),
        ["tests/replicas/test_front.py::test_streams_of_a_lost_replica_go_on_at_another_one"],
    ),
    "turns_move_without_their_session": (
        change(ReplicaFront, "_submit", ("not ready or must_wait", "not ready")),
        ["tests/replicas/test_front.py::test_a_turn_of_a_session_waits_for_its_own_replica"],
    ),
    "a_turn_that_is_sent_again_at_the_same_moment_is_refused": (
        change(Intake, "_accept_turn", (" and not resume.is_life_of(self.sessions_this_poll[key])", "")),
        RULES,
    ),
    "any_turn_at_the_same_moment_is_taken": (
        change(Intake, "_accept_turn", ("not resume.is_life_of(self.sessions_this_poll[key])", "False")),
        RULES,
    ),
    "pauses_are_published_again_and_again": (
        change(
            MetricsPublisher,
            "publish_pauses",
            ("self._pauses = self._pauses, counts", "self._pauses = self._pauses, self._pauses"),
        ),
        ["tests/serving/test_metrics.py"],
    ),
}
