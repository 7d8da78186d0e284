"""Planted bugs of the second level of KV that single tests notice. Others: tests/simulation/level_mutants.py."""

from __future__ import annotations

from backend.core.kept_block import RecordFormat
from backend.engine import level_threads
from backend.engine.level_rates import LevelRates
from backend.engine.level_traffic import LevelTraffic
from backend.kvcache.second_level import SecondLevel
from backend.storage.block_file import BlockFile
from tests.mutants.changes import Plant, change, change_everywhere

FILE = ["tests/core/test_block_file.py"]
ENGINE = ["tests/engine/test_second_level.py"]
RATES = ["tests/engine/test_level_rates.py"]
THREADS = ["tests/engine/test_level_threads.py"]
HOSTILE = ["tests/engine/test_hostile_blocks.py"]

# name -> (what plants it, tests that must fail)
MUTANTS: dict[str, tuple[Plant, list[str]]] = {
    "kv_has_no_checksum": (
        change(RecordFormat, "check", ("checksum_of(data) == kept.checksum", "True")),
        HOSTILE,
    ),
    "a_block_is_forgotten_wherever_it_lies": (
        change(SecondLevel, "forget", ("self._places.get(block.key) == block.place", "block.key in self._places")),
        ["tests/kvcache/test_second_level.py"],
    ),
    "a_file_of_another_form_is_read": (
        change(BlockFile, "_has_header", ("is_whole and ", "True or ")),
        FILE,
    ),
    "the_head_of_a_prefix_goes_first": (
        change(SecondLevel, "_note", ("zip(reversed(inside), reversed(records))", "zip(inside, records)")),
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
    "the_queue_of_prompts_does_not_count": (
        change(LevelRates, "num_to_load", ("prefill * queued_tokens", "0.0")),
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
}  # fmt: skip
