"""Bugs planted in the reader of GGUF files. Each function plants one with `set_attribute`, beside tests that must fail then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from backend.api.checkpoint import gguf as header
from backend.architectures.gguf_held import held_forms
from backend.layers import rotary
from backend.models import gguf, gguf_blocks, gguf_config
from backend.quant import checkpoint
from backend.text import gguf_tokenizer, tokenizer
from deploy import model_source
from kernels.common import super_blocks
from tests.mutants.changes import change, change_everywhere

SetAttribute = Callable[[object, str, Any], None]

_MODEL, _TEXT = "tests/model/test_gguf.py::", "tests/text/test_gguf_tokenizer.py::"
_SUPER = "tests/native/test_super_blocks.py::"
_SERVED = "tests/model/test_gguf_served.py::"
_VALUES = _MODEL + "test_blocks_have_the_values_of_llama_cpp_s_own_package_bit_for_bit"
_FAMILY = _MODEL + "test_a_float32_file_has_the_logits_of_the_checkpoint_it_was_made_of"
_IDS = _TEXT + "test_byte_level_bpe_gives_the_ids_and_texts_of_the_tokenizer_it_was_made_of"


def _case(name: str, reader: str = "engine") -> str:
    return f"tests/model/test_hostile_checkpoints.py::test_a_hostile_checkpoint_ends_in_one_sentence[{reader}: gguf: {name}]"


def nibbles_in_the_other_order(set_attribute: SetAttribute) -> None:
    change(gguf_blocks, "_halves", ("[q & 15, q >> 4]", "[q >> 4, q & 15]"))(set_attribute)


def the_last_minima_lose_two_bits(set_attribute: SetAttribute) -> None:
    change(gguf_blocks, "_scales_and_minima", ("(last >> 4) | (middle >> 2 & 48)", "last >> 4"))(set_attribute)


def six_bits_are_not_centred(set_attribute: SetAttribute) -> None:
    set_attribute(super_blocks, "_CENTRE", super_blocks._CENTRE | {"Q6_K": 31})


def minima_are_lost_in_a_mixed_layer(set_attribute: SetAttribute) -> None:
    change(super_blocks, "_mixed", ("if part.minima is not None:", "if False:"))(set_attribute)


def a_tied_head_of_super_blocks_is_floats(set_attribute: SetAttribute) -> None:
    change_everywhere(held_forms, ("in SUPER_BLOCKS else {}", "in () else {}"))(set_attribute)


def super_blocks_go_to_layers_that_do_not_take_them(set_attribute: SetAttribute) -> None:
    change_everywhere(held_forms, ("types <= SUPER_BLOCKS and holds_super_blocks", "types <= SUPER_BLOCKS"))(
        set_attribute
    )


def rows_of_q_and_k_stay_in_pairs(set_attribute: SetAttribute) -> None:
    set_attribute(gguf, "meta_to_hf", lambda tensor, heads: tensor)


def one_projection_decides_for_its_layer(set_attribute: SetAttribute) -> None:
    change_everywhere(held_forms, ("types <= INT8 and", "types & INT8 and"))(set_attribute)


def rope_factors_are_left_aside(set_attribute: SetAttribute) -> None:
    change(rotary, "inverse_frequencies", ("inv_freq / torch.tensor(rope.factors)", "inv_freq"))(set_attribute)


def linear_scaling_is_left_aside(set_attribute: SetAttribute) -> None:
    change(gguf_config, "_rope", ('if kind == "linear":', "if False:"))(set_attribute)


def counts_are_believed(set_attribute: SetAttribute) -> None:
    change(header._Reader, "_array", ("if count * least > self._most - self._position:", "if False:"))(set_attribute)


def tensors_may_overlap(set_attribute: SetAttribute) -> None:
    change(header._Reader, "_tensors", ("if offset != end:", "if False:"))(set_attribute)


def a_short_file_is_taken(set_attribute: SetAttribute) -> None:
    change(header._Reader, "_tensors", ("if needed > self._num_bytes:", "if False:"))(set_attribute)


def a_part_is_taken_for_the_whole(set_attribute: SetAttribute) -> None:
    change(header._Reader, "header", ("not in (None, 0, 1)", "is not parts"))(set_attribute)


def scales_may_be_nan(set_attribute: SetAttribute) -> None:
    change(gguf.GgufTensors, "_read", ("not scales.isfinite().all()", "False"))(set_attribute)


def shapes_are_not_compared(set_attribute: SetAttribute) -> None:
    change(gguf, "_check_tensors", ("place.shape != shape", "False"))(set_attribute)


def unknown_words_are_gpt_2_s(set_attribute: SetAttribute) -> None:
    change(gguf_tokenizer, "_byte_level", ("if name not in PRE_TOKENIZERS:", "if False:"),
           ("PRE_TOKENIZERS[name]", 'PRE_TOKENIZERS.get(name, PRE_TOKENIZERS["gpt-2"])'))(set_attribute)  # fmt: skip


def text_is_not_composed(set_attribute: SetAttribute) -> None:
    change(gguf_tokenizer, "_byte_level", ("if pre.is_nfc:", "if False:"))(set_attribute)


def the_lowest_score_is_merged_first(set_attribute: SetAttribute) -> None:
    change(gguf_tokenizer, "_merges", ("(-scores[index]", "(scores[index]"))(set_attribute)


def only_one_token_ends_a_text(set_attribute: SetAttribute) -> None:
    def where_it_is_used(owner: object, name: str, planted: Any) -> None:
        set_attribute(tokenizer, name, planted)

    change(header, "eos_ids", ("*spoken", ""))(where_it_is_used)


def a_file_is_no_model(set_attribute: SetAttribute) -> None:
    set_attribute(model_source, "_gguf", lambda name, path: None)


def the_tokenizer_is_not_written(set_attribute: SetAttribute) -> None:
    set_attribute(checkpoint, "_write_text_files", lambda header, folder: None)


# name -> (what plants it, tests that must fail)
MUTANTS: dict[str, tuple[Callable[[SetAttribute], None], list[str]]] = {
    plant.__name__: (plant, tests)
    for plant, tests in (
        (nibbles_in_the_other_order, [_VALUES + "[Q4_0]", _VALUES + "[Q5_1]", _VALUES + "[Q4_K]"]),
        (the_last_minima_lose_two_bits, [_VALUES + "[Q4_K]", _VALUES + "[Q5_K]"]),
        (six_bits_are_not_centred, [_VALUES + "[Q6_K]"]),
        (minima_are_lost_in_a_mixed_layer, [_SUPER + "test_rows_of_all_kinds_are_one_layer"]),
        (
            a_tied_head_of_super_blocks_is_floats,
            [_MODEL + "test_a_head_that_is_the_embedding_is_held_in_its_super_blocks"],
        ),
        (
            super_blocks_go_to_layers_that_do_not_take_them,
            [_MODEL + "test_super_blocks_stay_as_they_are_where_linear_layers_take_them"],
        ),
        (rows_of_q_and_k_stay_in_pairs, [_FAMILY + "[llama2]", _FAMILY + "[mistral]"]),
        (
            one_projection_decides_for_its_layer,
            [_MODEL + "test_a_layer_keeps_its_integers_if_all_projections_of_it_can"],
        ),
        (rope_factors_are_left_aside, [_FAMILY + "[llama3_tied_sharded]"]),
        (linear_scaling_is_left_aside, [_FAMILY + "[llama_linear_rope_no_groups]"]),
        (counts_are_believed, [_case("an array of 2^62 numbers")]),
        (tensors_may_overlap, [_case("a tensor over the one before")]),
        (a_short_file_is_taken, [_case("cut in the data")]),
        (a_part_is_taken_for_the_whole, [_case("a part of several")]),
        (scales_may_be_nan, [_case("scales that are NaN")]),
        (shapes_are_not_compared, [_case("another shape")]),
        (unknown_words_are_gpt_2_s, [_TEXT + "test_unknown_words_are_refused_by_name"]),
        (text_is_not_composed, [_IDS + "[qwen2]"]),
        (the_lowest_score_is_merged_first, [_TEXT + "test_sentencepiece_merges_the_highest_score_first"]),
        (only_one_token_ends_a_text, [_TEXT + "test_all_tokens_that_end_a_text_do"]),
        (a_file_is_no_model, [_SERVED + "test_the_launcher_takes_the_file_or_its_directory[False]"]),
        (the_tokenizer_is_not_written, [_SERVED + "test_quantize_writes_a_checkpoint_with_the_tokenizer_of_the_file"]),
    )
}
