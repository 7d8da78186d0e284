"""Bugs planted in the readers of checkpoints: what every test model has alike, what wraps, and what belongs to another row."""

from __future__ import annotations

from collections.abc import Callable

from backend.api.checkpoint import gguf as header
from backend.architectures import llama, rope
from backend.models import compressed_tensors, gguf_config
from tests.mutants.changes import Plant, SetAttribute, change

_SETTINGS = "tests/model/test_gguf_settings.py::"
_ZEROS = "tests/weight_formats/test_zero_points.py::"
_VALUES = "tests/model/test_config_values.py::"
_REFUSED = _SETTINGS + "test_a_setting_that_changes_what_a_model_computes_is_refused"


def forgotten(key: str) -> Plant:
    """The GGUF setting `key` is not looked at."""

    def plant(set_attribute: SetAttribute) -> None:
        others = {name: values for name, values in gguf_config._NEUTRAL.items() if name != key}
        set_attribute(gguf_config, "_NEUTRAL", others)

    return plant


_OTHERS: dict[str, str] = {
    "expert_count": "1",
    "logit_scale": "0.5",
    "attention.scale": "1.0",
    "attention.causal": "False",
    "attention.clamp_kqv": "1.0",
    "attention.temperature_scale": "0.1",
    "residual_scale": "0.22",
    "embedding_scale": "12.0",
    "final_logit_softcapping": "1.0",
    "attn_logit_softcapping": "1.0",
}

# name -> (what plants it, tests that must fail)
MUTANTS: dict[str, tuple[Callable[[SetAttribute], None], list[str]]] = {
    **{
        f"{key.replace('.', '_')}_is_not_looked_at": (forgotten(key), [f"{_REFUSED}[{key}-{value}]"])
        for key, value in _OTHERS.items()
    },
    "alignment_is_always_32": (
        change(header._Reader, "header", ("self._alignment(settings)", "32")),
        [_SETTINGS + "test_tensors_are_found_whatever_their_alignment[4096]"],
    ),
    "padding_of_zero_points_is_rows": (
        change(compressed_tensors.Int4Layers, "take", ("flatten(1)[:, :n].repeat", "flatten(1).repeat")),
        [_ZEROS + "test_rows_that_fill_no_whole_word_are_read_without_the_padding[9]"],
    ),
    "norms_add_what_most_models_do": (
        change(llama, "_block", ('settings.get("rms_norm_eps", Epsilon, eps)', "eps")),
        [_VALUES + "test_each_number_of_a_config_json_reaches_the_model"],
    ),
    "norms_of_files_add_what_most_models_do": (
        change(gguf_config, "config_of", ('settings.need("attention.layer_norm_rms_epsilon", Epsilon)', "1e-6")),
        [_SETTINGS + "test_the_number_below_the_root_of_a_norm_is_the_file_s"],
    ),
    "scaled_positions_have_the_usual_base": (
        change(
            rope,
            "_rope",
            ("RopeConfig(**common, kind=kind, factor=section", "RopeConfig(10000.0, kind=kind, factor=section"),
        ),
        [_VALUES + "test_the_base_of_rotary_positions_is_read_wherever_it_stands"],
    ),
    "a_frequency_of_llama_3_is_the_other_one": (
        change(
            rope,
            "_scaled",
            ('low_freq_factor=section.need("low_', 'low_freq_factor=section.need("high_'),
        ),
        [_VALUES + "test_each_number_of_llama_3_s_scaling_has_its_place"],
    ),
}
