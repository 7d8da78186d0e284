"""Planted bugs of KV that leaves the pool: swapping, the second level, a pool that outlives the engine, attention windows.

Others of the cache are in tests/simulation/mutants.py and tests/simulation/level_mutants.py.
"""

from __future__ import annotations

from backend.architectures.description import ModelConfig
from backend.core.kept_block import RecordFormat
from backend.engine import level_threads
from backend.engine.level_rates import LevelRates
from backend.engine.level_traffic import LevelTraffic
from backend.kvcache.geometry import Geometry
from backend.kvcache.pool_records import PoolRecords
from backend.kvcache.second_level import SecondLevel
from backend.kvcache.swap import SwapSpace
from backend.storage.block_file import BlockFile
from backend.worker.kv_storage import KVStorage
from kernels import paged_attention
from tests.mutants.changes import change, change_everywhere

FILE = ["tests/core/test_block_file.py"]
ENGINE = ["tests/engine/test_second_level.py"]
RATES = ["tests/engine/test_level_rates.py"]
THREADS = ["tests/engine/test_level_threads.py"]
HOSTILE = ["tests/engine/test_hostile_blocks.py"]

SWAP_ENGINE = ["tests/engine/test_swapping.py"]
MODEL = ["tests/model/test_swapping.py"]

POOL = ["tests/crashes/test_kept_pool.py"]

MEMORY = ["tests/kvcache/test_window.py", "tests/model/test_window_memory.py"]
PARITY = ["tests/model/test_attention_window.py"]
KERNELS = ["tests/model/test_kernels.py"]
TABLES = ["tests/kvcache/test_window.py"]

MUTANTS = {
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
    "places_outlive_a_failed_step": (
        change(SwapSpace, "lose_everything", ("self._held.clear()", "return")),
        SWAP_ENGINE,
    ),
    "kv_comes_back_in_the_layers_of_others": (
        change(
            KVStorage, "swap_in", ("zip(self.pools, self._host[number]", "zip(self.pools[::-1], self._host[number]")
        ),
        MODEL,
    ),
    "blocks_without_those_before_them_are_held": (
        change(PoolRecords, "_inherit", ("self._reachable(found)", "[(key, *at) for key, at in found.items()]")),
        POOL,
    ),
    "a_torn_record_is_not_counted": (
        change(
            PoolRecords,
            "_inherit",
            ("written.append(BlockId(block_id))", "written += [BlockId(block_id)] * (kept is not None)"),
        ),
        POOL,
    ),
    "the_gap_begins_at_the_front": (change(Geometry, "gap", ("first = self.sink_blocks", "first = 0")), MEMORY),
    "a_lost_window_counts_as_whole": (change(Geometry, "window_is_whole", ("<= len", "<= 9 + len")), TABLES),
    "all_layers_have_the_first_window": (
        change(
            ModelConfig,
            "with_windows",
            ("(caps if isinstance(caps, tuple) else (caps,))", "([*[caps]] if isinstance(caps, int) else caps[:1])"),
        ),
        PARITY,
    ),
    "a_chunk_does_not_see_sink_tokens": (
        change(paged_attention, "_plan_context", ("(keys >= sink_tokens)", "(keys >= 0)")),
        [*KERNELS, *PARITY],
    ),
    "a_chunk_reads_sink_blocks_of_others": (
        change(paged_attention, "_plan_context", ("table[:sink_blocks]", "table[1 : sink_blocks + 1]")),
        KERNELS,
    ),
}
