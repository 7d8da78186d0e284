"""Planted bugs of what routers learn, and of KV that travels between engines."""

from __future__ import annotations

from backend.api.config import endpoints
from backend.core import kv_state
from backend.engine.intake import Intake
from backend.engine.transfer import Transfer
from backend.kvcache.manager import KVCacheManager
from backend.kvcache.prefix_trie import PrefixTrie
from backend.kvcache.state import CacheState
from backend.storage.kv_store import KvStore
from backend.wire import kv_event_format
from backend.wire.kv_event_format import KvEventEncoder
from backend.wire.kv_publisher import KvPublisher
from backend.worker import kv_fingerprint
from backend.worker.kv_storage import KVStorage
from tests.mutants.changes import Plant, change, change_everywhere

PUBLISHER = ["tests/wire/test_kv_publisher.py"]
STORE = ["tests/core/test_kv_store.py"]
TRANSFER = ["tests/engine/test_transfer.py"]
BITS = ["tests/model/test_transfer.py"]

# name -> (what plants it, tests that must fail)
MUTANTS: dict[str, tuple[Plant, list[str]]] = {
    "text_that_is_not_utf_8_passes_through": (
        change_everywhere(kv_state.decode, ("except _UNREADABLE", "except msgspec.DecodeError")),
        ["tests/engine/test_transfer.py"],
    ),
    "blocks_that_are_not_full_are_told": (
        change(KvEventEncoder, "_stored", ("if len(block.token_ids) == self._block_size", "")),
        PUBLISHER,
    ),
    "blocks_that_were_not_told_are_removed": (
        change(KvEventEncoder, "_removed", ("if each in self._known", "")),
        PUBLISHER,
    ),
    "the_salt_is_left_out": (
        change_everywhere(kv_event_format._extra_keys, ("if origin.cache_salt and data.parent_hash is None", "if False")),
        PUBLISHER,
    ),
    "a_lost_message_is_not_made_up_for": (
        change(KvPublisher, "offer", ("    except queue.Full:\n        self._tell_all.set()\n", "    except queue.Full:\n")),
        PUBLISHER,
    ),
    "the_first_message_clears_nothing": (
        change(KvEventEncoder, "encode_anew", ("[CLEARED, *(", "[*(")),
        PUBLISHER,
    ),
    "a_replay_begins_one_too_late": (
        change(KvPublisher, "_answer", ("kept[0] < start", "kept[0] <= start")),
        PUBLISHER,
    ),
    "messages_are_kept_without_bound": (
        change(KvPublisher, "_publish", ("or self._kept_bytes > self._config.buffer_bytes", "")),
        PUBLISHER,
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
    "all_that_is_cached_ends_at_the_first_fork": (
        change(PrefixTrie, "cached_prefixes", ("            starts.extend(chain[-1].children.values())\n", "")),
        ["tests/kvcache/test_events.py"],
    ),
    "foreign_kv_is_shared": (
        change(KVCacheManager, "advance", (" and not seq.kv_is_foreign", "")),
        TRANSFER,
    ),
    "the_tail_of_foreign_kv_is_shared": (
        change(CacheState, "tail", (" and not seq.kv_is_foreign", "")),
        TRANSFER,
    ),
    "foreign_kv_may_take_blocks_in_use": (
        change(KVCacheManager, "adopt", ("num_blocks + self.watermark_blocks > self._blocks.num_available", "False")),
        TRANSFER,
    ),
    "adopted_blocks_stay_locked": (
        change(KVCacheManager, "adopt", ("self._unlock(self._tables[seq.seq_id], keep=True)", "pass")),
        TRANSFER,
    ),
    "foreign_kv_is_not_found": (
        change(KVCacheManager, "adopt", ("seq.num_computed_tokens, seq.kv_is_foreign = num_tokens, True", "")),
        TRANSFER,
    ),
    "a_state_of_another_prompt_is_taken": (
        change(Transfer, "read", ("state.token_ids != request.input_token_ids", "False")),
        TRANSFER,
    ),
    "a_state_of_another_adapter_is_taken": (
        change(Transfer, "read", ("state.digest != request.kv_origin.digest", "False")),
        TRANSFER,
    ),
    "a_state_of_another_model_is_taken": (
        change(Transfer, "read", ("state.fingerprint != self._model.kv_fingerprint", "False")),
        TRANSFER,
    ),
    "blocks_of_another_size_are_written": (
        change(Transfer, "adopt", ("geometry != (self._kv.block_size, self._model.kv_block_bytes)", "False")),
        TRANSFER,
    ),
    "the_whole_output_is_computed_by_the_first_engine": (
        change(Intake, "_check_room", ("1 if request.context_only else request.max_tokens", "request.max_tokens")),
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
        change_everywhere(kv_fingerprint.kv_fingerprint, (", block.shape, block.dtype)", ")")),
        BITS,
    ),
    "a_file_is_taken_twice": (
        change(KvStore, "take", ("        path.unlink(missing_ok=True)\n", "        pass\n")),
        STORE,
    ),
    "any_name_is_taken": (
        change(KvStore, "take", ("not _NAME.fullmatch(name)", "not name")),
        STORE,
    ),
    "links_are_followed": (
        change(KvStore, "take", ("os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK", "os.O_RDONLY | os.O_NONBLOCK")),
        STORE,
    ),
    "files_stay_for_ever": (
        change(KvStore, "_sweep", ("modified < self._now() - self._ttl_s", "False")),
        STORE,
    ),
    "files_have_any_room": (
        change(KvStore, "_sweep", ("left < 0", "False")),
        STORE,
    ),
    "a_changed_file_is_read": (
        change(Transfer, "_fetched", ("hash_of(blocks) != state.stored_hash", "False")),
        TRANSFER,
    ),
}  # fmt: skip
