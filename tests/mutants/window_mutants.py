"""Bugs planted in attention windows and sink tokens; others of the cache are in tests/simulation/mutants.py."""

from __future__ import annotations

from backend.architectures.description import ModelConfig
from backend.kvcache.geometry import Geometry
from kernels import paged_attention
from tests.mutants.changes import change

MEMORY = ["tests/kvcache/test_window.py", "tests/model/test_window_memory.py"]
PARITY = ["tests/model/test_attention_window.py"]
KERNELS = ["tests/model/test_kernels.py"]
TABLES = ["tests/kvcache/test_window.py"]

MUTANTS = {
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
