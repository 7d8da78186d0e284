"""Planted bugs of what routers learn, and of KV that travels between engines."""

from __future__ import annotations

from backend.api.config import endpoints
from backend.core import kv_state
from backend.kvcache.manager import KVCacheManager
from backend.wire.kv_publisher import KvPublisher
from backend.worker import kv_fingerprint
from backend.worker.kv_storage import KVStorage
from tests.mutants.changes import Plant, change, change_everywhere

PUBLISHER = ["tests/wire/test_kv_publisher.py"]
TRANSFER = ["tests/engine/test_transfer.py"]
BITS = ["tests/model/test_transfer.py"]

# name -> (what plants it, tests that must fail)
MUTANTS: dict[str, tuple[Plant, list[str]]] = {
    "text_that_is_not_utf_8_passes_through": (
        change_everywhere(kv_state.decode, ("except _UNREADABLE", "except msgspec.DecodeError")),
        ["tests/engine/test_transfer.py"],
    ),
    "what_is_no_longer_kept_stays_unknown": (
        change(KvPublisher, "_answer", ("start < first_kept > self._first_number", "False")),
        PUBLISHER,
    ),
    "numbers_begin_at_none_in_every_engine": (
        change(KvPublisher, "__init__", ("time.time_ns() // 1000", "0")),
        PUBLISHER,
    ),
    "every_endpoint_is_bound": (
        change_everywhere(endpoints.is_bound, ('("tcp://*:", "tcp://[::]:", "ipc://")', '("tcp:", "ipc:")')),
        PUBLISHER,
    ),
    "foreign_kv_is_not_found": (
        change(KVCacheManager, "adopt", ("seq.num_computed_tokens, seq.kv_is_foreign = num_tokens, True", "")),
        TRANSFER,
    ),
    "a_damaged_state_is_read": (
        change_everywhere(kv_state.decode, ("!= _hash(body)", "== b''")),
        TRANSFER,
    ),
    "the_size_of_kv_is_not_checked": (
        change_everywhere(kv_state.decode, ("len(state.blocks) != state.num_blocks * state.block_bytes", "False")),
        TRANSFER,
    ),
    "layers_change_places": (
        change(KVStorage, "write", ("blocks[:, layer]", "blocks[:, -1 - layer]")),
        BITS,
    ),
    "the_format_of_kv_is_no_part_of_the_fingerprint": (
        change_everywhere(kv_fingerprint.kv_fingerprint, (", block.shape, block.dtype, loaded.kv_format)", ")")),
        BITS,
    ),
}  # fmt: skip
