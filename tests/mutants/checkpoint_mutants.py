"""Bugs planted in the readers of checkpoints, the cache of native kernels and the names of --model.

Each is a function that plants one with `set_attribute` (pytest's MonkeyPatch.setattr), beside tests that must fail then.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

from backend.api.checkpoint import model_files, weight_files
from backend.api.config import kv_bits
from backend.models import loader
from backend.models.linears import LinearBuilder, LinearOptions
from backend.models.tensors import TensorSource
from backend.quant import chosen_forms
from backend.text import template, tokenizer
from backend.worker import kv_fingerprint, native_tier
from deploy import model_source
from kernels.common import kv_format, rounding
from kernels.cpu import build, trust
from tests.mutants.changes import SetAttribute, change, change_everywhere, replace


def blobs_anywhere_are_a_hub_s(set_attribute: SetAttribute) -> None:
    def check(directory: Path, path: Path) -> None:
        if Path(os.path.realpath(path)).parent.name != "blobs":
            original(directory, path)

    original = model_files._check_link
    set_attribute(model_files, "_check_link", check)


def tensors_may_overlap(set_attribute: SetAttribute) -> None:
    original = weight_files._check_entry
    set_attribute(
        weight_files, "_check_entry", lambda place, entry, start: original(place, entry, entry.data_offsets[0])
    )


def a_stranger_s_library_is_loaded(set_attribute: SetAttribute) -> None:
    original = trust._distrust

    def distrust(path: Path, found: os.stat_result, is_kind: Callable[[int], bool]) -> str | None:
        return original(path, os.stat_result([*found[:4], os.geteuid(), *found[5:10]]), is_kind)

    set_attribute(trust, "_distrust", distrust)


def a_name_is_looked_up_without_a_net(set_attribute: SetAttribute) -> None:
    def existing(name: str) -> Path | None:
        path = Path(name).expanduser()
        return path if path.exists() else None

    set_attribute(model_source, "_existing", existing)


_HOSTILE = "tests/model/test_hostile_checkpoints.py::"
_TRUST = "tests/native/test_trust.py::"
_TIER_CHOICE = "tests/model/test_tier_choice.py::"
_FOUR_BITS = "tests/native/test_four_bits.py::"
_CHOSEN = "tests/quant/test_chosen_forms.py::"
_ROUNDING = "tests/native/test_rounding.py::"
_LOADING = "tests/weight_formats/test_loading.py::"
_SOURCE = "tests/deploy/test_model_source.py::"
_NAME = _SOURCE + "test_a_name_that_is_no_checkpoint_ends_in_one_sentence"


def _case(name: str, reader: str = "engine") -> str:
    return f"{_HOSTILE}test_a_hostile_checkpoint_ends_in_one_sentence[{reader}: {name}]"


# name -> (what plants it, tests that must fail)
MUTANTS = {
    "depth_of_json_not_looked_at": (
        replace(model_files, "_is_deeper", lambda content, most: False),
        [_case("config is 500 objects deep")],
    ),
    "values_have_the_bits_of_keys": (
        change_everywhere(kv_bits.kv_bits, ('KV_BITS[values or "auto"]', 'KV_BITS[keys or "auto"]')),
        [_TIER_CHOICE + "test_quantised_kv_on_the_torch_tier_takes_its_bits_and_two_halves_a_head[k8v4-6]"],
    ),
    "a_pair_of_kv_types_is_not_looked_at": (
        change_everywhere(kv_bits.kv_bits, ("not in KV_TYPES.values()", "is None")),
        [_TIER_CHOICE + "test_a_pair_of_types_that_no_kernel_has_is_refused[int4-int8]"],
    ),
    "kv_of_other_bits_has_the_same_fingerprint": (
        change(kv_fingerprint, "kv_fingerprint", (", loaded.kv_format)", ")")),
        [_TIER_CHOICE + "test_the_fingerprint_of_kv_is_of_keys_and_of_values"],
    ),
    "scales_of_values_are_one_token_further": (
        change(
            kv_format, "write_cells", ("pool.params[blocks, cells, side]", "pool.params[blocks, cells - side, side]")
        ),
        ["tests/kernels/test_kv_format.py::test_what_is_written_to_cells_is_read_from_them[k8v4]"],
    ),
    "links_may_lead_out": (
        replace(model_files, "_check_link", lambda directory, path: None),
        [_case("config leads out of the model"), _case("tokenizer leads out", "text")],
    ),
    "blobs_anywhere_are_a_hub_s": (blobs_anywhere_are_a_hub_s, [_HOSTILE + "test_blobs_count_only_beside_snapshots"]),
    "zero_points_are_those_of_symmetric_weights": (
        change(native_tier, "_in_four_bits", ("weight.zeros.T.to(torch.uint8)", "None")),
        [_FOUR_BITS + "test_four_bits_of_awq_and_gptq_are_held_as_they_are[128-True]"],
    ),
    "the_second_scale_of_qoq_is_left_out": (
        change(
            native_tier,
            "_in_four_bits",
            ("weight.group_scales.T * scales", "torch.ones_like(weight.group_scales.T) * scales"),
        ),
        [_FOUR_BITS + "test_both_scales_of_qoq_become_one[True]"],
    ),
    "the_output_head_has_four_bits": (
        change(LinearOptions, "format_of", ("if is_head and", "if False and")),
        [_LOADING + "test_a_tied_head_stays_in_eight_bits_where_other_layers_have_fewer[w4a8]"],
    ),
    "all_inputs_count_alike": (
        change(rounding, "best_scales", ("counts * q * grouped", "q * grouped")),
        [_ROUNDING + "test_inputs_that_count_more_are_rounded_better[w4a8]"],
    ),
    "the_importance_of_other_columns_is_taken": (
        change(LinearBuilder, "_quantize", ("importance[first:end]", "importance.flip(0)[first:end]")),
        ["tests/quant/test_importance.py::test_a_model_is_rounded_by_the_importance_of_each_layer_s_inputs"],
    ),
    "the_first_scale_is_taken": (
        change(rounding, "best_scales", ("explained > best", "best == 0")),
        [_ROUNDING + "test_a_rounded_weight_s_error_is_what_the_search_promises[w4a8]"],
    ),
    "minima_are_those_of_the_group_beside": (
        change(rounding, "in_blocks", ("rounded.minimum.half()", "rounded.minimum.half().roll(1, 1)")),
        [_ROUNDING + "test_blocks_stand_for_the_same_numbers[w6a8]"],
    ),
    "minima_are_added": (
        change(rounding, "floats", ("weight - rounded", "weight + rounded")),
        [_ROUNDING + "test_a_rounded_weight_s_error_is_what_the_search_promises[w6a8]"],
    ),
    "bits_go_to_layers_by_their_names": (
        change(chosen_forms, "chosen", ("(-step.gain, step.name)", "step.name")),
        [_CHOSEN + "test_bits_go_where_one_takes_most_away"],
    ),
    "the_budget_is_not_kept": (
        change(chosen_forms, "chosen", (" and step.bits <= left", "")),
        [_CHOSEN + "test_bits_go_where_one_takes_most_away"],
    ),
    "levels_count_alike": (
        change(rounding, "best_ranges", ("(counts * q * x)", "(q * x)")),
        [_ROUNDING + "test_inputs_that_count_more_are_rounded_better[w6a8]"],
    ),
    "a_byte_too_many_is_read": (
        change(model_files, "find_file", ("st_size > most_bytes", "st_size > most_bytes + 1")),
        [_HOSTILE + "test_a_file_may_be_as_long_as_the_limit_and_no_longer"],
    ),
    "an_index_may_name_paths": (
        replace(weight_files, "_shard_names", lambda index: sorted(set(index["weight_map"].values()))),
        [_case("index goes up"), _case("index is absolute")],
    ),
    "tensors_may_overlap": (tensors_may_overlap, [_case("overlapping offsets")]),
    "the_header_s_length_is_believed": (
        replace(
            weight_files,
            "_header_bytes",
            lambda file, first, num_bytes: int.from_bytes(first, "little") & (1 << 40) - 1,
        ),
        [_case("header beyond the file"), _case("header of a gigabyte")],
    ),
    "layers_are_not_counted": (
        replace(loader, "check_layers", lambda config, tensors: None),
        [_case("a layer too few")],
    ),
    "eos_ids_beyond_the_vocabulary": (
        replace(loader, "check_eos_ids", lambda ids, config, name: ids),
        [_case("eos id of the generation config is beyond the vocabulary")],
    ),
    "scales_may_be_nan": (
        replace(TensorSource, "take_scales", TensorSource.take_raw),
        [_case("awq with scales that are NaN"), _case("awq with infinite scales")],
    ),
    "memory_before_the_shape_is_checked": (
        replace(TensorSource, "check_shape", lambda self, name, shape: None),
        [_HOSTILE + "test_int8_of_a_projection_that_is_too_small_takes_no_memory_first"],
    ),
    "a_tokenizer_s_settings_are_believed": (
        replace(tokenizer, "_check_config", lambda config, name: None),
        [_case("split_special_tokens is no", "text")],
    ),
    "a_template_s_constants_are_computed": (
        replace(
            template._CodeGenerator,
            "_output_child_to_const",
            template.jinja2.compiler.CodeGenerator._output_child_to_const,
        ),
        [_HOSTILE + "test_a_template_s_constants_are_not_computed_while_it_is_loaded"],
    ),
    "a_stranger_s_library_is_loaded": (
        a_stranger_s_library_is_loaded,
        [
            _TRUST + "test_a_cache_of_another_user_is_not_used",
            _TRUST + "test_a_library_of_another_user_is_compiled_again",
        ],
    ),
    "a_group_may_write_the_cache": (
        replace(trust, "WRITABLE_BY_OTHERS", stat.S_IWOTH),
        [_TRUST + "test_a_cache_that_others_may_write_is_not_used[504]"],
    ),
    "entries_are_opened_through_links": (
        replace(build, "open_trusted", lambda path: path.open("rb")),
        [_TRUST + "test_a_link_in_the_place_of_a_library_is_not_followed"],
    ),
    "a_cache_is_made_as_the_umask_says": (
        replace(build, "make_private_directory", lambda directory: directory.mkdir(parents=True, exist_ok=True)),
        [
            f"{_TRUST}test_whatever_the_umask_the_cache_is_private_and_the_library_writable_by_none_else[{umask}]"
            for umask in (0o000, 0o022)
        ],
    ),
    "the_sticky_bit_is_not_asked_for": (
        replace(trust.stat, "S_ISVTX", 0o777),
        [_TRUST + "test_a_directory_above_that_everybody_may_write_needs_the_sticky_bit"],
    ),
    "hub_ids_may_hold_dots": (
        replace(model_source, "HUB_ID", re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")),
        [_NAME + "[other/..-there is no such directory]"],
    ),
    "a_name_is_looked_up_without_a_net": (
        a_name_is_looked_up_without_a_net,
        [_NAME + "[~no-such-user-here/model-there is no such user]"],
    ),
}
