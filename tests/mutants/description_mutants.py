"""Bugs planted in what a decoder computes of its description, and in what quantising folds into it."""

from __future__ import annotations

from backend.layers import activation, attention, norm, rotary
from backend.models.decoder import Decoder
from backend.quant import smoothing
from kernels import kv_append, rope
from kernels import norm as norm_kernel
from kernels.common import scoring
from tests.mutants.changes import change, change_everywhere

FORMULAS = ["tests/model/test_description.py"]
FOLDS = ["tests/quant/test_descriptions.py"]

MUTANTS = {
    "logits_are_scaled_after_the_cap": (
        change(
            Decoder,
            "_logits",
            ("logits.float() * block.logit_scale", "logits.float()"),
            ("scaled.to(", "(scaled * block.logit_scale).to("),
        ),
        FORMULAS,
    ),
    "what_the_mlp_puts_out_is_not_normed": (
        change(Decoder, "_sequential", ("layer.mlp_out_norm", "None")),
        FORMULAS,
    ),
    "the_last_layer_is_not_scaled": (change_everywhere(norm.add, ("alpha=block.residual_scale", "alpha=1")), FORMULAS),
    "norms_have_no_bias": (change(norm, "_arguments", ("weights.bias", "None")), FORMULAS),
    "a_norm_s_mean_stays": (change(norm_kernel, "reference", ("if centred:", "if False:")), FORMULAS),
    "rows_of_heads_are_normed_head_by_head": (
        change(
            attention,
            "_with_norms",
            ("(-1, len(weight))", "(-1, pool.head_dim)"),
            ("NormWeights(weight)", "NormWeights(weight[: pool.head_dim])"),
        ),
        FORMULAS,
    ),
    "every_mlp_has_a_gate_of_silu": (
        change_everywhere(activation.activate, ("given, block.activation", "given, 'silu'")),
        FORMULAS,
    ),
    "neighbours_turn_with_the_wrong_sign": (
        change(rope, "rope_factors", ("torch.stack((-sin, sin)", "torch.stack((sin, -sin)")),
        FORMULAS,
    ),
    "the_rest_of_a_head_is_lost": (change(rope, "reference", ("(rotated, rest)", "(rotated, 0 * rest)")), FORMULAS),
    "queries_have_the_scale_of_the_first_position": (
        change(kv_append, "reference", ("query * query_scales[positions, None, None]", "query * query_scales[0]")),
        FORMULAS,
    ),
    "queries_grow_one_position_late": (
        change_everywhere(
            rotary.query_scales, ("// scaling.original_max_position", "// (scaling.original_max_position + 1)")
        ),
        FORMULAS,
    ),
    "scores_are_capped_before_they_are_scaled": (
        change_everywhere(scoring.attend, ("k.float()[:, :, None].mT * scale", "k.float()[:, :, None].mT")),
        FORMULAS,
    ),
    "a_sink_has_no_weight": (change_everywhere(scoring.attend, ("(scores, sinks)", "(scores, sinks - 99)")), FORMULAS),
    "neighbours_have_scales_of_their_own": (
        change(smoothing, "_turned_together", ("pairs.repeat_interleave(2)", "pairs.repeat(2)")),
        FOLDS,
    ),
}
