"""Bugs planted in what the native kernels make of ordinary settings, and in how packed weights are kept and found again."""

from __future__ import annotations

from backend.executor import engine_supervisor
from backend.kvcache import sizing
from backend.layers import attention as attention_layer
from backend.layers.linear import QuantizedLinear
from backend.worker import fingerprint, kept_parts, native_layers, native_tier, packed_model, tier, weight_cache
from backend.worker.group import InProcessWorkerGroup
from deploy import server_log
from kernels import kv_append
from kernels.common import kv_rotation, rotation
from kernels.cpu import attention, decoder, linear, modules
from tests.mutants.changes import Plant, change, change_everywhere

_SETTINGS = "tests/parity/test_ordinary_settings.py::test_replies_are_the_same_bits_alone_and_in_a_pool_that_evicts"
_OUTPUTS = "tests/model/test_additional_outputs.py::"
_HIDDEN = _OUTPUTS + "test_hidden_states_equal_a_plain_forward_with_context_rows_only_if_asked_for"
_PROMPTS = "tests/model/test_prompt_inputs.py"
_LINEAR = "tests/native/test_linear.py::"
_BLOCKS = "tests/native/test_blocks.py::test_logits_are_those_of_the_torch_tier"
_ALONE = "tests/native/test_attention.py::"
_ROTATION = "tests/weight_formats/test_rotation.py::"
_BIAS = "tests/parity/test_quantised_kv.py::test_a_large_bias_of_keys_costs_next_to_nothing"


def _form(*replacement: tuple[str, str]) -> Plant:
    return change_everywhere(decoder._form_struct, *replacement)


_MODELS = "tests/native/kept_weights/test_mapped_models.py::"
_FILES = "tests/native/kept_weights/test_files.py::"
_HOSTILE = _FILES + "test_what_was_not_written_so_is_told_in_one_line_and_made_anew"
_CONTENT = _MODELS + "test_other_content_is_another_entry_whatever_its_times_say"

MUTANTS = {
    "the_engine_keeps_the_configured_blocks": (
        change_everywhere(sizing.with_usable_blocks, ("if size else config", "if False else config")),
        [_SETTINGS + "[blocks of 16]"],
    ),
    "float16_is_rounded": (
        change(tier.TierChoice, "computes_in", ("torch.float32 if", "torch.bfloat16 if")),
        [_SETTINGS + "[float16]"],
    ),
    "only_the_first_rows_are_looked_at": (
        change(linear, "_is_float16", ("row_slices(*weight.shape)", "[slice(0, 1)]")),
        [_LINEAR + "test_a_weight_with_a_number_that_float16_does_not_hold_stays_float32[65520.0]"],
    ),
    "hidden_states_are_those_of_other_rows": (
        change(native_tier.NativeTier, "run", ("compute(hidden, logits)", "compute(hidden.flip(0), logits)")),
        [_HIDDEN],
    ),
    "embeddings_are_of_the_token_before": (
        change(
            native_tier.NativeTier,
            "_given",
            ("of_layer[where]", "of_layer[where - 1]"),
        ),
        [_PROMPTS],
    ),
    "the_last_step_s_hidden_states_stay_wanted": (
        change(
            decoder.NativeDecoder,
            "step",
            ("batch.hidden = None if hidden is None else", "if hidden is not None: batch.hidden ="),
        ),
        ["tests/native/test_hidden_states.py"],
    ),
    "remarks_go_to_the_wrong_ears": (
        change(engine_supervisor.EngineProcess, "_listen", ('log.warning("remark: %s"', 'log.debug("remark: %s"')),
        ["tests/executor/test_supervisor.py::test_what_the_engine_remarks_is_a_warning_of_the_log_at_each_start"],
    ),
    "a_remark_is_told_at_each_start_anew": (
        change(server_log, "remarks", ("list(dict.fromkeys(", "list(tuple(")),
        ["tests/deploy/test_server_log.py::test_what_the_engine_remarks_is_found_once_each_also_in_json"],
    ),
    "q_and_k_are_normed_head_by_head": (
        change_everywhere(native_layers.native_form, ('== "row"', '== "rows"')),
        [_BLOCKS],
    ),
    "a_parallel_block_runs_as_a_sequential_one": (_form(("form.is_parallel,", "False,")), [_BLOCKS]),
    "what_attention_yields_is_normed_as_the_mlp_s": (
        change_everywhere(
            decoder._layer_struct, ("_norm_struct(layer.attention_out_norm)", "_norm_struct(layer.mlp_out_norm)")
        ),
        [_BLOCKS],
    ),
    "neighbours_are_not_rotated_together": (_form(("form.is_interleaved,", "False,")), [_BLOCKS]),
    "logits_are_not_scaled": (
        _form(("form.logit_scale,", "1.0,")),
        ["tests/native/test_blocks.py::test_capped_logits_keep_to_the_cap_and_the_greedy_token_is_theirs"],
    ),
    "a_sink_is_scaled_like_a_score": (
        change(attention.NativeAttention, "__init__", ("sinks.float()", "(sinks.float() * head_dim**-0.5)")),
        [_ALONE + "test_results_are_those_of_the_formula"],
    ),
    "experts_are_added_without_weights": (
        change(modules.NativeMixture, "__call__", ("(chosen, weights))", "(chosen, None))")),
        ["tests/native/test_modules.py::test_experts_are_added_with_their_weights"],
    ),
    "a_rotated_weight_is_too_large": (
        change_everywhere(rotation.round_weight, (" / block_of(w.shape[1])", "")),
        [_ROTATION + "test_a_layer_is_the_product_of_what_rotated_numbers_stand_for"],
    ),
    "inputs_of_rotated_layers_are_not_rotated": (
        change(QuantizedLinear, "__call__", ("rotate(x) if is_rotated else x.float()", "x.float()")),
        [_ROTATION + "test_a_layer_is_the_product_of_what_rotated_numbers_stand_for"],
    ),
    "groups_are_of_any_number_of_blocks": (
        change_everywhere(rotation.group_of, ("MOST_BLOCKS * block_of(columns), ", "")),
        [_ROTATION + "test_groups_divide_the_columns_and_span_few_blocks[448]"],
    ),
    "keys_keep_their_bias": (
        change_everywhere(native_layers.native_layer, ("else attention.key_shift", "else None")),
        [_BIAS + "[int8-0.02-native]"],
    ),
    "keys_keep_their_bias_on_the_torch_tier": (
        change_everywhere(attention_layer.attention, ("key_shift=weights.key_shift", "key_shift=None")),
        [_BIAS + "[int8-0.02-torch]"],
    ),
    "only_keys_are_rotated": (
        change(kv_append, "reference", ("rotated_query(query), rotated_key", "query, rotated_key")),
        [_BIAS + "[int8-0.02-torch]"],
    ),
    "the_shift_is_a_bias_that_no_position_turns": (
        change_everywhere(kv_rotation.mean_of_rotated, ("a * cos - b * sin, b * cos + a * sin", "a, b")),
        ["tests/kernels/test_kv_rotation.py::test_the_shift_is_the_mean_of_what_the_positions_make_of_a_bias"],
    ),
    "a_file_is_known_by_its_time_of_change_alone": (
        change(fingerprint, "state_of", ("s.st_mtime_ns, s.st_ctime_ns", "s.st_mtime_ns, 0")),
        [_CONTENT + "[True]"],
    ),
    "content_that_has_just_changed_is_noted": (
        change_everywhere(fingerprint.content_hash, ("> SETTLED_S", "> 0.0")),
        [_FILES + "test_there_is_no_note_of_a_file_that_has_just_changed"],
    ),
    "the_format_is_no_part_of_the_key": (
        change(packed_model.PackedModels, "_key", ("self._dtype, held, ", "self._dtype, ")),
        [_MODELS + "test_other_formats_descriptions_and_kernels_are_other_entries"],
    ),
    "a_file_of_anybody_is_mapped": (
        change(weight_cache.WeightCache, "find", ("open_trusted(path)", 'path.open("rb")')),
        [_HOSTILE + "[others may write]"],
    ),
    "biases_are_forgotten": (
        change_everywhere(kept_parts._named, ("if part is not None", "if part is not None and index < 4")),
        [_MODELS + "test_what_is_mapped_computes_the_bits_of_what_is_packed[w8a8]"],
    ),
    "mapped_weights_count_as_free_memory": (
        change(InProcessWorkerGroup, "free_memory_bytes", ("- mapped", "- 0")),
        [_FILES + "test_mapped_weights_do_not_count_as_free_memory"],
    ),
}
