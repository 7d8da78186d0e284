"""The options of `serve` that choose models, flags and logs: from the command line to the server."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from backend.api import EngineConfig
from deploy import serve
from deploy.cli import app
from deploy.gateway import GatewayOptions
from deploy.model_source import DEFAULT_MODEL
from deploy.ports import Ports
from deploy.repository import profiles
from deploy.serve import with_adapters
from deploy.triton_server import TritonServer
from tests.deploy.test_cli import on_free_ports, refused
from tests.deploy.test_repository import OURS, add_model, names
from tests.fakes.adapter_files import write_adapter


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
    keys = tmp_path / "keys"
    keys.touch(0o600)
    keys.write_text("alice secret-of-alice-1\n")
    monkeypatch.setattr(serve, "supervise", lambda server, reporter, *_: reporter.ready() or 0)
    options = ["--api-keys", str(keys)] if given else []
    result = CliRunner().invoke(app, ["serve", *on_free_ports()[:-1], str(Ports.free().http), *options])
    assert result.exit_code == 0 and "/v1/chat/completions" in result.output
    assert ('"Authorization: Bearer $KEY"' in result.output) is given and "secret-of-alice-1" not in result.output


def test_adapters_reach_the_engine_and_the_endpoint_by_name(
    served: list[TritonServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --lora and with --set; in the configuration, and as names that the OpenAI endpoint takes for models."""
    for name in ("doll", "sheep"):
        write_adapter(tmp_path / name)
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


def test_prompt_adapters_reach_the_engine_and_the_endpoint_by_name(
    served: list[TritonServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    soft = tmp_path / "soft"
    soft.mkdir()
    (soft / "adapter_config.json").write_text('{"peft_type": "PROMPT_TUNING"}')
    save_file({"prompt_embeddings": np.ones((3, 4), np.float32)}, soft / "adapter_model.safetensors")
    monkeypatch.chdir(tmp_path)
    given = ("--set", 'prompt_adapters.adapters=["soft=soft"]')
    assert asked(served, *given).config.prompt_adapters.directories == {"soft": str(soft)}
    made: list[GatewayOptions] = []
    monkeypatch.setattr(serve, "ServerWithGateway", lambda server, options: made.append(options) or server)
    CliRunner().invoke(app, ["serve", *on_free_ports()[:-1], str(Ports.free().http), *given])
    assert made[0].prompt_adapters == ("soft",)
    for wrong, text in {
        '["cow=cow"]': "prompt_adapters.adapters: cow=cow: cow: adapter_model.safetensors: File does not exist",
        '["soft"]': "prompt_adapters.adapters holds 'soft'; write it as NAME=DIRECTORY",
        '["soft=soft","soft=x"]': "prompt_adapters.adapters gives a name twice",
    }.items():
        assert text in " ".join(
            refused("serve", *on_free_ports(), "--set", f"prompt_adapters.adapters={wrong}").split()
        )


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("use_dora", True, "use_dora is true, which is not served"),
        ("peft_type", "IA3", "peft_type is IA3, which is"),
        ("peft_type", None, "peft_type is null"),
        (
            "module",
            "lm_head",
            "tensor base_model.model.lm_head.lora_A.weight is no LoRA of a decoder layer's projection",
        ),
        ("rank", 65, "it has rank 65 in layer 0, q_proj, the limit is 64 (lora.max_rank)"),
    ],
)
def test_an_adapter_of_another_kind_is_refused_before_anything_is_started(
    key: str, value: object, sentence: str, tmp_path: Path
) -> None:
    """By --lora and by --set alike. What TensorRT-LLM's converter has written has no such file, and is left to the engine."""
    write_adapter(tmp_path, **{key: value})
    listed = json.dumps([f"doll={tmp_path}"])
    for given in (("--lora", f"doll={tmp_path}"), ("--set", "lora.enabled=true", "--set", f"lora.adapters={listed}")):
        said = " ".join(refused("serve", *on_free_ports(), *given).split())
        assert sentence in said and "doll=" in said, said
    (tmp_path / "adapter_config.json").rename(tmp_path / "model.lora_config.npy")
    assert with_adapters(EngineConfig(), (f"doll={tmp_path}",)).lora.directories == {"doll": str(tmp_path)}


def model_without_template(directory: Path) -> Path:
    copy = Path(shutil.copytree(DEFAULT_MODEL, directory))
    (copy / "chat_template.jinja").unlink()
    return copy


TEMPLATE = "{% for message in messages %}{{ bos_token + message.role + ': ' + message.content }}{% endfor %}"


@pytest.mark.parametrize("given", ["option", "setting"])
def test_a_chat_template_reaches_the_engines_configuration_as_an_absolute_path(
    served: list[TritonServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    (tmp_path / "mine.jinja").write_text(TEMPLATE)
    monkeypatch.chdir(tmp_path)
    option = ("--chat-template", "mine.jinja") if given == "option" else ("--set", "model.chat_template=mine.jinja")
    assert asked(served, *option).config.model.chat_template == str(tmp_path / "mine.jinja")
    assert asked(served).config.model.chat_template == ""


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (None, "File does not exist; give a file with a Jinja template"),
        ("{% for", "the chat template is not valid at line 1"),
        ("{{ messages[7].content.strip() }}", "the chat template cannot render these messages (UndefinedError)"),
        ("{{ raise_exception('no users') }}", "the chat template refuses these messages: no users"),
        ("x" * 70_000, "has 70000 characters, at most 65536 are compiled"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}long{% endfor %}{% endfor %}", "longer than 4000000"),
    ],
)
def test_a_template_that_does_not_work_is_one_sentence_before_anything_is_started(
    tmp_path: Path, source: str | None, sentence: str
) -> None:
    file = tmp_path / "mine.jinja"
    if source is not None:
        file.write_text(source)
    said = " ".join(refused("serve", *on_free_ports(), "--chat-template", str(file)).split())
    assert sentence in said and f"--chat-template {file}:" in said


def test_a_template_that_no_model_would_use_is_refused(tmp_path: Path) -> None:
    add_model(tmp_path / "models", "mine", 'name: "mine"\nbackend: "identity"\n')
    (tmp_path / "mine.jinja").write_text(TEMPLATE)
    options = ("--model-repository", str(tmp_path / "models"), "--chat-template", str(tmp_path / "mine.jinja"))
    assert "no model of this server would use it" in " ".join(refused("serve", *on_free_ports(), *options).split())


def test_what_is_no_file_is_no_template(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        assert "a file is needed" in " ".join(refused("serve", *on_free_ports(), "--chat-template", str(path)).split())


@pytest.mark.parametrize("given", [True, False])
def test_a_model_without_a_chat_template_is_shown_without_chats_unless_one_is_given(
    given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "supervise", lambda server, reporter, *_: reporter.ready() or 0)
    (tmp_path / "mine.jinja").write_text(TEMPLATE)
    model = model_without_template(tmp_path / "model")
    options = ["--chat-template", str(tmp_path / "mine.jinja")] if given else []
    ports = [*on_free_ports()[:-1], str(Ports.free().http)]
    said = CliRunner().invoke(app, ["serve", *ports, "--model", str(model), *options]).output
    assert ("/v1/chat/completions" in said) is given and ("everbatch chat" in said) is given
    assert ("this model has no chat template" in said) is not given
    assert ("/v1/completions" in said) is not given and "everbatch generate" in said


def test_the_settings_that_are_the_default_are_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "supervise", lambda *_: 0)
    arguments = ["serve", *on_free_ports(), "--set", "kv_cache.max_tokens=4096", "--set", "triton.decoupled=false"]
    said = CliRunner().invoke(app, arguments).output
    assert [line.split() for line in said.splitlines() if "--set" in line] == [
        ["changed", "--set", "kv_cache.max_tokens=4096"],
        ["--set", "triton.decoupled=false"],
    ]
    assert "memory for 4,096 tokens, which is 2 sequences of 2,048" in said and "max_batch_size" not in said
    assert "max_batch_size=64" in CliRunner().invoke(app, [*arguments, "--verbose"]).output


def test_the_help_names_every_profile() -> None:
    shown = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).output
    assert f"Which clients are served: {', '.join(profiles())};" in " ".join(shown.replace("│", " ").split())


def test_unary_twins_and_an_open_repository_reach_the_server(served: list[TritonServer]) -> None:
    server = asked(served, "--set", "triton.decoupled=both")
    assert {"ensemble", "ensemble_unary", "tensorrt_llm_unary"} <= set(names(server.models))
    assert not server._open_repository and "ensemble_unary" not in names(asked(served).models)
    result = CliRunner().invoke(app, ["serve", *on_free_ports(), "--open-repository"])
    assert served.pop()._open_repository
    assert "warning: the model repository API asks for no key (--open-repository): whoever reaches" in result.output


def test_several_models_reach_the_server_and_the_endpoint(served: list[Any], tmp_path: Path) -> None:
    file = tmp_path / "models.json"
    entry = {"path": str(DEFAULT_MODEL), "memory": 0.25}
    file.write_text(json.dumps({"models": {"a": entry, "b": {**entry, "names": ["org/b"], "threads": 3}}}))
    result = CliRunner().invoke(
        app, ["serve", *on_free_ports(), "--models", str(file), "--openai-port", str(Ports.free().http)]
    )
    assert result.exit_code == 0, result.output
    assert "b         256 MiB for weights and KV" in result.output and "clients say b, org/b" in result.output
    options, server = served[-1].options, served[-1].server
    assert options.names == ("everbatch", "a") and options.metrics_label == "a"
    (other,) = options.others
    assert (other.triton_model, other.names, other.label) == ("b.everbatch", ("b", "org/b"), "b")
    assert {"a.engine", "ensemble", "b.engine", "b.ensemble", "b.tensorrt_llm"} <= set(names(server.models))
    assert server.sets[1].engine.share.config.model.num_threads == 3


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--model", f"a={DEFAULT_MODEL}", "--models", "m.json"], "--models and --model both say what is served"),
        (["--model", f"a={DEFAULT_MODEL}", "--model", str(DEFAULT_MODEL)], "several models need names"),
        (
            ["--model", f"a={DEFAULT_MODEL}", "--lora", "doll=x"],
            "--lora does not say which of several models it is for",
        ),
        (["--model", f"a={DEFAULT_MODEL}", "--model", "b=/nowhere"], "model b: --model /nowhere: there is no such"),
        (["--models", "/nowhere/m.json"], "--models m.json: it cannot be read"),
    ],
)
def test_what_is_wrong_with_several_models_is_one_sentence(arguments: list[str], sentence: str) -> None:
    assert sentence in refused("serve", *on_free_ports(), *arguments)


def test_two_engines_do_not_get_one_directory(tmp_path: Path) -> None:
    both = ["--model", f"a={DEFAULT_MODEL}", "--model", f"b={DEFAULT_MODEL}", "--set", f"sessions.directory={tmp_path}"]
    assert f"models a and b both have sessions.directory={tmp_path}" in refused("serve", *on_free_ports(), *both)
