"""Bugs planted in what outlives an engine: commands that are held, requests that go on, trials, the log of sessions."""

from __future__ import annotations

from backend.engine import session_log
from backend.engine.intake import Intake
from backend.engine.preparation import Preparation
from backend.engine.session_log import SessionLog
from backend.engine.trials import Trials
from backend.executor import repeats
from backend.executor.replay import Replay
from backend.scheduler.scheduler import Scheduler
from backend.serving.observe.metrics import MetricsPublisher
from tests.mutants.changes import change, change_everywhere

RULES = ["tests/crashes/test_rules.py"]
TRIALS = ["tests/crashes/test_trials.py"]
LOG = ["tests/engine/test_session_log.py"]
ORDERS = ["tests/engine/test_session_log_orders.py"]

MUTANTS = {
    "a_cancel_in_the_window_is_lost": (
        change(Replay, "let_go", ("live.cancels[live.num_cancels_sent :]", "live.cancels[len(live.cancels) :]")),
        RULES,
    ),
    "everybody_is_blamed_for_a_trial": (
        change(Replay, "_blame", ("if self._trial is None:", "if self._trial != self._there(live.request_id):")),
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
    "log_probs_come_twice": (
        change_everywhere(repeats._tail, ("[result.log_probs[0][cut:]]", "result.log_probs")),
        RULES,
    ),
    "context_rows_come_twice": (
        change_everywhere(repeats._tail, ("context_logits=None", "context_logits=result.context_logits")),
        RULES,
    ),
    "a_turn_is_appended_twice": (
        change(Intake, "_accept_turn", ("and resume.is_life_of(known.turn)", "and False")),
        RULES,
    ),
    "a_cancel_undoes_a_turn_that_goes_on": (
        change(Preparation, "goes_on", ("bool(waiting.resume.delivered)", "False")),
        RULES,
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
    "half_a_record_is_damage": (
        change_everywhere(
            session_log._records, ("            return  # half", '            raise Damaged("is cut")  # half')
        ),
        LOG,
    ),
    "idle_time_begins_anew": (
        change(SessionLog, "_read", ("self._used_s = {key", "self._used_s = {} and {key")),
        LOG,
    ),
    "the_random_stream_begins_anew": (
        change(SessionLog, "_turn", ("(seq.seed, seq.num_sampled_before) if is_idle", "(seq.seed, 0) if is_idle")),
        LOG,
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
