"""AdapterCache: which adapters are held on host and device, who goes, and who has to wait."""

from __future__ import annotations

import pytest

from backend.api import InvalidRequest
from backend.api.config.schema import LoraSection
from backend.core.step import ModelInfo, PreparedAdapter
from backend.kvcache.adapters import AdapterCache


def adapter(content: str, num_bytes: int = 10) -> PreparedAdapter:
    return PreparedAdapter(content, 8, num_bytes, num_bytes, None)


def cache(host: int = 30, device: float = 1.0, free_bytes: int = 20) -> AdapterCache:
    """Room for three adapters on the host, for two on the device."""
    config = LoraSection(enabled=True, host_bytes=host, device_fraction=device)
    return AdapterCache(config, ModelInfo("m", 10, 10, device="cuda:0"), free_bytes)


@pytest.mark.feature("001-48")
def test_an_id_names_a_content_within_its_namespace() -> None:
    held = cache()
    held.put(("", 1), adapter("a"))
    held.put(("tenant", 1), adapter("b"))
    assert (held.resolve(("", 1)), held.resolve(("tenant", 1))) == ("a", "b")
    with pytest.raises(InvalidRequest, match="LoRA task 2 not found in cache"):
        held.resolve(("", 2))


@pytest.mark.feature("001-47", "001-48")
def test_the_least_recently_used_adapter_goes_at_the_byte_limit() -> None:
    held = cache()
    for task_id, content in enumerate("abc"):
        assert held.put(("", task_id), adapter(content))
    held.hold("a")
    held.let_go("a")  # now b is the oldest
    assert held.put(("", 3), adapter("d"))
    assert [held.resolve(("", each)) for each in (0, 2, 3)] == ["a", "c", "d"]
    with pytest.raises(InvalidRequest, match="not found"):
        held.resolve(("", 1))


@pytest.mark.feature("001-47")
def test_an_adapter_waits_while_those_in_use_leave_no_room() -> None:
    held = cache()
    for task_id, content in enumerate("abc"):
        held.put(("", task_id), adapter(content))
        held.hold(content)
    assert not held.put(("", 3), adapter("d"))
    assert held.put(("", 4), adapter("b"))  # it is there
    held.let_go("b")
    assert held.put(("", 3), adapter("d"))
    with pytest.raises(InvalidRequest, match=r"takes 31 bytes, the host cache has 30 \(lora.host_bytes\); use"):
        held.put(("", 5), adapter("e", 31))
    with pytest.raises(InvalidRequest, match=r"the device cache has 20 \(lora.device_fraction\); use"):
        held.put(("", 5), adapter("e", 21))


@pytest.mark.feature("001-46")
def test_the_device_level_is_a_share_of_the_memory_that_is_left() -> None:
    """5 % of 4,000 bytes; and with device_module_layers 3 times a module of 70 bytes."""
    config, info = LoraSection(enabled=True), ModelInfo("m", 10, 10, device="cuda:0", lora_module_bytes=70)
    assert AdapterCache(config, info, 4000).device.capacity == 200
    rows = LoraSection(enabled=True, device_module_layers=3, host_module_layers=5)
    assert AdapterCache(rows, info, 4000).device.capacity == 210
    on_cpu = ModelInfo("m", 10, 10, device="cpu", lora_module_bytes=70)
    assert AdapterCache(config, on_cpu, 4000).device.capacity == config.host_bytes


@pytest.mark.feature("001-37", "001-38")
def test_module_layers_override_bytes_and_fractions() -> None:
    info = ModelInfo("m", 10, 10, device="cuda:0", lora_module_bytes=70)
    rows = LoraSection(enabled=True, host_module_layers=5, device_module_layers=2)
    held = AdapterCache(rows, info, 4000)
    assert (held.host.capacity, held.device.capacity) == (350, 140)


def test_adapters_come_to_the_device_once_and_go_when_others_need_the_room() -> None:
    held = cache()
    for task_id, content in enumerate("abc"):
        held.put(("", task_id), adapter(content))
    assert held.has_room(["a", "b", ""]) and not held.has_room(["a", "b", "c"])
    held.start("a"), held.start("b"), held.start("a")
    assert [each.content for each in held.take_changes()[0]] == ["a", "b"]
    assert held.has_room(["a"]) and not held.has_room(["c"])
    held.stop("a")
    assert not held.has_room(["c"])  # another sequence has it
    held.stop("a")
    assert held.has_room(["c"])
    held.start("c")
    coming, going = held.take_changes()
    assert ([each.content for each in coming], going) == (["c"], ["a"])
    held.send_again()
    assert {each.content for each in held.take_changes()[0]} == {"b", "c"}


def test_what_leaves_the_host_leaves_the_device_and_comes_back_whole() -> None:
    held = cache()
    held.put(("", 0), adapter("a"))
    held.start("a")
    held.take_changes()
    held.stop("a")
    for task_id, content in enumerate("bcd", 1):
        held.put(("", task_id), adapter(content))
    assert held.take_changes() == ([], ["a"])
    held.put(("", 0), adapter("a"))
    held.start("a")
    assert [each.content for each in held.take_changes()[0]] == ["a"]


@pytest.mark.feature("001-48")
def test_an_id_for_all_is_known_to_every_client_without_one_of_its_own() -> None:
    """It leaves like others, and then nobody knows it. A client's own id counts for that client first."""
    held = cache()
    held.put_for_all(1, adapter("a"))
    held.put(("tenant", 1), adapter("b"))
    assert [held.resolve((namespace, 1)) for namespace in ("", "other", "tenant")] == ["a", "a", "b"]
    held.put(("", 2), adapter("c"))
    held.put(("", 3), adapter("d"))  # a was used longest ago
    assert held.resolve(("tenant", 1)) == "b"
    with pytest.raises(InvalidRequest, match="LoRA task 1 not found in cache"):
        held.resolve(("", 1))


def test_adapters_for_all_have_to_fit_together() -> None:
    """30 bytes: two contents of 15 fit, one of them under a second id too, and one more byte does not."""
    held = cache()
    held.put_for_all(1, adapter("a", 15))
    held.put_for_all(2, adapter("b", 15))
    held.put_for_all(3, adapter("a", 15))
    message = "up to this one take 31 bytes, the host cache has 30; raise lora.host_bytes, or leave some out"
    with pytest.raises(InvalidRequest, match=message):
        held.put_for_all(4, adapter("c", 1))
    assert [held.resolve(("", each)) for each in (1, 2, 3)] == ["a", "b", "a"]
