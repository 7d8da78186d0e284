"""Several models as one server has them, and what a model may be in the place of itself while its former engine runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from backend.api import load_config
from backend.api.config.schema import EngineConfig
from deploy.engine_sets import Engine
from deploy.errors import UserError
from deploy.gateway import GatewayOptions
from deploy.health import Report, Verdict
from deploy.model_control import ModelControl
from deploy.model_source import DEFAULT_MODEL
from deploy.models_file import GIB, Entry, read_models
from deploy.multi_model import ALONE, MultiModel
from deploy.multi_model_options import of_several
from deploy.multi_model_server import MultiModelServer
from deploy.shares import Share

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
Start = Callable[[dict[str, dict[str, object]]], MultiModel]


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

    def start(models: dict[str, dict[str, object]]) -> MultiModel:
        write(models)
        return MultiModel(read_models(tmp_path / "models.json"), configured, 2, free=lambda config: 4 * GIB)

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


def test_a_server_that_starts_again_has_what_its_models_were_replaced_with(started: Start, tmp_path: Path) -> None:
    """Their first engines have their first numbers and names again, for all directories of the former life are gone."""
    several = started({"a": MODEL, "b": MODEL})
    server = MultiModelServer(several, run_dir=tmp_path / "run")
    (_, second) = several.sets
    larger = Share(load_config(overrides=["kv_cache.max_tokens=64"]), 7)
    second.engine, second.entry = Engine("b", 3, larger, is_first=False), Entry("y")
    place = tmp_path / "place"
    place.mkdir()
    server._lay_out(place)
    assert (second.engine.owner, second.engine.number, second.engine.share) == ("b.engine", 2, larger)
    assert second.entry == Entry("y") and load_config(place / "e2" / "config.json").kv_cache.max_tokens == 64
    assert "b.engine" in {model.name for model in server.models}
    assert not {"b.engine-3"} & {model.name for model in server.models}


def test_stubs_that_are_to_end_are_not_judged_and_an_engine_that_was_given_up_ends_no_other(
    started: Start, tmp_path: Path
) -> None:
    server = MultiModelServer(started({"a": MODEL, "b": MODEL}), run_dir=tmp_path / "run")
    given_up, silent = Report("b.engine", "given_up", 1), Report("b.everbatch", "ready", 2, silent_s=99.0)
    assert server._judge([Report("a.engine", "ready", 3)]) == Verdict()
    verdict = server._judge([given_up])
    assert verdict.given_up is None and verdict.unready == "model b.engine is unavailable"
    assert server._judge([silent]).silent == silent
    server.control = cast(ModelControl, SimpleNamespace(retired={1, 2}))
    assert server._judge([given_up, silent]) == Verdict()


def test_the_endpoint_is_told_of_each_model_by_its_own_names_and_formats(started: Start, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}<tool_call><think></think>{{ m.content }}{% endfor %}{{ tools }}")
    models = {
        "a": MODEL | {"names": ["org/a"]},
        "b": MODEL | {"names": ["org/b"], "set": [f"model.chat_template={template}"]},
    }
    told = of_several(GatewayOptions(port=1), started(models))
    (other,) = told.others
    assert (told.names, told.metrics_label) == (("everbatch", "a", "org/a"), "a")
    assert (other.triton_model, other.names, other.label) == ("b.everbatch", ("b", "org/b"), "b")
    assert (other.tool_format, other.reasoning_format) == ("hermes", "think")
    same = of_several(GatewayOptions(port=1, tool_format="llama", reasoning_format="none"), started(models)).others[0]
    assert (same.tool_format, same.reasoning_format) == ("llama", "none"), "what the operator says is of all models"
