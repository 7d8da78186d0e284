"""Planted bugs of the converter of checkpoints and of prompt adapters, each with the tests that must notice it."""

from __future__ import annotations

from backend.api.checkpoint import prompt_adapter_files
from backend.convert import meta, meta_tokenizer, pickled, run
from backend.convert.meta import MetaCheckpoint
from backend.executor import prompt_adapters
from backend.executor.prompt_adapters import PromptAdapters
from tests.mutants.changes import Plant, change, change_everywhere

HOSTILE = ["tests/convert/test_convert.py::test_a_hostile_file_ends_in_one_sentence_and_leaves_nothing"]
TOKENIZERS = ["tests/convert/test_convert.py::test_the_tokenizer_of_llama_3_is_read"]
SOFT = ["tests/llm/test_prompt_adapters.py"]

MUTANTS: dict[str, tuple[Plant, list[str]]] = {
    "keys_are_permuted_by_the_number_of_queries": (
        change(
            MetaCheckpoint,
            "__getitem__",
            ("self.params.kv_heads", "self.params.n_heads"),
        ),
        ["tests/convert/test_convert.py::test_the_logits_are_those_of_metas_model"],
    ),
    "shapes_are_not_compared_with_params": (
        change(MetaCheckpoint, "_check_shapes", ("if found is None or len(found)", "if False and len(found)")),
        HOSTILE,
    ),
    "experts_are_left_out_in_silence": (
        change(MetaCheckpoint, "_map", ("if found is None:", "if found is None and not stored:")),
        HOSTILE,
    ),
    "compressed_archives_are_read": (
        change_everywhere(
            pickled._check_archive,
            ("entry.compress_type != zipfile.ZIP_STORED", "False"),
            ("for e in entries) > size", "for e in entries) > 1 << 62"),
        ),
        HOSTILE,
    ),
    "tensors_may_claim_more_than_is_stored": (
        change_everywhere(pickled._checked, ("> value.untyped_storage().nbytes()", "> 1 << 62")),
        HOSTILE,
    ),
    "an_index_may_name_any_file": (
        change_everywhere(run._pickles, ("not _SHARD.fullmatch(name)", "False")),
        ["tests/convert/test_convert.py::test_pickled_weights_of_hugging_face_become_safetensors"],
    ),
    "another_scaling_of_rope_is_written_as_metas": (
        change_everywhere(meta.meta_params, ('if kind == "llama3" and any', 'if kind == "none" and any')),
        ["tests/convert/test_convert.py::test_a_model_without_a_form_in_metas_files_is_refused"],
    ),
    "the_end_of_a_turn_ends_no_text": (
        change_everywhere(meta_tokenizer._of_ranks, ('first + SPECIAL.index("<|eot_id|>")', "first + 2")),
        TOKENIZERS,
    ),
    "a_changed_prompt_adapter_is_not_read_again": (
        change(PromptAdapters, "table", ("held.stamp == stamp", "stamp")),
        ["tests/llm/test_prompt_adapters.py::test_a_changed_adapter_is_read_again_and_few_are_held"],
    ),
    "prompt_adapters_are_held_for_ever": (
        change(PromptAdapters, "table", ("len(self._held) > MAX_HELD or", "False or")),
        ["tests/llm/test_prompt_adapters.py::test_a_changed_adapter_is_read_again_and_few_are_held"],
    ),
    "virtual_tokens_follow_the_prompt": (
        change_everywhere(
            prompt_adapters.with_table, ("virtual + request.input_token_ids", "request.input_token_ids + virtual")
        ),
        ["tests/llm/test_prompt_adapters.py::test_a_prompt_adapter_generates_what_peft_does_beside_other_requests"],
    ),
    "rows_may_be_infinite": (
        change_everywhere(prompt_adapters.read_table, ("if not np.isfinite(rows).all()", "if False")),
        SOFT,
    ),
    "any_adapter_of_peft_is_a_prompt_adapter": (
        change_everywhere(
            prompt_adapter_files.check_prompt_adapter, ('config.get("peft_type") != "PROMPT_TUNING" or', "False or")
        ),
        SOFT,
    ),
}
