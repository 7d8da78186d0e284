"""Planted bugs of TensorRT-LLM's bindings, each with the test files of which one must notice it."""

from __future__ import annotations

from backend.api import sampling_rules
from backend.api.foreign import ForeignTable
from backend.engine import groups, update
from backend.executor import own_processors
from compat.trtllm import (
    engine_config,
    executor,
    from_core,
    gpt_manager,
    inference_request,
    parameters,
    record,
    repeats,
    request_configs,
    to_core,
)
from compat.trtllm.callback_loop import CallbackLoop
from compat.trtllm.configs import KvCacheConfig
from compat.trtllm.decoding import DecodingConfig
from compat.trtllm.executor import Executor
from compat.trtllm.gpt_manager import GptManager
from compat.trtllm.record import Field, Record
from compat.trtllm.repeats import Repeats
from compat.trtllm.results import Response
from tests.mutants.changes import Plant, change, change_everywhere

CLASSES = ["tests/trtllm/test_classes.py"]
NAMES = ["tests/trtllm/test_names.py"]
CONVERSION = ["tests/trtllm/test_conversion.py"]
TENSORS = ["tests/trtllm/test_tensors.py"]
EXECUTOR = ["tests/trtllm/test_executor.py"]
FIGURES = ["tests/trtllm/test_figures.py"]
MANAGER = ["tests/trtllm/test_gpt_manager.py"]
PARAMETERS = ["tests/api/test_foreign.py"]
CALLBACKS = ["tests/trtllm/test_callback_loop.py"]
STREAMS = ["tests/trtllm/test_streams.py"]
VALUES = ["tests/trtllm/test_values.py"]

MUTANTS: dict[str, tuple[Plant, list[str]]] = {
    "used_blocks_are_told_as_free": (
        change(
            from_core,
            "_kv_cache_stats",
            ("free_num_blocks=given.max_num_blocks - given.used_num_blocks", "free_num_blocks=given.used_num_blocks"),
        ),
        VALUES,
    ),
    "used_and_free_are_exchanged_in_json": (
        change(
            gpt_manager,
            "stats_json",
            ('"Used KV cache blocks": kv.used_num_blocks', '"Used KV cache blocks": kv.free_num_blocks'),
        ),
        VALUES,
    ),
    "context_requests_are_those_that_generate": (
        change(
            gpt_manager,
            "stats_json",
            ('"Context Requests": latest.num_context_requests', '"Context Requests": latest.num_gen_requests'),
        ),
        VALUES,
    ),
    "static_context_requests_are_all": (
        change(from_core, "_static", ("given.num_context_requests", "given.num_scheduled_requests")),
        VALUES,
    ),
    "removed_events_hold_nothing": (
        change(from_core, "_event_data", ("KVCacheRemovedData(data.block_hashes)", "KVCacheRemovedData([])")),
        VALUES,
    ),
    "updated_events_tell_the_level": (
        change(
            from_core,
            "_event_data",
            ("KVCacheUpdatedData(data.block_hash, priority=", "KVCacheUpdatedData(data.block_hash, cache_level="),
        ),
        VALUES,
    ),
    "an_adapter_s_config_is_left_out": (
        change(to_core, "_lora", ("tuple(map(tuple, config.tolist()))", "()")),
        VALUES,
    ),
    "gpt_manager_forgets_its_token_limit": (
        change(gpt_manager, "_engine_config", ("max_num_tokens=params.max_num_tokens", "max_num_tokens=None")),
        VALUES,
    ),
    "gpt_manager_forgets_chunking": (
        change(gpt_manager, "_engine_config", ("params.enable_chunked_context", "False")),
        VALUES,
    ),
    "gpt_manager_forgets_its_adapters": (
        change(
            gpt_manager,
            "_engine_config",
            ("peft_cache_config=params.peft_cache_manager_config", "peft_cache_config=None"),
        ),
        VALUES,
    ),
    "gpt_manager_forgets_sink_tokens": (
        change(gpt_manager, "_engine_config", ("kv_cache.sink_token_length", "None")),
        VALUES,
    ),
    "context_positions_are_outputs": (
        change(
            from_core,
            "_one_request",
            ("context_prefill_position=given.num_computed_tokens", "context_prefill_position=given.num_output_tokens"),
        ),
        VALUES,
    ),
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
        change_everywhere(sampling_rules.tensorrt_llm_sampling, ("top_k=1", "top_k=0")),
        ["tests/serving/test_llmapi_model.py"],
    ),
    "a_stream_tells_the_newest_log_probabilities_only": (
        change_everywhere(repeats._repeat, ("result.log_probs = [before.log_probs]", "pass")),
        STREAMS,
    ),
    "log_probabilities_that_are_complete_are_added_up": (
        change_everywhere(repeats._repeat, ("stream.adds_up and", "")),
        STREAMS,
    ),
    "context_logits_are_told_once": (
        change_everywhere(repeats._repeat, ("result.context_logits = before.context_logits", "pass")),
        STREAMS,
    ),
    "streams_that_have_ended_are_remembered": (
        change(Repeats, "complete", ("self._streams.pop(response.request_id, None) if is_final else", "")),
        STREAMS,
    ),
    "heirs_have_no_context_rows": (
        change(groups, "share_prompt", ("sibling.gathered.inherit(seq.gathered)", "pass")),
        STREAMS,
    ),
    "drafts_do_not_end_the_request": (
        change_everywhere(update._is_after_drafts, ("num_output > len(drafts)", "False")),
        STREAMS,
    ),
    "a_wrong_draft_does_not_end_the_request": (
        change_everywhere(update._is_after_drafts, ("(num_output > 0", "(num_output < 0")),
        STREAMS,
    ),
    "the_last_iteration_is_told_before_the_end": (
        change(from_core, "perf_metrics", ("iteration if is_last else None", "iteration")),
        STREAMS,
    ),
    "a_nameless_processor_is_called": (
        change(executor, "_started", (" if each is not None", "")),
        TENSORS,
    ),
    "reused_blocks_are_told_as_allocated": (
        change(from_core, "perf_metrics", ("KvCacheMetrics(given.num_new_blocks,", "KvCacheMetrics(new + reused,")),
        FIGURES,
    ),
    "a_queue_of_minus_one_refuses_every_request": (
        change_everywhere(parameters._max_queue_size, ("(None, 0, -1)", "(None,)")),
        CONVERSION,
    ),
    "the_bindings_pass_the_configuration_s_checks_by": (
        change(
            engine_config,
            "engine_config",
            ("checked_config(tree)", "msgspec.convert(tree, EngineConfig, strict=False)"),
        ),
        ["tests/trtllm/test_configuration_checks.py"],
    ),
    "errors_name_keys_that_the_bindings_do_not_have": (
        change(engine_config, "_in_their_words", ("_NAMES.get(found[0]", "_NAMES.get(''")),
        ["tests/trtllm/test_configuration_checks.py"],
    ),
    "a_top_p_of_zero_is_out_of_range": (
        change_everywhere(sampling_rules.tensorrt_llm_sampling, ("or value != 0", "or True")),
        ["tests/api/test_sampling.py"],
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
    "metrics_with_the_last_response_only": (
        change(from_core, "_perf_metrics", ("given.perf_metrics is None", "not given.is_final")),
        STREAMS,
    ),
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
        change(Executor, "_delivered", ("if answer.is_final:", "if False:")),
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
        change(engine_config, "_check_combinations", ("config.batching_type is BatchingType.STATIC", "False")),
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
    "statistics_of_the_last_step_are_lost": (
        change(CallbackLoop, "_run", ("if was_active:", "if self._core.has_work:")),
        CALLBACKS,
    ),
    "more_is_asked_for_than_there_is_room": (
        change(CallbackLoop, "_take_in", (" - len(self._core.scheduler.waiting)", "")),
        CALLBACKS,
    ),
    "neutral_values_are_refused": (
        change(ForeignTable, "_refuse", ("in parameter.neutral:", "in ():")),
        PARAMETERS,
    ),
    "unknown_parameters_are_passed_over": (change(ForeignTable, "check", ("if unknown:", "if False:")), PARAMETERS),
    "errors_repeat_whole_values": (
        change(ForeignTable, "_named", ("repr(value)[:MAX_SHOWN]", "repr(value)")),
        PARAMETERS,
    ),
}
