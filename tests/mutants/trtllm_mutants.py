"""Planted bugs of TensorRT-LLM's bindings, each with the test files of which one must notice it."""

from __future__ import annotations

from backend.executor import own_processors
from backend.trtllm import (
    engine_config,
    executor,
    from_core,
    gpt_manager,
    inference_request,
    record,
    request_configs,
    to_core,
)
from backend.trtllm.configs import KvCacheConfig
from backend.trtllm.decoding import DecodingConfig
from backend.trtllm.executor import Executor
from backend.trtllm.gpt_manager import GptManager
from backend.trtllm.record import Field, Record
from backend.trtllm.results import Response
from tests.mutants.changes import Plant, change

CLASSES = ["tests/trtllm/test_classes.py"]
NAMES = ["tests/trtllm/test_names.py"]
CONVERSION = ["tests/trtllm/test_conversion.py"]
TENSORS = ["tests/trtllm/test_tensors.py"]
EXECUTOR = ["tests/trtllm/test_executor.py"]
FIGURES = ["tests/trtllm/test_figures.py"]
MANAGER = ["tests/trtllm/test_gpt_manager.py"]

MUTANTS: dict[str, tuple[Plant, list[str]]] = {
    "fixed_attributes_can_be_set": (change(Field, "__set__", ("if self.read_only:", "if False:")), CLASSES),
    "keyword_only_arguments_by_position": (change(Record, "__init__", ("args and not each.kw_only", "args")), CLASSES),
    "unknown_arguments_are_ignored": (change(Record, "__init__", ("if args or kwargs:", "if args:")), CLASSES),
    "any_attribute_can_be_set": (change(Record, "__setattr__", ("or self._is_dynamic", "or True")), CLASSES),
    "parts_are_not_copied": (change(Record, "copied", ("return twin", "return self")), CLASSES),
    "tensors_are_equal_by_shape": (change(record, "same", ("alike and (one == other).all()", "alike")), CLASSES),
    "runtime_defaults_win": (
        change(
            KvCacheConfig,
            "fill_empty_fields_from_runtime_defaults",
            ("if self.max_attention_window is None:", "if True:"),
        ),
        CLASSES,
    ),
    "a_part_leaves_the_decoding_mode": (
        change(DecodingConfig, "__setattr__", ("        self._set_mode_of(name)", "        pass")),
        NAMES,
    ),
    "open_ranges_may_be_followed": (
        change(
            request_configs.KvCacheRetentionConfig,
            "_made",
            ("one.token_end is None or one.token_end >", "one.token_end is not None and one.token_end >"),
        ),
        NAMES,
    ),
    "an_error_has_a_result": (
        change(Response, "error_msg", ('raise RuntimeError(f"response of', 'return (f"response of')),
        NAMES,
    ),
    "a_temperature_alone_samples": (
        change(to_core, "_sampling", ('values["temperature"] = values["top_k"] = None', "pass")),
        CONVERSION,
    ),
    "end_id_minus_one_is_a_token": (change(to_core, "to_core", (" or request.end_id < 0", "")), CONVERSION),
    "beams_beyond_the_executor_s": (
        change(to_core, "to_core", ("request.sampling_config.beam_width > max_beam_width", "False")),
        CONVERSION,
    ),
    "retention_in_the_order_given": (
        change(
            to_core,
            "_retention",
            (
                "sorted(given.token_range_retention_configs, key=lambda each: each.token_start)",
                "given.token_range_retention_configs",
            ),
        ),
        CONVERSION,
    ),
    "metrics_with_every_response": (change(from_core, "result", (" if given.is_final else None", "")), FIGURES),
    "cached_blocks_are_not_free": (
        change(
            from_core,
            "_kv_cache_stats",
            (
                "free_num_blocks=given.max_num_blocks - given.used_num_blocks",
                "free_num_blocks=given.free_num_blocks - 1",
            ),
        ),
        FIGURES,
    ),
    "seconds_for_microseconds": (change(from_core, "_span", ("microseconds=ns / 1000", "seconds=ns % 1000")), FIGURES),
    "copies_count_as_new": (
        change(from_core, "perf_metrics", ("given.num_new_blocks - given.num_copied_blocks", "given.num_new_blocks")),
        FIGURES,
    ),
    "an_id_is_taken_for_a_list": (
        change(executor, "_awaited", ("_IDS if isinstance(which, list | tuple) else _ID", "_IDS")),
        EXECUTOR,
    ),
    "open_after_shutdown": (change(Executor, "_check_open", ("not self._close.alive", "False")), EXECUTOR),
    "functions_of_requests_are_kept_for_ever": (
        change(Executor, "_told", ("if answer.is_final:", "if False:")),
        TENSORS,
    ),
    "four_arguments_are_five": (
        change(own_processors, "_num_arguments", ("_NUM_ARGUMENTS - 1", "_NUM_ARGUMENTS")),
        TENSORS,
    ),
    "context_rows_under_the_output_s_name": (change(from_core, "_additional", ("context_{name}", "{name}")), TENSORS),
    "logits_without_the_engine_s_flag": (
        change(GptManager, "_converted", (" &= params.gather_context_logits", " &= True")),
        MANAGER,
    ),
    "a_lambda_goes_to_the_engine_process": (
        change(executor, "import_path", (" or not qualified.isidentifier()", "")),
        TENSORS,
    ),
    "static_batches_with_post_processors": (
        change(engine_config, "_check_served", ("config.batching_type is BatchingType.STATIC", "False")),
        CONVERSION,
    ),
    "the_id_is_free_only_after_the_final_call": (
        change(
            GptManager,
            "_send",
            ("self._asked.pop(request_id)", "self._asked[request_id]"),
        ),
        MANAGER,
    ),
    "a_duplicate_takes_the_first_one_s_place": (
        change(GptManager, "_converted", ("if given.request_id in self._asked:", "if False:")),
        MANAGER,
    ),
    "outputs_without_padding": (
        change(gpt_manager, "_tensors", ("(tokens + [asked.pad_id] * length)[:length]", "tokens")),
        MANAGER,
    ),
    "sequences_are_counted_together": (
        change(
            gpt_manager,
            "_tensors",
            ("asked.num_sent[result.sequence_index] = before", "asked.num_sent[0] = before"),
            ("else asked.num_sent[result.sequence_index]", "else asked.num_sent[0]"),
        ),
        MANAGER,
    ),
    "beams_of_a_stream_are_added_up": (
        change(gpt_manager, "_tensors", ("0 if asked.has_beams else ", "")),
        MANAGER,
    ),
    "words_end_one_token_early": (
        change(inference_request, "_words", ("tokens[start:end]", "tokens[start : end - 1]")),
        MANAGER,
    ),
}
