"""Planted bugs of several sequences for one prompt, from OpenAI's n to the engine's request and back."""

from __future__ import annotations

# This one goes first: it brings the triton_python_backend_utils that backend.serving needs.
from tests.serving import conftest  # noqa: F401

# isort: split

from backend.serving.fronts import everbatch, vllm, vllm_sampling
from backend.serving.fronts.named_sampling import NamedSampling
from gateway import choices, chunks, translate, triton_client
from gateway.visit import Visit
from tests.mutants.changes import Plant, change

FRONTS = ["tests/serving/test_choices.py"]
CHAT = ["tests/gateway/test_chat.py"]
COMPLETIONS = ["tests/gateway/test_completions.py"]

MUTANTS: dict[str, tuple[Plant, list[str]]] = {
    "the_least_likely_are_the_best": (change(vllm, "chosen", ("-(delta.cum_log_prob", "(delta.cum_log_prob")), FRONTS),
    "the_best_keep_their_numbers": (
        change(everbatch, "chosen", ("[delta._replace(sequence=place) for place, delta in enumerate(best)]", "best")),
        FRONTS,
    ),
    "vllm_s_sequences_answer_one_by_one": (
        change(vllm, "choices_output", ("if joint and", "if not joint and")),
        FRONTS,
    ),
    "best_of_is_not_generated": (
        change(NamedSampling, "num_generated", ("self.n if self.best_of is None else self.best_of", "self.n")),
        FRONTS,
    ),
    "beams_stop_early": (
        change(NamedSampling, "sampling_config", ("_EARLY_STOPPING[self.early_stopping]", "1")),
        FRONTS,
    ),
    "one_beam_is_sampled": (
        change(NamedSampling, "sampling_config", ("0.0 if self.num_generated == 1 else None", "None")),
        FRONTS,
    ),
    "a_stream_of_the_best_is_taken": (
        change(vllm_sampling, "check_choices", ("if streaming and asked.is_ranked:", "if False:")),
        FRONTS,
    ),
    "only_the_first_cancelled_sequence_counts": (
        change(
            vllm, "renderer", ("for one in deltas):\n            raise", "for one in deltas[:1]):\n            raise")
        ),
        FRONTS,
    ),
    "discarded_tokens_are_told_of_each": (
        change(everbatch, "renderer", ("0 if delta.sequence else discarded", "discarded")),
        FRONTS,
    ),
    "the_first_end_is_that_of_all_replies": (
        change(triton_client.TritonLink, "stream", ("if not open_choices:", "if open_choices < job.choices:")),
        CHAT,
    ),
    "only_the_first_element_is_read": (change(triton_client, "_pieces", ("data = data[end:]", "break")), CHAT),
    "choices_of_all_prompts_have_the_first_one_s_numbers": (
        change(choices, "pieces", ("index * jobs[0].choices + piece.index", "piece.index")),
        COMPLETIONS,
    ),
    "what_the_first_choice_computed_counts_as_cached": (
        change(chunks, "total_usage", ("min(usage.cached_tokens", "max(usage.cached_tokens")),
        CHAT,
    ),
    "discarded_tokens_cost_nothing": (
        change(chunks, "total_usage", (" + usage.discarded_tokens", "")),
        COMPLETIONS,
    ),
    "a_prompt_is_counted_with_each_choice": (
        change(Visit, "count", (" and piece.index == 0", "")),
        ["tests/gateway/test_log.py"],
    ),
    "best_of_takes_no_places": (
        change(translate, "replies_generated", ("max(message.n or 1, best_of)", "(message.n or 1)")),
        ["tests/gateway/test_limits.py"],
    ),
    "best_of_is_lost_on_the_way": (
        change(translate, "completions", ("message.best_of > 1", "False")),
        COMPLETIONS,
    ),
}
