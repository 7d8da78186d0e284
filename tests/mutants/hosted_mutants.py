"""Planted bugs of models that transformers runs: parts that the library computes otherwise, and tokens that depend on others."""

from __future__ import annotations

from backend.api.checkpoint import adapter_files
from backend.api.checkpoint.pooling import Pooling
from backend.engine import cache
from backend.hosted import (
    attention,
    checkpoint,
    experts,
    layers,
    model,
    native_modules,
    products,
    sizes,
)
from backend.hosted.adapters import AdapterHost
from backend.worker import extra_outputs, hosted_tier
from kernels.cpu.linear import PackedLinear
from kernels.cpu.lora import TokenAdapters
from tests.mutants.changes import Plant, change, change_everywhere

_AGREES = "tests/hosted/test_families.py::test_logits_are_those_of_transformers"
_ALONE = "tests/hosted/test_families.py::test_a_token_does_not_depend_on_chunks_neighbours_or_evictions"
_ENCODERS = "tests/hosted/test_encoders.py::"
_STATES = f"{_ENCODERS}test_hidden_states_are_those_of_transformers"
_NATIVE = "tests/hosted/test_native_modules.py::"
_SETTINGS = "tests/hosted/test_checkpoints.py::test_a_wrong_setting_is_one_sentence"
_ADAPTERS = "tests/hosted/test_adapters.py::"

MUTANTS: dict[str, tuple[Plant, list[str]]] = {
    "experts_in_float16_and_float32_are_not_computed_together": (
        change(PackedLinear, "operand", ("FLOAT32 if self.struct.format == FLOAT16 else ", "")),
        ["tests/hosted/test_formats.py::test_experts_that_are_held_in_different_types_are_computed_in_one_call"],
    ),
    "tables_of_the_library_are_not_counted": (
        change_everywhere(sizes.check_elements, ("*module.named_buffers()", "*()")),
        [
            "tests/hosted/test_checkpoints.py::test_a_mask_of_all_positions_is_not_made_where_it_is_larger_than_the_model"
        ],
    ),
    "sinks_are_left_out": (
        change(hosted_tier.NativeLayers, "_layer", ("sinks=sinks", "sinks=None")),
        [f"{_AGREES}[gpt_oss]"],
    ),
    "fewer_kv_heads_are_not_repeated": (
        change(attention.AttentionHost, "attend", ("if repeats > 1", "if repeats > 99")),
        [f"{_AGREES}[mimo_v2_flash]"],
    ),
    "values_keep_their_padding": (
        change(attention.AttentionHost, "attend", ("[None, ..., : layer.value_dim]", "[None]")),
        [f"{_AGREES}[deepseek_v3]"],
    ),
    "experts_are_added_in_their_own_order": (
        change_everywhere(experts.run_experts, ("hidden_states[pairs // count]", "hidden_states[pairs % tokens]")),
        [f"{_AGREES}[qwen3_moe]"],
    ),
    "projections_change_places": (
        change(layers.Fused, "take", ("self._parts.pop(index)", "self._parts.pop(max(self._parts))")),
        [f"{_AGREES}[qwen3_moe]"],
    ),
    "narrow_rows_are_not_filled": (
        change(products, "_has_ragged_rows", ("% _VECTOR != 0", "% _VECTOR > 99")),
        [f"{_ALONE}[laguna-float32-none]"],
    ),
    "a_trial_has_early_positions_only": (
        change(model.HostedModel, "use_native_modules", ("self.max_seq_len - 1", "tokens - 1")),
        [f"{_NATIVE}test_a_scale_that_begins_at_a_late_position_is_found"],
    ),
    "thresholds_are_not_looked_for": (
        change(native_modules, "_has_thresholds", ("return any(", "return False and any(")),
        [f"{_NATIVE}test_a_module_with_a_threshold_is_left_alone"],
    ),
    "every_trial_agrees": (
        change(native_modules.NativeModules, "_agrees", ("_TOLERANCE[own.dtype] *", "100.0 *")),
        [f"{_NATIVE}test_a_module_that_computes_something_else_is_left_alone"],
    ),
    "routers_multiply_by_torch": (
        change(
            products.Products,
            "_multiply",
            ("y: Tensor = layer(x)", "y = x.new_zeros(*x.shape[:-1], layer.out_features)"),
        ),
        [f"{_AGREES}[qwen3_moe]"],
    ),
    "an_encoders_windows_have_one_side": (
        change(hosted_tier.WholeTexts, "_mask", (".abs() < window", " < window")),
        [f"{_STATES}[ModernBertModel]"],
    ),
    "texts_of_a_step_see_each_other": (
        change(hosted_tier.WholeTexts, "begin", ("flat.rows.starts.tolist()", "[0, int(flat.rows.starts[-1])]")),
        [f"{_STATES}[BertModel]"],
    ),
    "a_text_reuses_what_another_one_computed": (
        change_everywhere(cache.with_whole_texts, ("enable_block_reuse=False, ", "")),
        [f"{_ENCODERS}test_a_text_that_another_one_begins_with_is_computed_anew"],
    ),
    "texts_are_cut": (
        change_everywhere(cache.with_whole_texts, ("enable_chunked_context=False", "enable_chunked_context=True")),
        [f"{_STATES}[BertModel]"],
    ),
    "texts_run_in_passes": (
        change(extra_outputs.ExtraOutputs, "of_step", ("if self._cuts_prompts", "if True")),
        [f"{_ENCODERS}test_a_long_text_runs_in_one_pass"],
    ),
    "an_encoder_is_pooled_by_its_last_token": (
        change(Pooling, "of_model", ('kind="mean"', 'kind="last"')),
        ["tests/api/test_pooling.py::test_a_decoder_and_an_encoder_pool_in_their_own_ways"],
    ),
    "adapters_of_fused_projections_meet": (
        change(layers.FusedLinear, "product", ("sum(self._fused._sizes[: self._index])", "0")),
        [f"{_ADAPTERS}test_logits_are_those_of_peft[qwen3_moe]"],
    ),
    "a_row_without_an_adapter_gets_its_neighbours": (
        change(TokenAdapters, "__init__", ("-1 if each is None", "0 if each is None")),
        [f"{_ADAPTERS}test_a_token_has_the_same_bits_beside_any_adapters[qwen3_moe-bfloat16-none]"],
    ),
    "rows_of_adapters_go_by_sequences": (
        change(TokenAdapters, "__init__", (", num_tokens)\n", ", sorted(num_tokens))\n")),
        [f"{_ADAPTERS}test_a_token_has_the_same_bits_beside_any_adapters[qwen3_moe-float32-none]"],
    ),
    "layers_of_heads_take_adapters": (
        change(AdapterHost, "learning", ("seen.counts.get(name) == {num_tokens}", "name in seen.counts")),
        [f"{_ADAPTERS}test_layers_that_do_not_read_a_row_for_each_token_take_no_adapters"],
    ),
    "adapters_have_the_type_of_inputs": (
        change(TokenAdapters, "add", ("self._adapters[0].dtype.itemsize", "x.dtype.itemsize")),
        [f"{_ADAPTERS}test_a_token_has_the_same_bits_beside_any_adapters[hunyuan_v1_moe-bfloat16-none]"],
    ),
    "native_modules_leave_adapters_out": (
        change_everywhere(native_modules._takes_adapters, ("isinstance(part, EngineLinear)", "False")),
        [f"{_ADAPTERS}test_logits_are_those_of_peft[qwen3_moe]"],
    ),
    "experts_are_any_projection": (
        change_everywhere(adapter_files.half_tensors, ('if _EXPERTS in name.split(".")', "if False")),
        [f"{_ADAPTERS}test_an_adapter_of_experts_is_refused_in_one_sentence"],
    ),
    "counts_have_no_limit": (
        change(checkpoint, "library_config", ("0 <= count <= MAX_MODULES", "True")),
        [f"{_SETTINGS}[num_experts-num_experts is -1]"],
    ),
}
