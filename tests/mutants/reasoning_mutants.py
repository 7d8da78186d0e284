"""Planted bugs of reasoning (its marks, its budget, the guide behind it) and of the formats of calls."""

from __future__ import annotations

# This one goes first: it brings the triton_python_backend_utils that backend.serving needs.
from tests.serving import conftest  # noqa: F401

# isort: split

from backend.core.thinking import ReasoningCounter, ThinkingCourse
from backend.guided.llguidance_backend import _TagGrammar
from backend.guided.thinking import ThinkingMatcher
from backend.serving.wires.visible import Reasoning, ReasoningMarks
from backend.text.detokenizer import IncrementalDetokenizer
from backend.worker.guided_rows import GuidedRows
from gateway import items
from gateway.dialect import Dialect
from gateway.reasoning import ReasoningReader
from gateway.response_output import Output
from gateway.tool_formats import whole
from gateway.tool_formats.harmony import HarmonyReader
from gateway.tool_formats.reader import CallReader
from gateway.tool_formats.source import Source
from gateway.tool_formats.tagged import _Tagged
from tests.mutants.changes import Plant, change, change_everywhere

ENGINE = ["tests/guided/test_thinking.py"]
FORMATS = ["tests/gateway/test_tool_formats.py"]
READERS = ["tests/gateway/test_answer_readers.py"]
FRONT = ["tests/serving/test_everbatch_model.py", "tests/serving/test_everbatch_reasoning.py"]
GATEWAY = ["tests/gateway/test_reasoning.py"]
GUIDES = ["tests/guided/test_tool_guides.py"]

MUTANTS: dict[str, tuple[Plant, list[str]]] = {
    # The engine.
    "a_budget_is_one_token_longer": (
        change(ThinkingCourse, "_thinking", ("thought >= limit", "thought > limit")),
        ENGINE,
    ),
    "an_end_mark_is_looked_for_from_its_beginning_only": (
        change(ThinkingCourse, "_after_thought", ("self._fallbacks[matched]", "0")),
        ENGINE,
    ),
    "a_budget_writes_the_end_mark_anew": (
        change(ThinkingCourse, "_thinking", ("ReasoningPlace(Phase.CLOSE, matched)", "ReasoningPlace(Phase.CLOSE, 0)")),
        ENGINE,
    ),
    "nothing_follows_the_reasoning": (
        change(ThinkingCourse, "_ended", ("ReasoningPlace(Phase.FOLLOW) if has_follow else _ANSWER", "_ANSWER")),
        ENGINE,
    ),
    "a_guided_output_may_end_in_its_reasoning": (
        change(ThinkingMatcher, "is_complete", ("self._place.phase in (Phase.START, Phase.ANSWER) and ", "")),
        ENGINE,
    ),
    "the_guide_hears_the_reasoning": (
        change(ThinkingMatcher, "accept", ("self._is_of_answer(place) and ", "")),
        ENGINE,
    ),
    "rolling_back_forgets_the_guide": (
        change(ThinkingMatcher, "rollback", ("num_of_answer += self._is_of_answer(after)", "pass")),
        ENGINE,
    ),
    "reasoning_may_not_begin": (
        change(ThinkingMatcher, "fill", ("self._place.phase is Phase.START else ()", "False else ()")),
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
    # The front.
    "a_guide_needs_no_reasoning": (
        change(Reasoning, "for_engine", ("is_guided or ", "")),
        FRONT,
    ),
    "a_prompt_s_mark_is_awaited_once_more": (
        change(ReasoningMarks, "found", ("() if is_begun else start", "start")),
        FRONT,
    ),
    "named_tokens_are_hidden": (
        change(IncrementalDetokenizer, "_visible", (" and token_id not in self._shown_ids", "")),
        FRONT,
    ),
    # The gateway.
    "white_space_of_reasoning_stays": (
        change(ReasoningReader, "_read_reasoning", ("self._held = self._held.lstrip()", "pass")),
        READERS,
    ),
    "half_an_end_mark_is_told": (
        change(ReasoningReader, "_read_reasoning", ("keep = _begun(self._held, self._marks.end)", "keep = 0")),
        READERS,
    ),
    "an_end_tag_ends_any_value": (change(_Tagged, "_text", ("if goes_on:", "if True:")), FORMATS),
    "a_backslash_escapes_nothing": (change(Source, "json", ("place += 1", "pass")), FORMATS),
    "half_a_word_is_another_word": (
        change(Source, "takes", ("if word.startswith(rest) and not self.is_over:", "if False:")),
        FORMATS,
    ),
    "what_is_no_call_is_lost": (
        change(CallReader, "_parts", ("yield source.take(size)", "source.take(size)")),
        FORMATS,
    ),
    "a_marked_call_in_what_only_began_like_one_is_lost": (
        change(CallReader, "_parts", ("1 if self._reads_whole else max", "max")),
        FORMATS,
    ),
    "any_name_is_a_call_without_marks": (
        change(
            whole, "_head", ("if not (yield from source.takes(*(f'{name}\"' for name in functions))):", "if False:")
        ),
        FORMATS,
    ),
    "text_behind_a_call_without_marks_is_lost": (
        change_everywhere(whole.read_whole, ("source.at < len(source.text)", "False")),
        FORMATS,
    ),
    "the_last_calls_of_a_list_are_lost": (
        change(CallReader, "_parts", ("while source.text or self._parsing is not None:", "while source.text:")),
        FORMATS,
    ),
    "a_channel_without_a_message_waits_for_ever": (
        change(HarmonyReader, "_read_head", (" and len(text) < MAX_HEAD + len(MESSAGE)", "")),
        READERS,
    ),
    "a_special_token_is_written_in_letters": (
        change(_TagGrammar, "_quoted", ("word if i % 2 else json.dumps(word)", "json.dumps(word)")),
        GUIDES,
    ),
    "a_group_has_one_call": (change(_TagGrammar, "_run", ('"" if is_one else', '"" if True else')), GUIDES),
    "the_model_s_marks_stay_hidden": (
        change(Dialect, "fields", ("visible += self.marks.special", "pass")),
        GATEWAY,
    ),
    "a_call_is_awaited_in_the_final_channel": (
        change(
            Dialect, "_marks_for", ("if must_call and self.tools.start else self.marks", "if False else self.marks")
        ),
        GATEWAY,
    ),
    "reasoning_grows_the_message": (
        change(Output, "_grown", ("item is None or item.is_reasoning is not is_reasoning", "item is None")),
        GATEWAY,
    ),
    "reasoning_of_earlier_turns_is_forgotten": (
        change_everywhere(items.turns_of, ('turns[-1]["reasoning_content"] = reasoning', "pass")),
        GATEWAY,
    ),
}
