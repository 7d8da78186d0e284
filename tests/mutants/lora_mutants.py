"""Bugs planted in LoRA: the caches, the antechamber, the reading of adapters."""

from __future__ import annotations

from backend.api import lora as api_lora
from backend.api.request import Request
from backend.engine.antechamber import Antechamber
from backend.engine.intake import Intake
from backend.engine.loop import EngineLoop
from backend.kvcache.prefix_trie import PrefixTrie
from backend.models import lora
from backend.scheduler.adapters import AdapterCache, Level
from backend.scheduler.scheduler import Scheduler
from backend.serving.fronts import llmapi, trtllm_tokens
from deploy import serve
from gateway.core import Gateway
from tests.mutants.changes import change

CACHE = ["tests/scheduler/test_adapters.py"]
WAITING = ["tests/engine/test_antechamber_adapters.py"]
MODEL = ["tests/model/test_lora.py"]
EVENTS = ["tests/kvcache/test_events.py"]
GATEWAY = ["tests/gateway/test_adapters.py"]

MUTANTS = {
    "the_newest_goes": (
        change(Level, "put", ("next(each for each in self._bytes", "next(each for each in [*self._bytes][::-1]")),
        CACHE,
    ),
    "who_is_in_use_goes": (change(Level, "put", ("each not in self._users and", "")), CACHE),
    "use_is_not_noted": (change(Level, "use", ("self._bytes.move_to_end(content)", "pass")), CACHE),
    "one_user_less_is_none": (change(Level, "leave", ("-= 1", "= 0")), CACHE),
    "names_of_all_clients_are_one": (
        change(
            AdapterCache, "resolve", ("self._names.get(name)", "{n[1]: c for n, c in self._names.items()}.get(name[1])")
        ),
        CACHE,
    ),
    "what_leaves_the_host_stays_on_the_device": (
        change(AdapterCache, "_forget", ("if content in self.device", "if False")),
        CACHE,
    ),
    "a_failed_step_has_brought_its_adapters": (
        change(AdapterCache, "send_again", ("list(self.device)", "[]")),
        WAITING,
    ),
    "the_device_is_endless": (
        change(Scheduler, "_admit", ("if not self.adapters.has_room(", "if False and (")),
        WAITING,
    ),
    "a_session_changes_its_adapter": (
        change(Intake, "_accept_turn", ("known.adapter != request.adapter", "False")),
        WAITING,
    ),
    "later_requests_overtake": (change(Antechamber, "enter", ("waiting.line in self._lines", "False")), WAITING),
    "the_cancelled_run": (change(Antechamber, "_advance", ("if not first.has_left:", "if True:")), WAITING),
    "all_adapters_are_read_ahead": (
        change(Antechamber, "_read_ahead", ("and self._num_ahead < self._num_readers", "")),
        WAITING,
    ),
    "who_leaves_takes_the_adapter_along": (change(Antechamber, "_close_ranks", ("or is_meant", "")), WAITING),
    "who_leaves_is_read_for_all_the_same": (
        change(Antechamber, "_close_ranks", ("self._unread.remove(each)", "pass")),
        WAITING,
    ),
    "a_drain_leaves_the_antechamber_behind": (
        change(EngineLoop, "_is_over", (" or self._core.antechamber", "")),
        WAITING,
    ),
    "what_nobody_means_keeps_a_reader": (
        change(Antechamber, "_close_ranks", ("self._num_ahead -= 1", "pass")),
        WAITING,
    ),
    "the_loop_sleeps_past_a_deadline": (
        change(EngineLoop, "_sleep", ("if earliest_ns is not None:", "if False:")),
        WAITING,
    ),
    "kv_of_other_adapters_is_met": (
        change(Request, "adapter", ('"" if self.lora is None else self.lora.content', '""')),
        MODEL,
    ),
    "ids_of_all_are_nobody_s": (change(AdapterCache, "resolve", (" or self._names_for_all.get(name[1])", "")), CACHE),
    "ids_of_all_outlive_their_adapter": (
        change(
            AdapterCache, "_forget", ("self._names_for_all.items() if each != content", "self._names_for_all.items()")
        ),
        CACHE,
    ),
    "more_adapters_are_prefetched_than_fit": (
        change(AdapterCache, "put_for_all", ("if num_bytes >", "if False and num_bytes >")),
        CACHE,
    ),
    "blocks_tell_no_adapter": (
        change(PrefixTrie, "_tell_stored", ("list(node.key), lora_id", "list(node.key)")),
        EVENTS,
    ),
    "alpha_is_one_for_all": (change(lora, "_scale", ("alpha = value", "pass")), MODEL),
    "adapters_of_other_kinds_begin": (
        change(serve, "with_adapters", ("check_adapter_files(Path(directory))", "pass")),
        ["tests/deploy/test_serve_options.py"],
    ),
    "other_kinds_are_plain_adapters": (
        change(api_lora, "read_peft_config", ("if raw.get(key) not in plain:", "if False:")),
        ["tests/model/test_lora_prefetch.py"],
    ),
    "a_name_is_forgotten": (
        change(trtllm_tokens, "read_lora", ("    if name:", "    if False:")),
        ["tests/serving/test_trtllm_inputs.py"],
    ),
    "an_id_beside_a_name_counts": (
        change(llmapi, "_adapter", ("    if name:", "    if name and not task_id:")),
        ["tests/serving/test_llmapi_model.py"],
    ),
    "the_endpoint_forgets_the_adapter": (change(Gateway, "jobs", ("request | adapter", "request")), GATEWAY),
    "an_adapter_has_no_parent": (change(Gateway, "card", ("card if name in", "card if True or name in")), GATEWAY),
    "the_rank_is_not_divided_by": (change(lora, "_scale", ("else rank)", "else 1)")), MODEL),
}
