"""Planted bugs of several sequences for one prompt, from OpenAI's n to the engine's request and back."""

from __future__ import annotations

# This one goes first: it brings the triton_python_backend_utils that backend.serving needs.
from tests.serving import conftest  # noqa: F401

# isort: split

from backend.serving.wires import everbatch, vllm
from backend.serving.wires.named_sampling import NamedSampling
from gateway import triton_client
from tests.mutants.changes import Plant, change

FRONTS = ["tests/serving/test_choices.py"]
CHAT = ["tests/gateway/test_chat.py"]

MUTANTS: dict[str, tuple[Plant, list[str]]] = {
    "the_best_keep_their_numbers": (
        change(everbatch, "chosen", ("[delta._replace(sequence=place) for place, delta in enumerate(best)]", "best")),
        FRONTS,
    ),
    "vllm_s_sequences_answer_one_by_one": (
        change(vllm, "choices_output", ("if joint and", "if not joint and")),
        FRONTS,
    ),
    "beams_stop_early": (
        change(NamedSampling, "sampling_config", ("_EARLY_STOPPING[self.early_stopping]", "1")),
        FRONTS,
    ),
    "only_the_first_cancelled_sequence_counts": (
        change(
            vllm, "renderer", ("for one in deltas):\n            raise", "for one in deltas[:1]):\n            raise")
        ),
        FRONTS,
    ),
    "the_first_end_is_that_of_all_replies": (
        change(triton_client.TritonLink, "stream", ("while open_choices:", "while open_choices == job.choices:")),
        CHAT,
    ),
    "only_the_first_element_is_read": (change(triton_client, "_pieces", ("data = data[end:]", "break")), CHAT),
}
