"""Planted bugs of the families: settings that are read wrong, ignored, or computed otherwise than transformers computes them."""

from __future__ import annotations

from backend.architectures import common, gemma, layer_norm, llama, post_norm, rope, settings
from backend.architectures.settings import Settings
from backend.layers import rotary
from backend.models import decoder, lora
from backend.models.convert import QkvByHead
from tests.mutants.changes import Plant, change, change_everywhere

_AGREES = "tests/families/test_transformers.py::test_a_family_agrees_with_transformers"
_SETTINGS = "tests/families/test_settings.py"
_ROPES = "tests/families/test_ropes.py"


def _torch(name: str) -> list[str]:
    return [f"{_AGREES}[torch-{name}]"]


MUTANTS: dict[str, tuple[Plant, list[str]]] = {
    "unknown_keys_are_ignored": (change(settings, "is_harmless", ("value is None or", "True or")), [_SETTINGS]),
    "keys_that_are_off_are_refused": (change(settings, "is_harmless", ("value is False or", "")), [_SETTINGS]),
    "a_value_that_is_not_supported_is_taken": (change(Settings, "only", ("not in values", "in ()")), [_SETTINGS]),
    "granite_multiplies_logits": (
        change_everywhere(llama.granite_factors, ("1 / settings", "settings")),
        _torch("granite"),
    ),
    "queries_of_gemma_are_scaled_by_the_head": (
        change(gemma, "_scaled", ("** -0.5", "* 0 + 16**-0.5")),
        _torch("gemma 2"),
    ),
    "gemma_3_has_one_rope": (change_everywhere(gemma.gemma3, ("sliding=1", "sliding=0")), _torch("gemma 3")),
    "norms_of_olmo_are_of_heads": (
        change_everywhere(post_norm.olmo2, ('"row"', '"none"')),
        ["tests/families/test_transformers.py::test_a_family_agrees_with_transformers[torch-olmo 2]"],
    ),
    "all_layers_of_exaone_rotate": (
        change_everywhere(post_norm.exaone4, ("full=0 if window is None else None", "full=0")),
        _torch("exaone 4"),
    ),
    "command_r_rotates_halves": (
        change(layer_norm, "_cohere", ("rope_interleaved=True", "rope_interleaved=False")),
        _torch("command r"),
    ),
    "layers_of_smollm_all_rotate": (change_everywhere(llama.smollm3, ("0 if turn else None", "0")), _torch("smollm3")),
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
    "rows_of_neox_stay_as_they_are": (change(QkvByHead, "__getitem__", ("if not name", "if name")), _torch("gpt-neox")),
    "the_factor_of_embeddings_is_not_rounded": (
        change(decoder, "_rounded", (".to(dtype)", "")),
        ["tests/families/test_settings.py::test_the_factor_of_gemma_s_embedding_is_one_of_the_model_s_type"],
    ),
    "gate_and_up_are_one_projection": (
        change_everywhere(
            lora.places,
            (
                '"gate_up_proj": ProjectionPlace("gate_up", 0, gate + inter',
                '"gate_up_proj": ProjectionPlace("gate_up", 0, inter',
            ),
        ),
        ["tests/families/test_adapters.py::test_a_family_s_adapter_does_what_peft_does[torch-phi-4-mini short]"],
    ),
}
