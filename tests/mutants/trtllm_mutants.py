"""Planted bugs of TensorRT-LLM's bindings, each with the test files of which one must notice it."""

from __future__ import annotations

from backend.api.foreign import ForeignTable
from backend.engine import update
from compat.trtllm import (
    engine_config,
    from_core,
    gpt_manager,
    inference_request,
    parameters,
    request_configs,
    to_core,
)
from compat.trtllm.callback_loop import CallbackLoop
from compat.trtllm.gpt_manager import GptManager
from compat.trtllm.record import Record
from compat.trtllm.results import Response
from tests.mutants.changes import Plant, change, change_everywhere

CLASSES = ["tests/trtllm/test_classes.py"]
NAMES = ["tests/trtllm/test_names.py"]
CONVERSION = ["tests/trtllm/test_conversion.py"]
TENSORS = ["tests/trtllm/test_tensors.py"]
FIGURES = ["tests/trtllm/test_figures.py"]
MANAGER = ["tests/trtllm/test_gpt_manager.py"]
PARAMETERS = ["tests/api/test_foreign.py"]
CALLBACKS = ["tests/trtllm/test_callback_loop.py"]
STREAMS = ["tests/trtllm/test_streams.py"]
VALUES = ["tests/trtllm/test_values.py"]

MUTANTS: dict[str, tuple[Plant, list[str]]] = {
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
    "gpt_manager_forgets_chunking": (
        change(gpt_manager, "_engine_config", ("params.enable_chunked_context", "False")),
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
    "any_attribute_can_be_set": (change(Record, "__setattr__", ("or self._is_dynamic", "or True")), CLASSES),
    "parts_are_not_copied": (change(Record, "copied", ("return twin", "return self")), CLASSES),
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
    "a_wrong_draft_does_not_end_the_request": (
        change_everywhere(update._is_after_drafts, ("(num_output > 0", "(num_output < 0")),
        STREAMS,
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
    "context_rows_under_the_output_s_name": (change(from_core, "_additional", ("context_{name}", "{name}")), TENSORS),
    "logits_without_the_engine_s_flag": (
        change(GptManager, "_converted", (" &= params.gather_context_logits", " &= True")),
        MANAGER,
    ),
    "the_id_is_free_only_after_the_final_call": (
        change(
            GptManager,
            "_send",
            ("self._asked.pop(request_id)", "self._asked[request_id]"),
        ),
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
    "words_end_one_token_early": (
        change(inference_request, "_words", ("tokens[start:end]", "tokens[start : end - 1]")),
        MANAGER,
    ),
    "statistics_of_the_last_step_are_lost": (
        change(CallbackLoop, "_run", ("if was_active:", "if self._core.has_work:")),
        CALLBACKS,
    ),
    "neutral_values_are_refused": (
        change(ForeignTable, "_refuse", ("in parameter.neutral:", "in ():")),
        PARAMETERS,
    ),
}
