"""Bugs planted in LoRA: the caches, Preparation, the reading of adapters."""

from __future__ import annotations

from backend.api.checkpoint import adapter_files
from backend.engine.names import AdapterNames
from backend.engine.read_ahead import ReadAhead
from backend.kvcache import adapters as cached_adapters
from backend.kvcache.adapters import AdapterCache, AdapterLru
from backend.kvcache.prefix_trie import PrefixTrie
from backend.layers import lora as layers
from backend.layers.lora import Stacks
from backend.models import lora
from backend.scheduler.scheduler import Scheduler
from backend.serving.wires import llmapi
from backend.worker import adapter_pages
from backend.worker.adapter_pages import AdapterPages, PagePool
from backend.worker.adapters import CopyStreams, DeviceAdapters
from tests.mutants.changes import change, change_everywhere

CACHE = ["tests/kvcache/test_adapters.py"]
WAITING = ["tests/engine/test_preparation_adapters.py"]
READING = ["tests/engine/test_read_ahead.py", *WAITING]
MODEL = ["tests/model/test_lora.py"]
HELD = ["tests/model/test_held_adapters.py"]
HOSTILE = ["tests/model/test_hostile_adapters.py"]
EVENTS = ["tests/kvcache/test_events.py"]
PAGES = ["tests/model/test_adapter_pages.py"]
NAMED = ["tests/executor/test_named_adapters.py"]

MUTANTS = {
    "the_newest_goes": (
        change(AdapterLru, "put", ("next(each for each in self._bytes", "next(each for each in [*self._bytes][::-1]")),
        CACHE,
    ),
    "one_user_less_is_none": (change(AdapterLru, "leave", ("-= 1", "= 0")), CACHE),
    "names_of_all_clients_are_one": (
        change(
            AdapterCache, "resolve", ("self._names.get(name)", "{n[1]: c for n, c in self._names.items()}.get(name[1])")
        ),
        CACHE,
    ),
    "a_failed_step_has_brought_its_adapters": (
        change(AdapterCache, "send_again", ("list(self.device)", "[]")),
        WAITING,
    ),
    "the_device_is_endless": (
        change(Scheduler, "_finds_no_place", ("not self.adapters.has_room(", "False and (")),
        WAITING,
    ),
    "all_adapters_are_read_ahead": (
        change(ReadAhead, "_has_room", ("return own < free if own else free > 0", "return True")),
        READING,
    ),
    "blocks_tell_no_adapter": (
        change(PrefixTrie, "_tell_stored", ("_stored(entered, origin)", "_stored(entered, NO_ORIGIN)")),
        EVENTS,
    ),
    "alpha_is_one_for_all": (change(lora, "_scale", ("alpha = value", "pass")), MODEL),
    "an_id_beside_a_name_counts": (
        change(llmapi, "_adapter", ("    if name:", "    if name and not task_id:")),
        ["tests/serving/test_llmapi_model.py"],
    ),
    "a_place_keeps_what_it_held": (
        change_everywhere(layers._fill, ("stack.a[:, place], stack.b[place] = 0, 0", "pass")),
        HELD,
    ),
    "a_place_keeps_its_rank": (
        change(Stacks, "fill", ("self._ranks[place] = max(", "_ = max(")),
        HELD,
    ),
    "two_tensors_of_one_name_are_one": (
        change_everywhere(adapter_files.half_tensors, ("is not half", "is None")),
        HOSTILE,
    ),
    "a_projection_lies_in_two_pages": (
        change(AdapterPages, "hold", ("self._copy(index, b)", "self._copy(0, b)")),
        PAGES,
    ),
    "pages_of_live_adapters_are_given_back": (
        change(AdapterPages, "belong_to", ("weakref.finalize(owner, self", "weakref.finalize(Layers(), self")),
        PAGES,
    ),
    "memory_is_taken_page_by_page": (
        change(PagePool, "_grow", ("torch.empty(self._pages_per_block,", "torch.empty(1,")),
        PAGES,
    ),
    "a_device_s_memory_grows_by_one_adapter": (
        change(Stacks, "_grow", ("self._block_bytes // self.bytes_per_adapter", "1")),
        PAGES,
    ),
    "rows_of_caches_are_those_of_the_highest_rank": (
        change_everywhere(adapter_pages.module_bytes, ("size(place, 1)", "size(place, 64)")),
        PAGES,
    ),
    "caches_are_not_whole_pages": (
        change_everywhere(cached_adapters._in_pages, ("-(-module_layers", "(module_layers")),
        PAGES,
    ),
    "a_step_begins_before_its_adapters_are_there": (
        change(DeviceAdapters, "_ensure", ("wait(copies)", "return")),
        PAGES,
    ),
    "one_worker_copies_all": (
        change(DeviceAdapters, "_ensure", ("ThreadPoolExecutor(self._num_workers,", "ThreadPoolExecutor(1,")),
        PAGES,
    ),
    "what_could_not_be_copied_is_there": (
        change(DeviceAdapters, "update", ("placed = {", "placed = self._held = {")),
        PAGES,
    ),
    "copies_overtake_what_still_reads": (
        change(CopyStreams, "begin", ("for stream in self.streams", "for stream in []")),
        PAGES,
    ),
    "names_are_loaded_without_an_allowed_directory": (
        change(AdapterNames, "_check_allowed", ("self._lora.enabled and self._lora.allowed_dir", "True")),
        NAMED,
    ),
    "loads_outlive_the_engine_unanswered": (
        change(AdapterNames, "close", ("for request_id in self._loading", "for request_id in ()")),
        NAMED,
    ),
    "the_rank_is_not_divided_by": (change(lora, "_scale", ("else rank)", "else 1)")), MODEL),
}
