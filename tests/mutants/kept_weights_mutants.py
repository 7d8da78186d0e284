"""Bugs planted in how packed weights are kept and found again. Each function plants one with `set_attribute`."""

from __future__ import annotations

from backend.worker import fingerprint, kept_parts, packed_model, weight_cache
from backend.worker.group import InProcessWorkerGroup
from tests.mutants.changes import Plant, change, change_everywhere

_MODELS = "tests/native/kept_weights/test_mapped_models.py::"
_FILES = "tests/native/kept_weights/test_files.py::"
_HOSTILE = _FILES + "test_what_was_not_written_so_is_told_in_one_line_and_made_anew"
_CONTENT = _MODELS + "test_other_content_is_another_entry_whatever_its_times_say"

# name -> (what plants it, tests that must fail)
MUTANTS: dict[str, tuple[Plant, list[str]]] = {
    "a_file_is_known_by_its_time_of_change_alone": (
        change(fingerprint, "state_of", ("s.st_mtime_ns, s.st_ctime_ns", "s.st_mtime_ns, 0")),
        [_CONTENT + "[True]"],
    ),
    "content_that_has_just_changed_is_noted": (
        change_everywhere(fingerprint.content_hash, ("> SETTLED_S", "> 0.0")),
        [_FILES + "test_there_is_no_note_of_a_file_that_has_just_changed"],
    ),
    "the_format_is_no_part_of_the_key": (
        change(packed_model.PackedModels, "_key", ("self._dtype, held, ", "self._dtype, ")),
        [_MODELS + "test_other_formats_descriptions_and_kernels_are_other_entries"],
    ),
    "a_file_of_anybody_is_mapped": (
        change(weight_cache.WeightCache, "find", ("open_trusted(path)", 'path.open("rb")')),
        [_HOSTILE + "[others may write]"],
    ),
    "biases_are_forgotten": (
        change_everywhere(kept_parts._named, ("if part is not None", "if part is not None and index < 4")),
        [_MODELS + "test_what_is_mapped_computes_the_bits_of_what_is_packed[w8a8]"],
    ),
    "mapped_weights_count_as_free_memory": (
        change(InProcessWorkerGroup, "free_memory_bytes", ("- mapped", "- 0")),
        [_FILES + "test_mapped_weights_do_not_count_as_free_memory"],
    ),
}
