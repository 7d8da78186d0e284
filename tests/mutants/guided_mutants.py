"""Bugs planted in guided decoding, in how guides are compiled, in reasoning and in the formats of tool calls."""

from __future__ import annotations

from backend.api import guide
from backend.core import limited_server
from backend.core.round_robin import RoundRobin
from backend.core.thinking import ReasoningCounter, ThinkingCourse
from backend.engine.preparation import Preparation
from backend.guided import compile_process, compiler, llguidance_backend, schema_parts, sentences, vocabulary
from backend.guided.compile_errors import error_of
from backend.guided.compiler import GuideCompiler
from backend.guided.llguidance_backend import LLGuidanceBackend, LLGuidanceMatcher
from backend.text.detokenizer import IncrementalDetokenizer
from backend.worker import guided_rows
from backend.worker.guided_rows import GuidedRow, GuidedRows, GuidedStep
from gateway import tools
from gateway.reasoning import ReasoningReader
from gateway.tool_formats.reader import CallReader
from tests.mutants.changes import change, change_everywhere
from tests.serving import conftest  # noqa: F401

OUTPUTS = ["tests/guided/test_outputs.py"]
DRAFTS = ["tests/guided/test_drafts.py"]
COMPILER = ["tests/guided/test_compiler.py"]
GUIDE = ["tests/api/test_guide.py"]
WAITING = ["tests/engine/test_preparation_guides.py"]
SCHEMAS = ["tests/guided/test_schemas.py"]
GRAMMARS = ["tests/guided/test_grammars.py"]
GATEWAY = ["tests/gateway/test_guides.py"]
ADDED_TOKENS = ["tests/guided/test_added_tokens.py"]
NO_TOKEN = ["tests/guided/test_no_token_left.py"]
VOCABULARY = ["tests/guided/test_vocabulary.py"]
LIMITS = ["tests/guided/test_compile_limits.py"]
TURNS = ["tests/core/test_round_robin.py"]

ENGINE = ["tests/guided/test_thinking.py"]
FORMATS = ["tests/gateway/test_tool_formats.py"]
READERS = ["tests/gateway/test_answer_readers.py"]
FRONT = ["tests/serving/test_everbatch_model.py", "tests/serving/test_everbatch_reasoning.py"]

MUTANTS = {
    "behind_a_wrong_draft_nothing_is_allowed": (change(GuidedRow, "fill_ahead", ("+ 1] = -1", "+ 1] = 0")), DRAFTS),
    "a_model_s_other_end_id_is_text": (change(LLGuidanceMatcher, "fill", ("&= ~bit", "&= -1")), DRAFTS),
    "the_output_so_far_is_forgotten": (
        change(GuidedRows, "set_row", ("row.token_ids[row.num_prompt_tokens :]", "[]")),
        OUTPUTS,
    ),
    "the_prompt_is_output": (change(GuidedRows, "set_row", ("[row.num_prompt_tokens :]", "[:]")), OUTPUTS),
    "masks_go_to_the_first_rows": (
        change(GuidedStep, "_masked", ("range(each.logits, each.logits + 1", "range(len(places), len(places) + 1")),
        OUTPUTS,
    ),
    "a_cancelled_one_still_waits": (
        change(Preparation, "leave", ("_waiting.pop(request_id, None)", "_waiting.get(request_id)")),
        WAITING,
    ),
    "only_the_first_is_late": (
        change(Preparation, "late", ("if each > now_ns), default=None", "if each > 1e18), default=None")),
        WAITING,
    ),
    "any_number_of_requests_waits": (change(Preparation, "enter", (">= self._max_size", ">= 1e9")), WAITING),
    "a_guide_is_known_by_its_text_alone": (
        change_everywhere(compiler._digest, ("{guide.type.value}\\0", "")),
        COMPILER,
    ),
    "times_begin_at_24": (
        lambda set_attribute: set_attribute(
            schema_parts,
            "_PATTERNS",
            {name: text.replace("2[0-3]", "2[0-4]", 1) for name, text in schema_parts._PATTERNS.items()},
        ),
        SCHEMAS,
    ),
    "rows_that_sample_nothing_have_samples": (
        change(GuidedRows, "of_step", ("num_sampling += row.samples", "num_sampling += 1")),
        DRAFTS,
    ),
    "drafts_have_samples_of_their_own": (
        change(GuidedRows, "of_step", ("num_sampling += row.samples", "num_sampling += row.num_samples")),
        DRAFTS,
    ),
    "all_guides_are_of_one_namespace": (
        change(Preparation, "enter", ("request.guide, request.cache_salt", "request.guide, ''")),
        WAITING,
    ),
    "a_client_s_options_hold": (
        change(
            llguidance_backend,
            "_json_rule",
            ("{**schema, 'x-guidance': _OPTIONS}", "{'x-guidance': _OPTIONS, **schema}"),
        ),
        SCHEMAS,
    ),
    "a_literal_is_written_in_one_way": (
        lambda set_attribute: set_attribute(llguidance_backend, "_ANY_SPELLING", ""),
        ADDED_TOKENS,
    ),
    "all_that_could_forbid_is_told": (
        change_everywhere(guided_rows._stuck, ("if is_sent", "")),
        NO_TOKEN,
    ),
    "the_line_of_a_grammar_is_not_told": (
        change_everywhere(sentences.sentence, ("{line}{sentence_of(found, find)}", "{sentence_of(found, find)}")),
        GRAMMARS,
    ),
    "any_whitespace_in_structures": (
        change(llguidance_backend, "_json_rule", ("{**schema, 'x-guidance': _OPTIONS}", "schema")),
        GRAMMARS,
    ),
    "places_in_our_own_grammar_are_told": (
        change(LLGuidanceBackend, "_compiled", ("and (found := LINE.match(error))", "and (found := None)")),
        GRAMMARS,
    ),
    "places_are_those_of_the_line_before": (
        change(LLGuidanceBackend, "_compiled", ("int(found[1])", "int(found[1]) - 1")),
        GATEWAY,
    ),
    "the_compiler_tells_no_place": (
        change_everywhere(error_of, ("InvalidGuide(outcome.text, outcome.place)", "InvalidGuide(outcome.text)")),
        COMPILER,
    ),
    "the_tool_is_counted_among_the_chosen": (
        change_everywhere(tools.form_of_tools, ("for i in asked.callable", "for i in range(len(asked.callable))")),
        GATEWAY,
    ),
    "nesting_counts_round_brackets_only": (change(guide, "nesting", ('"([{"', '"[{"')), GUIDE),
    "byte_level_entries_are_plain": (
        change(vocabulary, "_style", ('entry.startswith("\\u0120")', "False")),
        VOCABULARY,
    ),
    "who_has_ended_is_told": (
        change(GuideCompiler, "end", ("waiting.pop(request_id, None) is", "waiting.get(request_id) is")),
        COMPILER,
    ),
    "guides_hold_what_their_texts_do": (
        change(GuideCompiler, "_book", ("entry.num_bytes = num_bytes", "entry.num_bytes = len(entry.guide.text)")),
        COMPILER,
    ),
    "a_closed_compiler_keeps_its_threads": (
        change(GuideCompiler, "close", ("self._work.notify_all()", "pass"), ("thread.join()", "thread.join(1)")),
        COMPILER,
    ),
    "a_panic_ends_the_thread": (
        change(GuideCompiler, "_compile", ("except BaseException", "except Exception")),
        COMPILER,
    ),
    "a_key_has_a_turn_in_each_namespace": (change(RoundRobin, "take", ("self.discard(key)", "line.pop(key)")), TURNS),
    "what_was_there_before_is_counted": (
        change(compile_process, "compile_guide", ("before = allocated_bytes()", "before = 0")),
        LIMITS,
    ),
    "a_panic_has_no_outcome": (
        change(limited_server, "outcome_of", ("except BaseException", "except Exception")),
        LIMITS,
    ),
    "an_end_mark_is_looked_for_from_its_beginning_only": (
        change(ThinkingCourse, "_after_thought", ("self._fallbacks[matched]", "0")),
        ENGINE,
    ),
    "a_budget_writes_the_end_mark_anew": (
        change(ThinkingCourse, "_thinking", ("ReasoningPlace(Phase.CLOSE, matched)", "ReasoningPlace(Phase.CLOSE, 0)")),
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
