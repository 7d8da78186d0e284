"""Bugs planted in what keeps clients apart and what outlives a server.

Turns of text threads, limits of rendering, streams that are read on, clients that come back, requests that wait for an engine.
"""

from __future__ import annotations

from backend.api import limits
from backend.core import limited_server
from backend.core.messages import Resume
from backend.serving.intake import text_turns
from backend.serving.intake.rendering import RenderProcess
from backend.serving.wires import everbatch, trtllm_inputs
from backend.text.accumulator import OutputAccumulator
from gateway import resuming
from gateway.triton_client import TritonLink
from tests.mutants.changes import change, change_everywhere
from tests.serving import conftest  # noqa: F401

ENDPOINT = ["tests/gateway/test_resuming.py"]
FRONTS = ["tests/serving/test_resuming.py"]
RULES = ["tests/crashes/test_rules.py"]

POOL, TURNS = ["tests/serving/test_text_pool.py"], ["tests/serving/test_text_turns.py"]
LEAST, LIMITS = ["tests/text/test_least_tokens.py"], ["tests/serving/test_limits.py"]
RENDERING, SUSPECTS = ["tests/serving/test_rendering.py"], ["tests/serving/test_suspects.py"]
CHILDREN = ["tests/guided/test_compile_limits.py"]
LEAVING, FOREIGN = ["tests/gateway/test_leaving.py"], ["tests/deploy/test_foreign.py"]
CONTROL, FRONT = ["tests/deploy/test_control_socket.py"], ["tests/replicas/test_front.py"]

MUTANTS = {
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
    "the_seed_is_not_told": (change_everywhere(everbatch.parse, ("else sampling.seed", "else None")), FRONTS),
    "sums_of_log_probabilities_begin_anew": (
        change_everywhere(trtllm_inputs.read_delivered, ("float(sum(each.tolist()))", "0.0")),
        FRONTS,
    ),
    "padding_counts": (
        change_everywhere(trtllm_inputs._count, ("int(kept[-1]) + 1 if kept.size else 0", "len(ids)")),
        FRONTS,
    ),
    "a_new_turn_undoes_the_last": (
        change(Resume, "is_life_of", ("or not (self.is_again or self.delivered)", "")),
        FRONTS,
    ),
    "a_poison_request_is_sent_for_ever": (
        change_everywhere(resuming.replies, ("losses >= MOST_LOSSES", "losses >= MOST_LOSSES + 1")),
        ENDPOINT,
    ),
    "the_wait_has_no_end": (
        change_everywhere(resuming._back, ("(now := time.monotonic()) < until", "(now := time.monotonic())")),
        ENDPOINT,
    ),
    "a_namespace_may_have_all_threads": (
        change(text_turns._Lane, "__init__", ("max(1, num_threads // 2)", "num_threads")),
        TURNS,
    ),
    "a_child_has_the_memory_of_the_machine": (
        change(limited_server, "_limit_memory", ("_lower(resource.RLIMIT_AS, ", "_lower(resource.RLIMIT_CORE, ")),
        CHILDREN,
    ),
    "a_chat_is_waited_for_without_end": (
        change(RenderProcess, "_outcome", ("task, self._patience_s)", "task)")),
        RENDERING,
    ),
    "a_stream_has_a_deadline": (
        change(
            TritonLink,
            "stream",
            ("(_once(self._message(job))))", "(_once(self._message(job)), timeout=self._timeout_s))"),
        ),
        LEAVING,
    ),
}
