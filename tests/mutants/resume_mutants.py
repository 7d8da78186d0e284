"""Bugs planted in what outlives a server: clients that come back with what they have had, requests that wait for an engine."""

from __future__ import annotations

# This one goes first: it brings the triton_python_backend_utils that backend.serving needs.
from tests.serving import conftest  # noqa: F401

# isort: split

from backend.api import limits
from backend.core.messages import Resume
from backend.engine.intake import Intake
from backend.executor.pause import Pauses
from backend.executor.replay import Replay
from backend.serving.intake import submit as serving_resuming
from backend.serving.wires import everbatch, trtllm_inputs
from backend.text.accumulator import OutputAccumulator
from client import resuming as client_resuming
from gateway import resuming, triton_client
from gateway.answers import Outlet
from tests.mutants.changes import Plant, change, change_everywhere

CLIENT = ["tests/client/test_resuming.py"]
ENDPOINT = ["tests/gateway/test_resuming.py"]
FRONTS = ["tests/serving/test_resuming.py"]
NEWCOMERS = ["tests/executor/test_newcomers.py"]
RULES = ["tests/crashes/test_rules.py"]

MUTANTS: dict[str, tuple[Plant, list[str]]] = {
    # What the server takes back.
    "outputs_of_any_length_are_taken": (
        change_everywhere(limits.check_outputs_so_far, ("if len(ids) > most:", "if False:")),
        [*RULES, *FRONTS],
    ),
    "outputs_may_be_as_many_as_they_like": (
        change_everywhere(limits.check_outputs_so_far, ("if len(outputs) != count:", "if False:")),
        [*RULES, *FRONTS],
    ),
    "outputs_hold_any_number": (
        change_everywhere(limits.check_outputs_so_far, ('check_ids("resume: output token", ids, vocab_size)', "pass")),
        [*RULES, *FRONTS],
    ),
    "another_seed_goes_on_with_an_answer": (
        change_everywhere(serving_resuming.check_resumed, ("not has_seed", "False")),
        FRONTS,
    ),
    "the_prompt_is_echoed_twice": (change(OutputAccumulator, "take_up", ('self.text = ""', "pass")), FRONTS),
    "half_a_character_is_lost": (
        change(OutputAccumulator, "take_up", ("self._stream.push(ids).finished_by", "None")),
        FRONTS,
    ),
    "an_end_is_told_twice": (
        change(OutputAccumulator, "take_up", ("self.has_ended = self.end_is_taken = True", "self.has_ended = True")),
        FRONTS,
    ),
    "tokens_that_came_are_not_counted": (
        change(OutputAccumulator, "take_up", ("self.num_tokens = len(ids)", "self.num_tokens = 0")),
        FRONTS,
    ),
    "texts_of_log_probabilities_begin_anew": (
        change_everywhere(everbatch.parse, ("of_tokens.push(token_id)", "pass")),
        FRONTS,
    ),
    "the_seed_is_not_told": (change_everywhere(everbatch.parse, ("else sampling.seed", "else None")), FRONTS),
    "sums_of_log_probabilities_begin_anew": (
        change_everywhere(trtllm_inputs.read_delivered, ("float(sum(each.tolist()))", "0.0")),
        FRONTS,
    ),
    "padding_counts": (
        change_everywhere(trtllm_inputs._count, ("int(kept[-1]) + 1 if kept.size else 0", "len(ids)")),
        FRONTS,
    ),
    "turns_with_one_id_are_one_turn": (
        change_everywhere(serving_resuming._turn, (", request.input_token_ids", "")),
        FRONTS,
    ),
    "a_new_turn_undoes_the_last": (
        change(Resume, "is_life_of", ("or not (self.is_again or self.delivered)", "")),
        FRONTS,
    ),
    "what_has_come_takes_no_place_in_the_queue": (change(Intake, "_check_queue", (" + num_delivered", "")), RULES),
    # The endpoint.
    "what_has_come_is_not_sent_back": (
        change(resuming.Progress, "note", ("self._token_ids[piece.index] += piece.token_ids", "pass")),
        ENDPOINT,
    ),
    "each_server_has_a_seed_of_its_own": (
        change(resuming.Progress, "rest", ('request["seed"] = self._seed', "pass")),
        ENDPOINT,
    ),
    "ends_are_awaited_twice": (
        change(triton_client.TritonLink, "stream", ("job.choices - job.resumed", "job.choices")),
        ENDPOINT,
    ),
    "a_poison_request_is_sent_for_ever": (
        change_everywhere(resuming.replies, ("losses >= MOST_LOSSES", "losses >= MOST_LOSSES + 1")),
        ENDPOINT,
    ),
    "the_wait_has_no_end": (
        change_everywhere(resuming._back, ("(now := time.monotonic()) < until", "(now := time.monotonic())")),
        ENDPOINT,
    ),
    "clients_hear_nothing_while_they_wait": (change(Outlet, "waiting", ("if self.started:", "if False:")), ENDPOINT),
    "the_prompts_log_probabilities_come_twice": (
        change(resuming.Progress, "rest", ('del request["prompt_logprobs"]', "pass")),
        ENDPOINT,
    ),
    # The Python client.
    "text_comes_twice": (
        change(client_resuming.Progress, "take", ("chunk.text[known:]", "chunk.text")),
        CLIENT,
    ),
    "beams_come_twice": (
        change(client_resuming.Progress, "take", ("self._num_here > self._num_chunks", "True")),
        CLIENT,
    ),
    "a_client_kills_for_ever": (
        change(client_resuming.Progress, "pause_s", ("self._losses >= MOST_LOSSES", "False")),
        CLIENT,
    ),
    "a_client_waits_for_ever": (
        change(client_resuming.Progress, "pause_s", (" or now_s - self._lost_at_s + PAUSE_S > resume_s", "")),
        CLIENT,
    ),
    # Requests that come while there is no engine.
    "newcomers_are_blamed": (
        change(Replay, "_blame", ("        if not live.num_lives:\n            continue\n", "")),
        NEWCOMERS,
    ),
    "newcomers_have_a_place_for_sure": (
        change(Replay, "_resume", ("is_again=live.num_lives > 1", "is_again=True")),
        NEWCOMERS,
    ),
    "newcomers_wait_in_any_number": (
        change(Pauses, "check_new", ("number >= caps.max_queue_size", "False")),
        NEWCOMERS,
    ),
    "newcomers_wait_for_ever": (change(Pauses, "look", ("self._refuse(overdue, NOT_BACK)", "pass")), NEWCOMERS),
    "newcomers_wait_though_they_should_not": (
        change(Pauses, "takes_new", (" and triton.hold_new_s > 0", "")),
        NEWCOMERS,
    ),
}
