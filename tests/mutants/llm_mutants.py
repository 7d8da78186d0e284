"""Planted bugs of the LLM API and of the converter of checkpoints and prompt adapters, each with tests that must notice it."""

from __future__ import annotations

from backend.api.checkpoint import prompt_adapter_files
from backend.convert import meta, meta_tokenizer, pickled, run
from backend.convert.meta import MetaCheckpoint
from backend.executor import prompt_adapters
from backend.executor.prompt_adapters import PromptAdapters
from backend.text.accumulator import OutputAccumulator
from compat.llm import LLM, arguments, llm, mapping
from compat.llm.chat import ChatTokenizer
from compat.llm.folding import SequenceFold
from compat.llm.postprocessing import PostprocPool
from compat.llm.result import GenerationResult
from compat.llm.result_queue import ResultQueue
from compat.llm.sampling_params import SamplingParams
from compat.llm.worker import GenerationExecutorWorker
from tests.mutants.changes import change, change_everywhere

RESULTS = ["tests/llm/test_results.py"]
SEQUENCES = ["tests/llm/test_sequences.py"]
MAPPING = ["tests/llm/test_mapping.py"]
POSTPROCESSING = ["tests/llm/test_postprocessing.py"]

HOSTILE = ["tests/convert/test_convert.py::test_a_hostile_file_ends_in_one_sentence_and_leaves_nothing"]
TOKENIZERS = ["tests/convert/test_convert.py::test_the_tokenizer_of_llama_3_is_read"]
SOFT = ["tests/llm/test_prompt_adapters.py"]

MUTANTS = {
    "a_failed_prompt_stops_the_batch": (
        change(LLM, "generate", ("except RequestError", "except KeyError")),
        ["tests/llm/test_llm.py"],
    ),
    "failed_prompts_are_left_out_of_the_outputs": (
        change(LLM, "generate", ("[outputs.get(n) for n in range(len(prompts))]", "list(outputs.values())")),
        ["tests/llm/test_llm.py"],
    ),
    "a_chat_has_no_tools": (
        change(ChatTokenizer, "apply_chat_template", ("add_generation_prompt, tools", "add_generation_prompt")),
        ["tests/llm/test_chat.py"],
    ),
    "the_timeout_begins_anew_with_each_token": (
        change(GenerationResult, "result", ("max(0.0, end - time.monotonic())", "timeout")),
        ["tests/llm/test_results.py::test_the_timeout_is_for_the_whole_result_and_not_for_each_token"],
    ),
    "the_diff_of_an_earlier_step_stays": (
        change(GenerationResult, "_take_in", ("    for output in self._outputs:\n        output.begin_step()\n", "")),
        RESULTS,
    ),
    "a_closed_event_loop_ends_the_dispatcher": (
        change(ResultQueue, "put", ("except RuntimeError:", "except KeyError:")),
        ["tests/llm/test_results.py::test_an_event_loop_that_was_closed_holds_up_nobody"],
    ),
    "tokens_behind_a_stop_string_stay": (
        change(OutputAccumulator, "_cut", ("    del self.ids[kept:]\n", "")),
        SEQUENCES,
    ),
    "every_token_is_told_whatever_the_interval": (
        change(SequenceFold, "is_due", (">= self._params.stream_interval", ">= 1")),
        RESULTS,
    ),
    "all_requests_go_to_the_first_process": (
        change(PostprocPool, "worker_of", ("client_id % len(self._workers)", "0")),
        POSTPROCESSING,
    ),
    "a_process_that_hangs_holds_up_the_end": (
        change(GenerationExecutorWorker, "shutdown", ("self._thread.join(END_GRACE_S)", "self._thread.join()")),
        POSTPROCESSING,
    ),
    "beams_without_beam_search": (
        change(mapping, "sampling_config", ("if params.use_beam_search:", "if params.num_sequences > 1:")),
        MAPPING,
    ),
    "stop_strings_wait_for_the_end": (
        change(mapping, "_has_to_be_watched", ("return bool(", "return False and bool(")),
        MAPPING,
    ),
    "a_list_of_ints_is_many_prompts": (
        change(llm, "_is_one", ('bool(inputs) and hasattr(inputs[0], "__index__")', "False")),
        ["tests/llm/test_llm.py"],
    ),
    "the_first_tokens_are_kept": (
        change(llm, "_truncated", ("ids[-params.truncate_prompt_tokens :]", "ids[: params.truncate_prompt_tokens]")),
        ["tests/llm/test_llm.py"],
    ),
    "unknown_arguments_are_ignored": (
        change(arguments, "_checked", ("raise TypeError(error.message) from None", "return {}")),
        ["tests/llm/test_arguments.py"],
    ),
    "greedy_requests_may_have_several_sequences": (
        change(SamplingParams, "_check", ("and self.is_greedy and", "and False and")),
        ["tests/llm/test_sampling_params.py"],
    ),
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
