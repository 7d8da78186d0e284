"""Bugs planted in the reader of GGUF files. Each function plants one with `set_attribute`, beside tests that must fail then."""

from __future__ import annotations

from typing import Any

from backend.api.checkpoint import gguf as header
from backend.architectures.gguf_held import held_forms
from backend.models import gguf, gguf_blocks
from backend.quant import checkpoint
from backend.text import gguf_tokenizer, tokenizer
from deploy import model_source
from kernels.common import super_blocks
from tests.mutants.changes import SetAttribute, change, change_everywhere, replace

_MODEL, _TEXT = "tests/model/test_gguf.py::", "tests/text/test_gguf_tokenizer.py::"
_SUPER = "tests/native/test_super_blocks.py::"
_SERVED = "tests/model/test_gguf_served.py::"
_VALUES = _MODEL + "test_blocks_have_the_values_of_llama_cpp_s_own_package_bit_for_bit"
_FAMILY = _MODEL + "test_a_float32_file_has_the_logits_of_the_checkpoint_it_was_made_of"


def _case(name: str, reader: str = "engine") -> str:
    return f"tests/model/test_hostile_checkpoints.py::test_a_hostile_checkpoint_ends_in_one_sentence[{reader}: gguf: {name}]"


def only_one_token_ends_a_text(set_attribute: SetAttribute) -> None:
    def where_it_is_used(owner: object, name: str, planted: Any) -> None:
        set_attribute(tokenizer, name, planted)

    change(header, "eos_ids", ("*spoken", ""))(where_it_is_used)


# name -> (what plants it, tests that must fail)
MUTANTS = {
    "nibbles_in_the_other_order": (
        change(gguf_blocks, "_halves", ("[q & 15, q >> 4]", "[q >> 4, q & 15]")),
        [_VALUES + "[Q4_0]", _VALUES + "[Q5_1]", _VALUES + "[Q4_K]"],
    ),
    "six_bits_are_not_centred": (
        replace(super_blocks, "_CENTRE", super_blocks._CENTRE | {"Q6_K": 31}),
        [_VALUES + "[Q6_K]"],
    ),
    "minima_are_lost_in_a_mixed_layer": (
        change(super_blocks, "_mixed", ("if part.minima is not None:", "if False:")),
        [_SUPER + "test_rows_of_all_kinds_are_one_layer"],
    ),
    "a_tied_head_of_super_blocks_is_floats": (
        change_everywhere(held_forms, ("in SUPER_BLOCKS else {}", "in () else {}")),
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
        change(header._Reader, "header", ("not in (None, 0, 1)", "is not parts")),
        [_case("a part of several")],
    ),
    "unknown_words_are_gpt_2_s": (
        change(
            gguf_tokenizer,
            "_byte_level",
            ("if name not in PRE_TOKENIZERS:", "if False:"),
            ("PRE_TOKENIZERS[name]", 'PRE_TOKENIZERS.get(name, PRE_TOKENIZERS["gpt-2"])'),
        ),
        [_TEXT + "test_unknown_words_are_refused_by_name"],
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
}
