"""Bugs planted in the readers of GGUF files and of checkpoints: what all test models have alike, and what another row has."""

from __future__ import annotations

from typing import Any

from backend.api.checkpoint import gguf as header
from backend.api.checkpoint import hub
from backend.api.checkpoint.gguf_parts import merged
from backend.architectures import common, rope
from backend.architectures.gguf import config as gguf_config
from backend.architectures.gguf import settings as gguf_settings
from backend.architectures.gguf.held import held_forms
from backend.executor import served_engine
from backend.models import compressed_tensors, gguf, gguf_blocks
from backend.quant import checkpoint
from backend.text import gguf_sentencepiece, gguf_tokenizer, tokenizer
from compat.llm import worker
from deploy import model_source
from kernels.common import super_blocks
from tests.mutants.changes import Plant, SetAttribute, change, change_everywhere, replace

_MODEL, _TEXT = "tests/model/test_gguf.py::", "tests/text/test_gguf_tokenizer.py::"
_KINDS = "tests/text/test_gguf_kinds.py::"
_SUPER = "tests/native/test_super_blocks.py::"
_HUB = "tests/api/test_hub.py::"
_PARTS = "tests/model/test_gguf_parts.py::"
_SERVED = "tests/model/test_gguf_served.py::"
_VALUES = _MODEL + "test_blocks_have_the_values_of_llama_cpp_s_own_package_bit_for_bit"
_FAMILY = _MODEL + "test_a_float32_file_has_the_logits_of_the_checkpoint_it_was_made_of"


def _case(name: str, reader: str = "engine") -> str:
    return f"tests/model/test_hostile_checkpoints.py::test_a_hostile_checkpoint_ends_in_one_sentence[{reader}: gguf: {name}]"


def only_one_token_ends_a_text(set_attribute: SetAttribute) -> None:
    def where_it_is_used(owner: object, name: str, planted: Any) -> None:
        set_attribute(tokenizer, name, planted)

    change(header, "eos_ids", ("*spoken.values()", ""))(where_it_is_used)


_SETTINGS = "tests/model/test_gguf_settings.py::"
_ZEROS = "tests/weight_formats/test_zero_points.py::"
READER_VALUES = "tests/model/test_config_values.py::"
_REFUSED = _SETTINGS + "test_a_setting_that_changes_what_a_model_computes_is_refused"


def forgotten(key: str) -> Plant:
    """The GGUF setting `key` is not looked at."""

    def plant(set_attribute: SetAttribute) -> None:
        others = {name: values for name, values in gguf_settings._NEUTRAL.items() if name != key}
        set_attribute(gguf_settings, "_NEUTRAL", others)

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

MUTANTS = {
    "nibbles_in_the_other_order": (
        change(gguf_blocks, "_halves", ("[q & 15, q >> 4]", "[q >> 4, q & 15]")),
        [_VALUES + "[Q4_0]", _VALUES + "[Q5_1]", _VALUES + "[Q4_K]"],
    ),
    "six_bits_are_not_centred": (
        replace(super_blocks, "FORMS", super_blocks.FORMS | {"Q6_K": super_blocks.FORMS["Q6_K"]._replace(centre=31)}),
        [_VALUES + "[Q6_K]"],
    ),
    "minima_are_lost_in_a_mixed_layer": (
        change(super_blocks, "_k_mix", ("if part.minima is not None:", "if False:")),
        [_SUPER + "test_rows_of_several_kinds_are_one_layer[kinds0-k mix]"],
    ),
    "an_embedding_in_blocks_is_floats": (
        change_everywhere(held_forms, ("_linear_layers(header, holds_super_blocks)", "_linear_layers(header, False)")),
        [_MODEL + "test_a_head_that_is_the_embedding_is_held_in_its_super_blocks"],
    ),
    "rows_of_q_and_k_stay_in_pairs": (
        replace(gguf, "meta_to_hf", lambda tensor, heads: tensor),
        [_FAMILY + "[llama2]", _FAMILY + "[mistral]"],
    ),
    "one_projection_decides_for_its_layer": (
        change_everywhere(held_forms, ("types <= INT8 and", "types & INT8 and")),
        [_MODEL + "test_a_layer_keeps_its_integers_if_all_projections_of_it_can"],
    ),
    "a_part_is_taken_for_the_whole": (
        change_everywhere(merged, ("not in (None, 0, 1)", "is not said")),
        [_case("a part of no number")],
    ),
    "parts_come_in_any_order": (
        change_everywhere(merged, ("(NUMBER, number), ", "")),
        [_case("parts in another order"), _case("a part twice")],
    ),
    "tensors_of_all_parts_are_read_from_the_first": (
        change(gguf.GgufTensors, "_bytes", ("place.path.open", "self.header.path.open")),
        [_PARTS + "test_any_part_or_their_directory_names_the_model[]"],
    ),
    "one_part_tells_checkpoints_apart": (
        replace(served_engine, "parts_of", lambda file: (file,)),
        [_PARTS + "test_each_part_is_seen_by_what_tells_checkpoints_apart"],
    ),
    "a_program_takes_the_target_of_a_link": (
        change(worker.GenerationExecutorProxy, "start_engine", (".absolute()", ".resolve()")),
        [_PARTS + "test_an_engine_of_its_own_is_given_the_name_of_a_link"],
    ),
    "a_hub_s_patterns_are_names": (
        change_everywhere(hub.fetch, ("glob.escape(name)", "name")),
        [_HUB + "test_the_launcher_and_a_program_fetch_that_file_alone[:q4_0-a[1]-Q4_0.gguf-resolve_model]"],
    ),
    "another_quantisation_of_the_cache_is_as_good": (
        change_everywhere(hub.gguf_files, ("len(models) == 1 and not quantisation", "models")),
        [_HUB + "TestWithoutNetwork::test_another_quantisation_is_not_there"],
    ),
    "a_quantisation_is_any_text_of_a_name": (
        change_everywhere(hub._of_quantisation, ('rf".*[-./]{word}[-./].*"', 'rf".*{word}.*"')),
        [_HUB + "test_a_name_that_means_none_or_several_is_told_what_there_is[0-names2-of 0; put]"],
    ),
    "a_checkpoint_is_fetched_with_all_gguf_files": (
        replace(hub, "CHECKPOINT", ("*",)),
        [_HUB + "test_a_checkpoint_is_fetched_without_its_gguf_files"],
    ),
    "unknown_words_are_gpt_2_s": (
        change(
            gguf_tokenizer,
            "_pre_tokenizer",
            ("if name not in PRE_TOKENIZERS:", "if False:"),
            ("PRE_TOKENIZERS[name]", 'PRE_TOKENIZERS.get(name, PRE_TOKENIZERS["gpt-2"])'),
        ),
        [_TEXT + "test_unknown_words_are_refused_by_name"],
    ),
    "spaces_behind_phi_3_s_tokens_stay": (
        change(gguf_tokenizer, "_spaces_of", ('"phi3"', '"phi4"')),
        [_KINDS + "test_spaces_behind_a_token_are_part_of_it_in_phi_3"],
    ),
    "words_of_any_length_are_known": (
        replace(gguf_tokenizer, "MAX_WORD", 1000),
        [_KINDS + "test_wordpiece_gives_the_ids_of_transformers"],
    ),
    "a_map_of_characters_is_taken_as_it_is": (
        replace(gguf_sentencepiece, "check_charsmap", lambda values, name: bytes(values)),
        [_case("a map that leads out", "text")],
    ),
    "only_one_token_ends_a_text": (only_one_token_ends_a_text, [_TEXT + "test_all_tokens_that_end_a_text_do"]),
    "a_file_is_no_model": (
        replace(model_source, "_gguf", lambda name, path: None),
        [_SERVED + "test_the_launcher_takes_the_file_or_its_directory[False]"],
    ),
    "the_tokenizer_is_not_written": (
        replace(checkpoint, "_write_text_files", lambda header, folder: None),
        [_SERVED + "test_quantize_writes_a_checkpoint_with_the_tokenizer_of_the_file"],
    ),
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
        change_everywhere(common.read_block, ('settings.get("rms_norm_eps", Epsilon, eps)', "eps")),
        [READER_VALUES + "test_each_number_of_a_config_json_reaches_the_model"],
    ),
    "norms_of_files_add_what_most_models_do": (
        change_everywhere(gguf_config.config_of, ('settings.need(f"attention.{epsilon}", Epsilon)', "1e-6")),
        [_SETTINGS + "test_the_number_below_the_root_of_a_norm_is_the_file_s"],
    ),
    "scaled_positions_have_the_usual_base": (
        change(
            rope,
            "_rope",
            ("RopeConfig(**common, kind=kind, factor=section", "RopeConfig(10000.0, kind=kind, factor=section"),
        ),
        [READER_VALUES + "test_the_base_of_rotary_positions_is_read_wherever_it_stands"],
    ),
    "a_frequency_of_llama_3_is_the_other_one": (
        change(
            rope,
            "_scaled",
            ('low_freq_factor=section.need("low_', 'low_freq_factor=section.need("high_'),
        ),
        [READER_VALUES + "test_each_number_of_llama_3_s_scaling_has_its_place"],
    ),
}
