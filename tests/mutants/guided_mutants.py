"""Bugs planted in guided decoding."""

from __future__ import annotations

from backend.api import guide
from backend.engine import beam_step
from backend.engine.core import EngineCore
from backend.engine.intake import Intake
from backend.engine.preparation import Preparation
from backend.guided import compiler, llguidance_backend, schema_parts, sentences, setup, vocabulary
from backend.guided.compile_errors import error_of
from backend.guided.compiler import GuideCompiler
from backend.guided.llguidance_backend import LLGuidanceBackend, LLGuidanceMatcher
from backend.worker import guided_rows
from backend.worker.guided_rows import GuidedRow, GuidedRows, GuidedStep
from gateway import errors, invalid, translate
from tests.mutants.changes import change, change_everywhere

OUTPUTS = ["tests/guided/test_outputs.py"]
DRAFTS = ["tests/guided/test_drafts.py"]
COMPILER = ["tests/guided/test_compiler.py"]
GUIDE = ["tests/api/test_guide.py"]
WAITING = ["tests/engine/test_preparation_guides.py"]
SCHEMAS = ["tests/guided/test_schemas.py"]
GRAMMARS = ["tests/guided/test_grammars.py"]
GATEWAY = ["tests/gateway/test_guides.py"]
VOCABULARY = ["tests/guided/test_vocabulary.py"]

MUTANTS = {
    "xgrammar_that_is_missing_is_not_replaced": (
        change(setup, "_library", ('backend == "xgrammar" and', "False and")),
        ["tests/guided/test_xgrammar.py"],
    ),
    "a_limit_that_a_draft_has_met_stays": (
        change(GuidedRow, "fill_ahead", ("if self._matcher.error:", "if False:")),
        DRAFTS,
    ),
    "a_matcher_stays_where_the_drafts_end": (
        change(GuidedRow, "fill_ahead", ("self._matcher.rollback(num_taken)", "pass")),
        DRAFTS,
    ),
    "behind_a_wrong_draft_nothing_is_allowed": (change(GuidedRow, "fill_ahead", ("+ 1] = -1", "+ 1] = 0")), DRAFTS),
    "an_end_among_drafts_is_gone_past": (
        change(GuidedRow, "fill_ahead", ("token_id in self._end_ids", "False")),
        DRAFTS,
    ),
    "tokens_behind_right_drafts_are_not_followed": (
        change(GuidedStep, "accept", ("each.row.accept(another.token_id)", "pass")),
        DRAFTS,
    ),
    "a_model_s_other_end_id_is_text": (change(LLGuidanceMatcher, "fill", ("&= ~bit", "&= -1")), DRAFTS),
    "an_end_is_allowed_anywhere": (change(GuidedRow, "fill", ("if is_complete:", "if True:")), OUTPUTS),
    "the_end_is_never_allowed": (change(GuidedRow, "fill", ("if is_complete:", "if False:")), OUTPUTS),
    "the_output_so_far_is_forgotten": (
        change(GuidedRows, "set_row", ("row.token_ids[row.num_prompt_tokens :]", "[]")),
        OUTPUTS,
    ),
    "the_prompt_is_output": (change(GuidedRows, "set_row", ("[row.num_prompt_tokens :]", "[:]")), OUTPUTS),
    "a_slot_keeps_its_guide": (change(GuidedRows, "set_row", ("self._slots.pop(row.slot, None)", "pass")), OUTPUTS),
    "masks_go_to_the_first_rows": (
        change(GuidedStep, "_masked", ("range(each.logits, each.logits + 1", "range(len(places), len(places) + 1")),
        OUTPUTS,
    ),
    "a_row_that_is_stuck_goes_on": (change(GuidedStep, "accept", ("if each.row.error:", "if False:")), OUTPUTS),
    "beams_without_a_token_end_the_engine": (
        change(beam_step, "take_further", (" if search.ended else InvalidRequest(_STUCK)", "")),
        OUTPUTS,
    ),
    "infinite_log_probabilities_are_published": (
        change_everywhere(guided_rows._published, ("(token_id, max(value, NOT_ALLOWED))", "(token_id, value)")),
        OUTPUTS,
    ),
    "a_guide_is_compiled_for_each": (change(GuideCompiler, "begin", ("if entry is None:", "if True:")), COMPILER),
    "the_cache_forgets_what_is_used": (change(GuideCompiler, "_shrink", (" and not entry.users", "")), COMPILER),
    "the_cache_has_no_bound": (change(GuideCompiler, "_shrink", ("size <= self", "True or size <= self")), COMPILER),
    "late_guides_are_waited_for": (change(GuideCompiler, "_take_late", ("if limit <= now", "if False")), COMPILER),
    "the_watch_sleeps_on": (change(GuideCompiler, "begin", ("self._someone_waits.notify()", "pass")), COMPILER),
    "no_least_length_beside_a_guide": (change(guide, "check_guide", ("min_tokens > 1", "min_tokens > 0")), GUIDE),
    "any_least_length_beside_a_guide": (change(guide, "check_guide", ("min_tokens > 1", "False")), GUIDE),
    "any_number_waits": (
        change(GuideCompiler, "_check_queue", ("if waiting >= self", "if False and waiting >= self")),
        COMPILER,
    ),
    "a_cancelled_one_still_waits": (
        change(Preparation, "leave", (".pop(request_id, None)", ".get(request_id)")),
        WAITING,
    ),
    "guides_are_kept_for_ever": (change(Preparation, "end", ("self._guides.end(request_id)", "pass")), WAITING),
    "an_error_is_no_end": (change(EngineCore, "admit", ("if waiting.error is None:", "if True:")), WAITING),
    "a_turn_that_waits_cannot_be_stopped": (
        change(EngineCore, "_stop_session", ("self.preparation.waiting_turn(key)", "None")),
        WAITING,
    ),
    "who_waits_has_all_the_time": (change(Preparation, "late", ("now_ns < self._earliest_ns", "True")), WAITING),
    "only_the_first_is_late": (
        change(Preparation, "late", ("if each > now_ns), default=None", "if each > 1e18), default=None")),
        WAITING,
    ),
    "any_number_of_requests_waits": (change(Preparation, "enter", (">= self._max_size", ">= 1e9")), WAITING),
    "no_end_id_is_needed": (change(Intake, "check", ("if not self._model.eos_ids:", "if False:")), WAITING),
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
    "keys_twice_are_one": (
        change(llguidance_backend, "parse_json", ("if len(found) < len(pairs):", "if False:")),
        SCHEMAS,
    ),
    "a_client_s_options_hold": (
        change(llguidance_backend, "_of_schema", (", overrides=_OPTIONS", "")),
        SCHEMAS,
    ),
    "dates_in_structures_are_any": (
        change(llguidance_backend, "_body", ("hold_formats(structure.schema)", "pass")),
        SCHEMAS,
    ),
    "dates_beside_patterns_are_any": (
        change_everywhere(schema_parts.hold_formats, ("elif isinstance(others, list):", "elif False:")),
        SCHEMAS,
    ),
    "values_are_schemas": (change_everywhere(schema_parts.parts, ("key not in _OF_VALUES", "True")), SCHEMAS),
    "names_are_keywords": (
        change_everywhere(schema_parts.parts, ("if key in _OF_NAMES and isinstance(value, dict):", "if False:")),
        GRAMMARS,
    ),
    "the_first_part_is_meant": (
        change_everywhere(sentences.sentence, ("if is_meant(part.schema)", "")),
        GRAMMARS,
    ),
    "the_line_of_a_grammar_is_not_told": (
        change_everywhere(sentences.sentence, ("{line}{sentence_of(found, find)}", "{sentence_of(found, find)}")),
        GRAMMARS,
    ),
    "any_whitespace_in_structures": (
        change(llguidance_backend, "_body", ('{**schema, "x-guidance": _OPTIONS}', "schema")),
        GRAMMARS,
    ),
    "places_in_our_own_grammar_are_told": (
        change(LLGuidanceBackend, "compile", ("and (found := LINE.match(error))", "and (found := None)")),
        GRAMMARS,
    ),
    "places_are_those_of_the_line_before": (
        change(LLGuidanceBackend, "compile", ("int(found[1])", "int(found[1]) - 1")),
        GATEWAY,
    ),
    "the_compiler_tells_no_place": (
        change_everywhere(error_of, ("InvalidGuide(outcome.text, outcome.place)", "InvalidGuide(outcome.text)")),
        COMPILER,
    ),
    "the_tool_is_counted_among_the_chosen": (
        change(translate, "form_of_tools", ("for i in chosen)", "for i in range(len(chosen)))")),
        GATEWAY,
    ),
    "what_was_written_is_not_told": (
        change(errors, "from_triton", ("field = origin.field_at(place[1])", "field = None")),
        GATEWAY,
    ),
    "what_is_missing_beside_is_not_told": (
        change(invalid, "_missing_beside", ("each[:-1] == path[:-1]", "False")),
        ["tests/gateway/test_errors.py"],
    ),
    "a_form_that_is_not_named_is_another": (
        change(invalid, "_other_form", ('if "tag" not in context:', "if False:")),
        ["tests/gateway/test_errors.py"],
    ),
    "triggers_may_overlap": (
        change(
            llguidance_backend, "parse_structural_tag", ("if any(other != trigger", "if False and any(other != trigger")
        ),
        GRAMMARS,
    ),
    "nesting_counts_round_brackets_only": (change(guide, "nesting", ('"([{"', '"[{"')), GUIDE),
    "byte_level_entries_are_plain": (
        change(vocabulary, "_style", ('entry.startswith("\\u0120")', "False")),
        VOCABULARY,
    ),
}
