"""Several models as one server has them, and what a model may be in the place of itself while its former engine runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from backend.api import load_config
from backend.api.config import EngineConfig
from deploy.errors import UserError
from deploy.model_source import DEFAULT_MODEL
from deploy.models_file import GIB, Entry, read_models
from deploy.several import ALONE, Several

MODEL = {"path": str(DEFAULT_MODEL)}
# Keys of ALONE -> a value, and what else a configuration with it must have
VALUES: dict[str, tuple[str, str]] = {
    "sessions.directory": ("/d", ""),
    "kv_cache.directory": ("/d", ""),
    "kv_events.endpoint": ("tcp://127.0.0.1:1", ""),
    "kv_events.replay_endpoint": ("tcp://127.0.0.1:1", "kv_events.endpoint=tcp://127.0.0.1:{}"),
    "workers.join_address": ("127.0.0.1:1", "workers.tensor_parallel_size=2"),
    "kv_transfer.directory": ("/d", ""),
}
Write = Callable[[dict[str, dict[str, object]]], None]
Start = Callable[[dict[str, dict[str, object]]], Several]


def configured(name: str, entry: Entry) -> EngineConfig:
    return load_config(overrides=["model.device=cpu", f"model.path={entry.path}", *entry.set])


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(models: dict[str, dict[str, object]]) -> None:
        (tmp_path / "models.json").write_text(json.dumps({"models": models}))

    return write


@pytest.fixture
def started(tmp_path: Path, write: Write) -> Start:
    """The models of a file, on a machine with 4 GiB and 2 cores."""

    def start(models: dict[str, dict[str, object]]) -> Several:
        write(models)
        return Several(read_models(tmp_path / "models.json"), configured, 2, free=lambda config: 4 * GIB)

    return start


def test_a_model_is_described_again_as_its_file_says_then(started: Start, write: Write) -> None:
    several = started({"a": MODEL, "b": MODEL | {"memory": 1.0}})
    former = {each.name: each.engine.share for each in several.sets}
    write({"a": MODEL, "b": MODEL | {"memory": 0.5, "idle_unload_s": 9.0, "set": ["scheduler.max_batch_size=7"]}})
    for _ in range(2):
        entry, share = several.described_again(several.sets[1], beside=True)
        assert entry.idle_unload_s == 9.0 and share.config.scheduler.max_batch_size == 7
        assert share.num_bytes <= GIB // 2 < former["b"].num_bytes
    entry, share = several.described_again(several.sets[0], beside=True)
    assert share == former["a"], "the file says the same of it"


@pytest.mark.parametrize(
    ("models", "sentence"),
    [
        ({"a": MODEL}, "model b is no longer in models.json"),
        ({"a": MODEL, "b": MODEL | {"names": ["y"]}}, "names has changed in models.json, which needs a restart"),
        ({"a": MODEL, "b": MODEL | {"lora": ["x=y"]}}, "lora has changed in models.json, which needs a restart"),
        ({"a": MODEL, "b": {"path": "/nowhere"}}, "model b: model /nowhere: "),
        (
            {"a": MODEL, "b": MODEL | {"set": ["sessions.directory=/a"]}},
            "models a and b both have sessions.directory=/a",
        ),
    ],
)
def test_what_a_model_may_not_become_is_one_sentence(
    models: dict[str, dict[str, object]], sentence: str, started: Start, write: Write
) -> None:
    several = started({"a": MODEL | {"set": ["sessions.directory=/a"]}, "b": MODEL})
    write(models | ({"a": MODEL} if "a" in models else {}))
    with pytest.raises(UserError) as caught:
        several.described_again(several.sets[1], beside=False)
    assert sentence in str(caught.value)


@pytest.mark.parametrize("place", ALONE)
def test_two_engines_never_have_one_file_or_address(place: str, started: Start, write: Write) -> None:
    """Not those of two models, and not both engines of one that is replaced; one that is unloaded may be loaded with it."""
    value, more = VALUES[place]
    mine, other, apart = (
        MODEL | {"set": [f"{place}={value}{end}", *filter(None, [more and more.format(number)])]}
        for number, end in enumerate(("", "2", ""), 2)
    )
    with pytest.raises(UserError, match=f"models a and b both have {place}={value}; give each of them its own"):
        started({"a": mine, "b": apart})
    several, section = started({"a": mine, "b": other}), place.partition(".")[0]
    for each in several.sets:
        several.described_again(each, beside=False)
        with pytest.raises(UserError, match=f"model {each.name} has {section}.*, which two engines cannot use at once"):
            several.described_again(each, beside=True)
    write({"a": other, "b": MODEL})
    with pytest.raises(UserError, match=f"models b and a both have {section}"):
        several.described_again(several.sets[0], beside=False)
    several.described_again(several.sets[1], beside=True)
