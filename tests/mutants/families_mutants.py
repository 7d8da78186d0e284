"""Planted bugs of the families: settings that are read wrong, ignored, or computed otherwise than transformers computes them."""

from __future__ import annotations

from backend.architectures import common, deepseek, gemma, mixtures, post_norm, rope
from backend.architectures.gguf import latent as gguf_latent
from backend.architectures.settings import Settings
from backend.layers import experts, rotary
from backend.layers import latent as latent_layer
from backend.models.experts import UnstackedExperts
from backend.models.fp8 import Fp8Tensors
from backend.models.latent import AbsorbedTensors
from backend.models.mxfp4 import Mxfp4Layers
from backend.worker import native_layers
from tests.mutants.changes import Plant, change, change_everywhere

_AGREES = "tests/families/test_transformers.py::test_a_family_agrees_with_transformers"
_SETTINGS = "tests/families/test_settings.py"
_ROPES = "tests/families/test_ropes.py"


def _torch(name: str) -> list[str]:
    return [f"{_AGREES}[torch-{name}]"]


MUTANTS: dict[str, tuple[Plant, list[str]]] = {
    "the_bias_of_the_choice_is_in_the_weights": (
        change_everywhere(experts.choose, ("scores.gather(1, chosen)", "ranked.gather(1, chosen)")),
        ["tests/families/test_experts.py::test_a_bias_of_the_choice_is_not_in_the_weights"],
    ),
    "a_group_counts_by_its_best_alone": (
        change_everywhere(experts.choose, ("if settings.adds_two_best else 1", "if False else 1")),
        ["tests/families/test_experts.py::test_groups_count_by_their_best_or_by_their_two_best"],
    ),
    "gate_and_up_take_turns": (
        change(UnstackedExperts, "__getitem__", ("if place.is_interleaved else part", "if False else part")),
        [_AGREES + "[native-gpt-oss]"],
    ),
    "a_shared_expert_has_no_gate": (
        change(mixtures, "qwen2_moe", ("has_shared_gate=True", "has_shared_gate=False")),
        [_AGREES + "[native-qwen2 moe]"],
    ),
    "nibbles_of_mxfp4_change_places": (
        change(Mxfp4Layers, "take", ("(blocks & 15, blocks >> 4)", "(blocks >> 4, blocks & 15)")),
        ["tests/families/test_experts.py::test_mxfp4_experts_are_those_of_floats[torch]"],
    ),
    "keys_of_a_latent_are_not_transposed": (
        change(AbsorbedTensors, "__getitem__", (".transpose(1, 2) if part.is_keys", ".contiguous() if part.is_keys")),
        [f"{_AGREES}[native-deepseek v2 lite]"],
    ),
    "the_latent_of_queries_is_not_normed": (
        change_everywhere(native_layers.native_latent, ("_float(query_norm)", "_float(query_norm) * 0 + 1")),
        [f"{_AGREES}[native-deepseek v3]"],
    ),
    "a_latent_s_heads_see_its_rotated_key_alone": (
        change_everywhere(latent_layer.latent_attention, ("weights.keys(plain))", "weights.keys(plain) * 0)")),
        _torch("glm 4.7 flash"),
    ),
    "scores_of_long_texts_are_not_raised": (
        change_everywhere(deepseek._described, ("* read_score_factor(settings)", "")),
        [f"{_AGREES}[native-deepseek v2]"],
    ),
    "a_file_s_yarn_keeps_the_converter_s_tenth": (
        change(gguf_latent, "log_factor", ("/ _LOG_FACTOR", "* 1.0")),
        ["tests/families/test_gguf_latent.py"],
    ),
    "blocks_of_fp8_are_as_wide_as_they_are_high": (
        change(Fp8Tensors, "_spread", ("torch.arange(k) // columns", "torch.arange(k) // rows % scale.shape[1]")),
        ["tests/weight_formats/test_fp8.py"],
    ),
    "a_value_that_is_not_supported_is_taken": (change(Settings, "only", ("not in values", "in ()")), [_SETTINGS]),
    "queries_of_gemma_are_scaled_by_the_head": (
        change(gemma, "_scaled", ("** -0.5", "* 0 + 16**-0.5")),
        _torch("gemma 2"),
    ),
    "norms_of_olmo_are_of_heads": (
        change_everywhere(post_norm.olmo2, ('"row"', '"none"')),
        ["tests/families/test_transformers.py::test_a_family_agrees_with_transformers[torch-olmo 2]"],
    ),
    "windows_are_where_none_is": (
        change_everywhere(common.windowed, ("if has_window", "if not has_window")),
        _torch("gemma 2"),
    ),
    "yarn_has_no_factor": (change(rope, "_scaled", ("_yarn_attention(section, factor)", "1.0")), [_ROPES]),
    "borders_of_yarn_are_not_rounded": (change(rotary, "_yarn", ("if rope.truncate", "if False")), [_ROPES]),
    "longrope_is_always_long": (
        change_everywhere(rotary.inverse_frequencies, ("if num_positions > rope.original_max_position", "if True")),
        [_ROPES],
    ),
}
