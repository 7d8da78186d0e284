"""Planted bugs of models that transformers runs: parts that the library computes otherwise, and tokens that depend on others."""

from __future__ import annotations

from backend.hosted import attention, checkpoint, experts, layers, masks, products
from backend.worker import hosted_tier
from tests.mutants.changes import Plant, change, change_everywhere

_AGREES = "tests/hosted/test_families.py::test_logits_are_those_of_transformers"
_ALONE = "tests/hosted/test_families.py::test_a_token_does_not_depend_on_chunks_neighbours_or_evictions"
_SETTINGS = "tests/hosted/test_checkpoints.py::test_a_wrong_setting_is_one_sentence"

MUTANTS: dict[str, tuple[Plant, list[str]]] = {
    "windows_are_what_modules_name": (
        change_everywhere(masks.window_of, ("if mask is None:", "if True:")),
        [f"{_AGREES}[phimoe]"],
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
    "routers_multiply_by_torch": (
        change(
            products.Products,
            "_multiply",
            ("y: Tensor = layer(x)", "y = x.new_zeros(*x.shape[:-1], layer.out_features)"),
        ),
        [f"{_AGREES}[qwen3_moe]"],
    ),
    "long_factors_depend_on_the_batch": (
        change(checkpoint, "_check_positions", ("limit > original", "False")),
        [_SETTINGS],
    ),
    "counts_have_no_limit": (
        change(checkpoint, "library_config", ("0 <= count <= MAX_MODULES", "True")),
        [f"{_SETTINGS}[num_experts-num_experts is -1]"],
    ),
}
