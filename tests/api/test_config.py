"""One typed configuration: parsed once, frozen, and every mistake named by its key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from backend.api import ConfigError, EngineConfig, load_config
from backend.api.config.ranges import RANGES


def test_without_a_file_everything_has_its_default() -> None:
    assert load_config() == EngineConfig()


def test_a_file_and_overrides_are_applied_in_order(tmp_path: Path) -> None:
    file = tmp_path / "engine.json"
    file.write_text(json.dumps({"kv_cache": {"max_tokens": 64, "block_size": 16}, "model": {"path": "m"}}))
    config = load_config(file, ["kv_cache.max_tokens=128", "model.dtype=bfloat16", "kv_cache.max_tokens=256"])
    assert (config.kv_cache.max_tokens, config.kv_cache.block_size) == (256, 16)
    assert (config.model.path, config.model.dtype) == ("m", "bfloat16")


@pytest.mark.feature("000-01")
def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match="Bla: File does not exist"):
        load_config("Bla")


@pytest.mark.parametrize("text", ["{", "[1]", "3", '{"kv_cache": 3}'])
def test_a_file_that_is_no_object_of_sections_is_an_error(tmp_path: Path, text: str) -> None:
    file = tmp_path / "engine.json"
    file.write_text(text)
    with pytest.raises(ConfigError):
        load_config(file)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("kv_cache.max_token=1", "max_token"),
        ("kvcache.max_tokens=1", "kvcache"),
        ("kv_cache.max_tokens=lots", "kv_cache.max_tokens"),
        ("scheduler.policy=fastest", "scheduler.policy"),
        ("kv_cache.block_size=24", "kv_cache.block_size is 24, a power of two"),
        ("kv_cache.num_slots=63", "kv_cache.num_slots is 63, less than scheduler.max_batch_size 64"),
        ("scheduler.max_num_tokens=3", "scheduler.max_num_tokens is 3, less than scheduler.max_batch_size 64"),
        ("kv_cache.max_tokens", "write it as section.key=value"),
        ("max_tokens=3", "write it as section.key=value"),
        ("a.b.c=3", "write it as section.key=value"),
    ],
)
def test_a_mistake_is_named(override: str, named: str) -> None:
    with pytest.raises(ConfigError, match="configuration|kv_cache|scheduler|override") as caught:
        load_config(overrides=[override])
    assert named.split(".")[-1] in str(caught.value)


@pytest.mark.parametrize(
    ("given", "overrides", "message"),
    [
        (
            {},
            ["kv_cache.block_size=abc"],
            'kv_cache.block_size is "abc": Expected int, got str (kv_cache.block_size is from '
            "--set kv_cache.block_size=abc)",
        ),
        (
            {"scheduler": {"policy": "fastest"}},
            [],
            "scheduler.policy is \"fastest\": Invalid enum value 'fastest'; allowed are "
            "guaranteed_no_evict, max_utilization, static_batch (scheduler.policy is from engine.json)",
        ),
        (
            {},
            ["triton.decoupled=maybe"],
            "triton.decoupled is \"maybe\": Invalid enum value 'maybe'; allowed are true, false, both (triton.decoupled is from "
            "--set triton.decoupled=maybe)",
        ),
        (
            {"kv_cache": {"max_tokens": 0}},
            [],
            "kv_cache.max_tokens is 0, allowed is 1 to 1e+15; change it with --set "
            "kv_cache.max_tokens=VALUE (kv_cache.max_tokens is from engine.json)",
        ),
        (
            {"kv_cache": {"max_tokens": 0}},
            ["kv_cache.max_tokens=-7"],
            "(kv_cache.max_tokens is from --set kv_cache.max_tokens=-7)",
        ),
        (
            {"kv_cache": {"max_token": 3}},
            [],
            "did you mean kv_cache.max_tokens? (kv_cache.max_token is from engine.json)",
        ),
        ({"kvcache": {"max_tokens": 3}}, [], "did you mean kv_cache? (kvcache is from engine.json)"),
        (
            {"kv_cache": {"num_slots": 4}},
            ["scheduler.max_batch_size=9"],
            "(kv_cache.num_slots is from engine.json, "
            "scheduler.max_batch_size is from --set scheduler.max_batch_size=9)",
        ),
        ({"kv_cache": 3}, [], "kv_cache is 3: Expected object, got int (kv_cache is from engine.json)"),
        ({"limits": {"max_bias_bytes": 1 << 25}}, [], "allowed is 0 to 16777216;"),
    ],
)
def test_an_error_tells_the_value_and_what_is_allowed_and_where_the_key_was_set(
    tmp_path: Path, given: dict[str, object], overrides: list[str], message: str
) -> None:
    file = tmp_path / "engine.json"
    file.write_text(json.dumps(given))
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides)
    assert message in str(caught.value)


@pytest.mark.parametrize("key", sorted(RANGES))
def test_a_value_out_of_its_range_is_named_with_range_and_remedy(key: str) -> None:
    least, _ = RANGES[key]
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=[f"{key}={int(least) - 1}"])
    message = str(caught.value)
    assert (
        message.startswith(f"{key} is {int(least) - 1}")
        and ", allowed is" in message
        and f"--set {key}=VALUE" in message
    )


@pytest.mark.parametrize(
    "key", ["limits.default_timeout_s", "limits.max_timeout_s", "sessions.idle_ttl_s", "triton.attach_timeout_s"]
)
@pytest.mark.parametrize("value", ["Infinity", "NaN"])
def test_a_time_must_be_finite(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=key):
        load_config(overrides=[f"{key}={value}"])


def test_a_section_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        EngineConfig().kv_cache.max_tokens = 3


def test_a_file_cannot_smuggle_a_value_where_a_section_belongs(tmp_path: Path) -> None:
    file = tmp_path / "engine.json"
    file.write_text('{"kv_cache": 3}')
    with pytest.raises(ConfigError, match="kv_cache is no section"):
        load_config(file, ["kv_cache.max_tokens=3"])


@pytest.mark.feature("001-29", "001-30")
def test_a_window_is_one_number_or_one_for_each_layer() -> None:
    for text, windows in (("64", 64), ("[64, 32]", (64, 32)), ("null", None)):
        config = load_config(None, [f"kv_cache.max_attention_window={text}", "kv_cache.sink_tokens=4"])
        assert (config.kv_cache.max_attention_window, config.kv_cache.sink_tokens) == (windows, 4)


@pytest.mark.parametrize(
    "override, message",
    [
        ("kv_cache.max_attention_window=[64, 0]", "kv_cache.max_attention_window is 0, allowed is 1 to"),
        ("kv_cache.max_attention_window=[]", "kv_cache.max_attention_window is an empty list; give one window or more"),
        ('kv_cache.max_attention_window=[64, "x"]', r'max_attention_window\[1\] is \[64, "x"\]: Expected int'),
        ("kv_cache.max_attention_window=wide", r'max_attention_window is "wide": Expected int \| array'),
        ("kv_cache.sink_tokens=-1", "kv_cache.sink_tokens is -1, allowed is 0 to"),
        ('lora.adapters=["doll"]', r"lora.adapters holds 'doll'; write it as NAME=DIRECTORY"),
        ('lora.adapters=["=doll"]', "holds '=doll'; write it as NAME=DIRECTORY, a name of 1 to 256 characters"),
        (f'lora.adapters=["{"n" * 257}=d"]', "a name of 1 to 256 characters"),
        ('lora.adapters=["a=b", "a=c"]', "lora.adapters gives a name twice: a=b, a=c; leave one of them out"),
    ],
)
def test_windows_and_adapters_that_cannot_be_are_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, ["lora.enabled=true", override])


def test_adapters_are_names_with_directories() -> None:
    """The first equals sign ends the name: a directory may hold more of them."""
    text = 'lora.adapters=["doll=/loras/doll", "sheep=loras/a=b"]'
    config = load_config(None, ["lora.enabled=true", text])
    assert config.lora.directories == {"doll": "/loras/doll", "sheep": "loras/a=b"}


def test_adapters_are_not_named_where_none_are_served() -> None:
    with pytest.raises(
        ConfigError, match="lora.adapters names adapters and lora.enabled is false; set lora.enabled=true"
    ):
        load_config(None, ['lora.adapters=["a=b"]'])
    with pytest.raises(ConfigError, match="lora.allowed_dir is set and lora.enabled is false; set lora.enabled=true"):
        load_config(None, ["lora.allowed_dir=/loras"])


@pytest.mark.parametrize(
    "value", ["1" + "0" * 400, "1" + "0" * 5000, "[" * 20_000, "[" + "1," * 100_000 + "1]", "18446744073709551616"]
)
def test_a_value_that_no_number_holds_is_refused_in_one_short_sentence(tmp_path: Path, value: str) -> None:
    """A configuration crosses processes as msgpack, whose integers have 64 bits."""
    with pytest.raises(ConfigError, match="kv_cache.max_tokens is ") as caught:
        load_config(None, [f"kv_cache.max_tokens={value}"])
    assert len(str(caught.value)) < 500
    file = tmp_path / "engine.json"
    file.write_text(f'{{"kv_cache": {{"max_tokens": {value}}}}}')
    with pytest.raises(ConfigError, match="engine.json") as caught:
        load_config(file)
    assert len(str(caught.value)) < 500
