"""Planted bugs of the second level of KV that single tests notice. Others: tests/simulation/level_mutants.py."""

from __future__ import annotations

from backend.core import kept_block
from backend.core.kept_block import BlockRecord, RecordFormat
from backend.engine import level_threads
from backend.engine.level_rates import LevelRates
from backend.engine.level_threads import LevelThreads
from backend.engine.level_traffic import LevelTraffic
from backend.kvcache.second_level import SecondLevel
from backend.storage import block_file
from backend.storage.block_file import BlockFile
from backend.worker.group import InProcessWorkerGroup
from deploy import kv_directory
from tests.mutants.changes import Plant, change, change_everywhere

FILE = ["tests/core/test_block_file.py"]
ENGINE = ["tests/engine/test_second_level.py"]
RATES = ["tests/engine/test_level_rates.py"]
THREADS = ["tests/engine/test_level_threads.py"]
HOSTILE = ["tests/engine/test_hostile_blocks.py"]

# name -> (what plants it, tests that must fail)
MUTANTS: dict[str, tuple[Plant, list[str]]] = {
    "a_record_has_no_checksum": (
        change(RecordFormat, "decode", ("record[end : end + _CHECKSUM_BYTES] != checksum_of(body)", "False")),
        FILE,
    ),
    "kv_has_no_checksum": (
        change(RecordFormat, "check", ("checksum_of(data) == kept.checksum", "True")),
        HOSTILE,
    ),
    "the_model_of_a_block_is_not_compared": (
        change(RecordFormat, "check", ("kept.block[:2] != wanted[:2]", "False")),
        FILE,
    ),
    "the_tokens_of_a_block_are_not_compared": (
        change(RecordFormat, "check", ("kept.block != wanted", "False")),
        FILE,
    ),
    "a_key_forgets_what_is_before_it": (
        change(BlockRecord, "key", ("self.prefix + ", "")),
        FILE,
    ),
    "the_namespace_is_no_part_of_the_chain": (
        change_everywhere(kept_block.root_of, ("fingerprint + namespace", "fingerprint")),
        FILE,
    ),
    "a_file_is_not_locked": (
        change_everywhere(block_file._locked, ("fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)", "pass")),
        FILE,
    ),
    "a_block_is_forgotten_wherever_it_lies": (
        change(SecondLevel, "forget", ("self._places.get(block.key) == block.place", "block.key in self._places")),
        ["tests/kvcache/test_second_level.py"],
    ),
    "links_to_files_are_followed": (
        change_everywhere(block_file._locked, (" | os.O_NOFOLLOW", "")),
        FILE,
    ),
    "files_that_others_may_read_are_used": (
        change_everywhere(block_file._locked, ("not status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)", "True")),
        FILE,
    ),
    "a_file_in_use_is_removed": (
        change_everywhere(block_file._remove_others, ("descriptor is not None", "True")),
        FILE,
    ),
    "files_of_other_models_stay": (
        change_everywhere(block_file._remove_others, ("path.unlink()", "pass")),
        FILE,
    ),
    "a_file_of_another_form_is_read": (
        change(BlockFile, "_has_header", ("is_whole and ", "True or ")),
        FILE,
    ),
    "a_file_is_longer_than_its_bound": (
        change_everywhere(block_file.num_places, ("max_bytes - HEADER_BYTES", "max_bytes")),
        FILE,
    ),
    "a_block_is_written_at_every_use": (
        change(SecondLevel, "_note", ("if key in self._places:", "if False:")),
        ENGINE,
    ),
    "a_prompt_is_written_at_its_first_use": (
        change(SecondLevel, "note_release", ("if rests else min(lost, seq.num_computed_tokens)", "")),
        ENGINE,
    ),
    "what_was_lost_is_not_written_at_its_second_use": (
        change(SecondLevel, "note_admission", ("if grant.lost:", "if False:")),
        ENGINE,
    ),
    "sessions_that_rest_are_not_written": (
        change(SecondLevel, "note_release", ("if rests else", "if False else")),
        ENGINE,
    ),
    "priorities_are_ignored": (
        change(SecondLevel, "take_offloads", ("block.priority >= self._min_priority", "True")),
        ENGINE,
    ),
    "the_head_of_a_prefix_goes_first": (
        change(SecondLevel, "_note", ("zip(reversed(inside), reversed(records))", "zip(inside, records)")),
        ENGINE,
    ),
    "a_place_that_is_read_is_given_away": (
        change(SecondLevel, "_take_place", ("if place not in self._readers", "if True")),
        ENGINE,
    ),
    "an_engine_forgets_what_the_one_before_has_left": (
        change(SecondLevel, "open", ("self._places[kept.block.key] = place", "pass")),
        ENGINE,
    ),
    "onboard_blocks_is_ignored": (
        change(LevelTraffic, "holds_back", ("not self._onboards or", "")),
        ENGINE,
    ),
    "a_stall_is_not_remembered": (
        change(LevelTraffic, "_gives_up", ("self._is_stalled = True", "pass")),
        ENGINE,
    ),
    "a_stall_is_never_over": (
        change(LevelTraffic, "_note_progress", ("), False", "), self._is_stalled")),
        ENGINE,
    ),
    "what_has_arrived_is_thrown_away": (
        change(LevelTraffic, "_land", ("if load.data else", "if len(load.data) == len(load.blocks) else")),
        ENGINE,
    ),
    "a_slow_load_is_waited_for": (
        change(LevelTraffic, "_gives_up", ("limit_s is None or", "True or")),
        ENGINE,
    ),
    "loading_may_be_slower_than_computing": (
        change(LevelRates, "num_to_load", ("<= MARGIN * all_computed", "<= all_computed")),
        RATES,
    ),
    "the_queue_of_loads_does_not_count": (
        change(LevelRates, "num_to_load", ("begins + count * one", "count * one")),
        RATES,
    ),
    "the_queue_of_prompts_does_not_count": (
        change(LevelRates, "num_to_load", ("prefill * queued_tokens", "0.0")),
        RATES,
    ),
    "a_slow_level_is_never_tried_again": (
        change(LevelRates, "num_to_load", ("is_old and not queued_bytes", "False")),
        RATES,
    ),
    "an_error_of_the_disk_ends_its_thread": (
        change_everywhere(level_threads.read_one, ("except OSError as error", "except ZeroDivisionError as error")),
        THREADS,
    ),
    "a_full_queue_is_waited_for": (
        change_everywhere(level_threads._put, ("waiting.put_nowait(item)", "waiting.put(item, timeout=5)")),
        THREADS,
    ),
    "a_thread_sleeps_for_ever_after_a_stall": (
        change(LevelThreads, "_items", ("not (self._is_closed and waiting.empty())", "True")),
        THREADS,
    ),
    "the_fingerprint_is_left_out_with_a_level_alone": (
        change(InProcessWorkerGroup, "_moves_kv", (" or self._kv_cache.has_second_level", "")),
        ["tests/model/test_second_level.py"],
    ),
    "doctor_follows_links": (
        change_everywhere(kv_directory.look_at, (" | os.O_NOFOLLOW", "")),
        ["tests/deploy/test_kv_directory.py"],
    ),
}  # fmt: skip
