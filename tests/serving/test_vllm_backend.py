"""The python-based backend `vllm`: model.json, configurations without tensors, any name."""

from __future__ import annotations

import copy
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from backend.api import ConfigError, load_config
from backend.serving import assembly
from backend.serving.wires.vllm import TENSORS
from backend.serving.wires.vllm_engine_args import MAX_BYTES, OUR_KEYS, read_engine_args, remarks
from tests.serving.scripted import ScriptedExecutor

pytestmark = pytest.mark.feature("W-07")
ROOT = Path(__file__).resolve().parents[2]
SAMPLE = {
    "model": "facebook/opt-125m",
    "disable_log_requests": True,
    "gpu_memory_utilization": 0.5,
    "enforce_eager": True,
}


class FakeConfig:
    """Triton's ModelConfig, as far as it is used: it refuses a tensor that is there already."""

    def __init__(self, **config: Any) -> None:
        self.config: dict[str, Any] = {"input": [], "output": [], **config}

    def as_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self.config)

    def add_input(self, tensor: dict[str, Any]) -> None:
        self._add("input", tensor, {"name", "data_type", "dims", "optional"})

    def add_output(self, tensor: dict[str, Any]) -> None:
        self._add("output", tensor, {"name", "data_type", "dims"})

    def _add(self, kind: str, tensor: dict[str, Any], keys: set[str]) -> None:
        assert set(tensor) == keys and tensor["name"] not in [known["name"] for known in self.config[kind]]
        self.config[kind].append(tensor)

    def set_model_transaction_policy(self, policy: dict[str, bool]) -> None:
        self.config["model_transaction_policy"] = policy

    def set_max_batch_size(self, size: int) -> None:
        self.config["max_batch_size"] = size


def triton_model() -> Any:
    path = ROOT / "deploy" / "backends" / "vllm" / "model.py"
    spec = importlib.util.spec_from_file_location("vllm_backend_model", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.TritonPythonModel


def repository(tmp_path: Path, engine_args: Any) -> dict[str, str]:
    """The arguments of initialize() for a model as upstream's sample."""
    (tmp_path / "1").mkdir()
    text = engine_args if isinstance(engine_args, str) else json.dumps(engine_args)
    (tmp_path / "1" / "model.json").write_text(text)
    config = {"backend": "vllm", "model_transaction_policy": {"decoupled": True}}
    return {
        "model_name": "vllm_opt",
        "model_version": "1",
        "model_repository": str(tmp_path),
        "model_config": json.dumps(config),
    }


@pytest.fixture
def attached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ScriptedExecutor:
    executor = ScriptedExecutor(model_path=str(ROOT / "models" / "default"))
    monkeypatch.setenv("EVERBATCH_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.delenv("EVERBATCH_CONFIG", raising=False)
    monkeypatch.setattr(assembly.Executor, "attach", lambda socket_path, wait_s: executor)
    return executor


def test_a_model_of_the_backend_loads_under_any_name_and_says_what_has_no_effect(
    attached: ScriptedExecutor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = triton_model()()
    model.initialize(repository(tmp_path, SAMPLE))
    assert model.is_ready()
    model.finalize()
    said = [message for message in caplog.messages if "model.json of vllm_opt" in message]
    assert len(said) == len(SAMPLE)
    assert "model is facebook/opt-125m, but the default model is served" in said[0]
    assert "set `kv_cache.free_memory_fraction` of the engine instead" in said[2]


def test_an_engine_argument_that_vllm_does_not_have_fails_the_load_by_name(
    attached: ScriptedExecutor, tmp_path: Path
) -> None:
    sentence = "gpu_memory_utilisation of model.json is no known parameter; did you mean gpu_memory_utilization"
    with pytest.raises(ConfigError, match=f"^{sentence}"):
        triton_model()().initialize(repository(tmp_path, SAMPLE | {"gpu_memory_utilisation": 0.5}))


@pytest.mark.parametrize("text", ["{", "[]", '"x"', "[" * 100_000, " " * (MAX_BYTES + 1), "\xff"])
def test_a_model_json_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "model.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"^model\.json "):
        read_engine_args(path)


def test_without_a_model_json_there_are_no_engine_arguments(tmp_path: Path) -> None:
    assert read_engine_args(tmp_path / "model.json") == {}


@pytest.mark.parametrize(
    "served", ["/models/opt-125m", "facebook/opt-125m", "/hub/models--facebook--opt-125m/snapshots/27dcfa74d334bc"]
)
def test_the_model_that_is_named_and_served_needs_no_remark(served: str) -> None:
    assert list(remarks({"model": "facebook/opt-125m"}, served)) == []


def test_another_model_than_the_served_one_is_said() -> None:
    (remark,) = remarks({"model": "facebook/opt-125m"}, "/models/llama")
    assert remark == "model is facebook/opt-125m, but llama is served (--model or model.path); it answers"


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (
            {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4},
            "asks for ngram and has no effect here; set speculation.mode=lookup, speculation.max_draft_tokens=5 of the engine",
        ),
        ({"model": "[ngram]"}, "asks for [ngram] and has no effect here; set speculation.mode=lookup of the engine"),
        (
            {"model": "small/draft", "num_speculative_tokens": 3},
            "set speculation.mode=draft_model, speculation.draft_model=small/draft, speculation.max_draft_tokens=3 of the",
        ),
        (
            {"method": "eagle3", "model": "x"},
            "asks for the method eagle3, which this engine does not have; it has ngram",
        ),
        ("x", "asks for the method x, which this engine does not have"),
    ],
)
def test_speculation_as_vllm_has_it_is_told_in_keys_of_this_engine(asked: Any, sentence: str) -> None:
    """The engine is one for all models, so that a model's file cannot set it. What is told can be set as it stands."""
    (remark,) = remarks({"speculative_config": asked}, "/models/llama")
    assert remark.startswith("speculative_config ") and sentence in remark
    settings = re.findall(r"speculation\.\w+=[^, ]+", remark) if "set " in remark else []
    config = load_config(overrides=settings).speculation
    names = [each.partition("=")[0].removeprefix("speculation.") for each in settings]
    assert [f"speculation.{name}={getattr(config, name)}" for name in names] == settings


def test_the_keys_that_remarks_name_exist() -> None:
    known = {
        line.split("`")[1] for line in (ROOT / "docs" / "configuration.md").read_text().splitlines() if "| `" in line
    }
    assert set(OUR_KEYS.values()) <= known


def test_a_configuration_without_tensors_gets_all_of_them() -> None:
    config = triton_model().auto_complete_config(FakeConfig()).config
    assert [tensor["name"] for tensor in config["input"]] == [spec.name for spec in TENSORS.inputs]
    assert [tensor["name"] for tensor in config["output"]] == [spec.name for spec in TENSORS.outputs]
    assert config["input"][0] == {"name": "text_input", "data_type": "TYPE_STRING", "dims": [1], "optional": False}
    assert config["model_transaction_policy"] == {"decoupled": True} and config["max_batch_size"] == 0


def test_what_a_configuration_names_itself_stays() -> None:
    own = {"name": "stream", "data_type": "TYPE_BOOL", "dims": [1], "optional": False}
    config = triton_model().auto_complete_config(FakeConfig(input=[own])).config
    assert config["input"][0] == own
    assert len(config["input"]) == len(TENSORS.inputs)


@pytest.mark.parametrize(
    ("name", "config", "role"),
    [
        ("vllm_opt", {"backend": "vllm"}, "vllm"),
        ("ensemble", {"backend": "vllm"}, "vllm"),
        ("ensemble", {"backend": "python"}, "ensemble"),
        ("any", {"backend": "vllm", "parameters": {"role": {"string_value": "ensemble"}}}, "ensemble"),
    ],
)
def test_the_role_is_the_parameter_or_the_backend_or_the_name(name: str, config: dict[str, Any], role: str) -> None:
    assert assembly.role_of(name, config) == role
