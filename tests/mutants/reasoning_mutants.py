"""Planted bugs of reasoning (its marks, its budget, the guide behind it) and of the formats of calls."""

from __future__ import annotations

# This one goes first: it brings the triton_python_backend_utils that backend.serving needs.
from tests.serving import conftest  # noqa: F401

# isort: split

from backend.core.thinking import ReasoningCounter, ThinkingCourse
from backend.text.detokenizer import IncrementalDetokenizer
from backend.worker.guided_rows import GuidedRows
from gateway.reasoning import ReasoningReader
from gateway.tool_formats.reader import CallReader
from tests.mutants.changes import Plant, change

ENGINE = ["tests/guided/test_thinking.py"]
FORMATS = ["tests/gateway/test_tool_formats.py"]
READERS = ["tests/gateway/test_answer_readers.py"]
FRONT = ["tests/serving/test_everbatch_model.py", "tests/serving/test_everbatch_reasoning.py"]

MUTANTS: dict[str, tuple[Plant, list[str]]] = {
    "an_end_mark_is_looked_for_from_its_beginning_only": (
        change(ThinkingCourse, "_after_thought", ("self._fallbacks[matched]", "0")),
        ENGINE,
    ),
    "a_budget_writes_the_end_mark_anew": (
        change(ThinkingCourse, "_thinking", ("Place(Phase.CLOSE, matched)", "Place(Phase.CLOSE, 0)")),
        ENGINE,
    ),
    "a_row_with_a_guide_does_not_think": (
        change(GuidedRows, "_matcher", ("if thinking is not None:", "if thinking is not None and guide is None:")),
        ENGINE,
    ),
    "the_marks_are_not_counted": (
        change(ReasoningCounter, "push", ("self.count = self._num_before if", "self.count = 0 if")),
        ENGINE,
    ),
    "named_tokens_are_hidden": (
        change(IncrementalDetokenizer, "_visible", (" and token_id not in self._shown_ids", "")),
        FRONT,
    ),
    "half_an_end_mark_is_told": (
        change(ReasoningReader, "_read_reasoning", ("keep = _begun(self._held, self._marks.end)", "keep = 0")),
        READERS,
    ),
    "what_is_no_call_is_lost": (
        change(CallReader, "_parts", ("yield source.take(size)", "source.take(size)")),
        FORMATS,
    ),
}
