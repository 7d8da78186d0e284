"""The options of `serve` that choose models, flags and logs: from the command line to the server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from backend.api import EngineConfig
from deploy import serve
from deploy.cli import app
from deploy.gateway import GatewayOptions
from deploy.ports import Ports
from deploy.repository import profiles
from deploy.serve import with_adapters
from deploy.triton_server import TritonServer
from tests.deploy.test_cli import on_free_ports, refused
from tests.deploy.test_repository import OURS, add_model, names


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[TritonServer]:
    """The servers that `serve` would start."""
    servers: list[TritonServer] = []
    monkeypatch.setattr(serve, "supervise", lambda server, *_: servers.append(server) or 0)
    return servers


def asked(served: list[TritonServer], *arguments: str) -> TritonServer:
    result = CliRunner().invoke(app, ["serve", *on_free_ports(), *arguments])
    assert result.exit_code == 0, result.output
    return served.pop()


def test_an_unknown_profile_is_one_sentence() -> None:
    assert "no profile 'nope'; give --profile some of trtllm," in refused(
        "serve", *on_free_ports(), "--profile", "nope"
    )


def test_a_collision_is_one_sentence_with_the_model_and_both_places(tmp_path: Path) -> None:
    add_model(tmp_path, "ensemble", OURS.format(name="ensemble", role="ensemble"))
    line = refused("serve", *on_free_ports(), "--profile", "trtllm", "--model-repository", str(tmp_path))
    assert "model ensemble is in profile trtllm and in model repository" in line


def test_profile_and_repositories_reach_the_server(served: list[TritonServer], tmp_path: Path) -> None:
    for name in ("first", "second"):
        add_model(tmp_path / name, f"my_{name}", OURS.format(name=name, role="ensemble"))
    repositories = [f"--model-repository={tmp_path / name}" for name in ("first", "second")]
    server = asked(served, "--profile", "trtllm", *repositories)
    assert {"my_first", "my_second", "ensemble", "tensorrt_llm"} <= set(names(server.models))
    server = asked(served, *repositories)
    assert set(names(server.models)) == {"my_first", "my_second", "tensorrt_llm", "everbatch"}


def test_flags_reach_the_server_by_the_option_and_after_two_dashes(served: list[TritonServer]) -> None:
    server = asked(served, "--tritonserver-flag=--log-verbose=1", "--", "--trace-config", "level=TIMESTAMPS")
    assert server._extra_flags == ("--log-verbose=1", "--trace-config", "level=TIMESTAMPS")


def test_a_flag_of_the_launchers_own_is_one_sentence_with_the_option_for_it() -> None:
    line = refused("serve", *on_free_ports(), "--tritonserver-flag=--http-port=1")
    assert "tritonserver's flag --http-port is the launcher's own; give --http-port PORT" in line
    assert "'something' is no flag of tritonserver" in refused("serve", *on_free_ports(), "something")


def test_the_format_of_the_log_reaches_the_server(served: list[TritonServer], monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(served).log_format == "text"
    assert asked(served, "--log-format", "json").log_format == "json"
    monkeypatch.setenv("EVERBATCH_LOG_FORMAT", "json")
    assert asked(served).log_format == "json", "as under a plain tritonserver"
    monkeypatch.delenv("EVERBATCH_LOG_FORMAT")
    assert CliRunner().invoke(app, ["serve", *on_free_ports(), "--log-format", "xml"]).exit_code == 2


@pytest.mark.parametrize("given", [True, False])
def test_what_is_shown_of_the_endpoint_asks_for_a_key_where_it_does(
    given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keys").write_text("alice secret-of-alice\n")
    monkeypatch.setattr(serve, "supervise", lambda server, reporter, *_: reporter.ready() or 0)
    options = ["--api-keys", str(tmp_path / "keys")] if given else []
    result = CliRunner().invoke(app, ["serve", *on_free_ports()[:-1], str(Ports.free().http), *options])
    assert result.exit_code == 0 and "/v1/chat/completions" in result.output
    assert ('"Authorization: Bearer $KEY"' in result.output) is given and "secret-of-alice" not in result.output


def test_adapters_reach_the_engine_and_the_endpoint_by_name(
    served: list[TritonServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --lora and with --set; in the configuration, and as names that the OpenAI endpoint takes for models."""
    for name in ("doll", "sheep"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    monkeypatch.chdir(tmp_path)
    settings = ("--set", "lora.enabled=true", "--set", 'lora.adapters=["doll=doll"]')
    lora = asked(served, *settings, "--lora", f"sheep={tmp_path}/sheep").config.lora
    assert lora.enabled and lora.directories == {name: str(tmp_path / name) for name in ("doll", "sheep")}
    assert not asked(served).config.lora.enabled
    made: list[GatewayOptions] = []
    monkeypatch.setattr(serve, "ServerWithGateway", lambda server, options: made.append(options) or server)
    ports = [*on_free_ports()[:-1], str(Ports.free().http)]
    CliRunner().invoke(app, ["serve", *ports, "--lora", "doll=doll", "--lora", "sheep=sheep"])
    assert made[0].adapters == ("doll", "sheep")
    said = refused("serve", *on_free_ports(), "--lora", "cow=cow")
    assert "--lora cow=cow: cow: adapter_config.json: File does not exist; put a PEFT adapter there" in said
    assert "write it as NAME=DIRECTORY" in refused("serve", *on_free_ports(), "--lora", "doll")


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("use_dora", True, "use_dora is true, which is not served"),
        ("peft_type", "IA3", "peft_type is IA3, which is"),
        ("peft_type", None, "peft_type is null"),
    ],
)
def test_an_adapter_of_another_kind_is_refused_before_anything_is_started(
    key: str, value: object, sentence: str, tmp_path: Path
) -> None:
    """By --lora and by --set alike. What TensorRT-LLM's converter has written has no such file, and is left to the engine."""
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", key: value}))
    listed = json.dumps([f"doll={tmp_path}"])
    for given in (("--lora", f"doll={tmp_path}"), ("--set", "lora.enabled=true", "--set", f"lora.adapters={listed}")):
        said = " ".join(refused("serve", *on_free_ports(), *given).split())
        assert sentence in said and "doll=" in said, said
    (tmp_path / "adapter_config.json").rename(tmp_path / "model.lora_config.npy")
    assert with_adapters(EngineConfig(), (f"doll={tmp_path}",)).lora.directories == {"doll": str(tmp_path)}


def test_the_help_names_every_profile() -> None:
    shown = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).output
    assert f"Which clients are served: {', '.join(profiles())};" in " ".join(shown.replace("│", " ").split())
