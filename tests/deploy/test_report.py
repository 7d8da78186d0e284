"""What the console says: a time of day on each event, and addresses that can be reached."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from backend.api.config.file import load_config
from backend.api.config.schema import EngineConfig
from deploy import ports as ports_module
from deploy.ports import Ports
from deploy.report import CODE, ConsoleReporter, addresses, examples
from deploy.repository import profiles
from deploy.triton_server import TritonServer
from tests.deploy.test_repository import OURS, add_model


@pytest.fixture
def said(tmp_path: Path) -> tuple[ConsoleReporter, io.StringIO]:
    output = io.StringIO()
    server = TritonServer(EngineConfig(), Ports(), tmp_path)
    return ConsoleReporter(Console(file=output, width=80), server), output


def test_a_file_has_a_phase_of_minutes_at_its_beginning_too(said: tuple[ConsoleReporter, io.StringIO]) -> None:
    reporter, output = said
    reporter.phase("loading the models")
    assert output.getvalue() == ""
    reporter.phase("engine: compiling the native kernels")
    assert output.getvalue().splitlines()[-1].endswith("  ...    engine: compiling the native kernels")
    reporter.ready()
    assert "0.0 s  engine: compiling the native kernels" in output.getvalue()


def test_every_event_has_the_time_of_day(said: tuple[ConsoleReporter, io.StringIO]) -> None:
    reporter, output = said
    reporter.phase("starting tritonserver")
    reporter.phase("loading the models")
    reporter.ready()
    reporter.event("the engine process was ended by signal 9 (SIGKILL)")
    reporter.problem("tritonserver was ended by signal 11 (SIGSEGV)")
    reporter.stopping()
    reporter.stopped()
    timed = [line.split("  ", 1)[1] for line in output.getvalue().splitlines() if re.match(r"\d\d:\d\d:\d\d  ", line)]
    assert [line.strip()[:20] for line in timed] == [
        "0.0 s  starting trit",
        "0.0 s  loading the m",
        "ready after 0.0 s, w",
        "the engine process w",
        "tritonserver was end",
        "stopping: running re",
        "stopped; no process ",
    ]


def test_the_banner_says_what_the_engine_remarks(tmp_path: Path) -> None:
    output = io.StringIO()
    server = TritonServer(EngineConfig(), Ports(), tmp_path)
    remark = "the model runs on torch operators, because [brackets]: replies may differ"
    server.log_path.parent.mkdir(parents=True, exist_ok=True)
    server.log_path.write_text(f"2026 tensorrt_llm WARNING everbatch.supervisor: remark: {remark}\n")
    ConsoleReporter(Console(file=output, width=200), server).ready()
    assert f"  {remark}\n" in output.getvalue()


@pytest.mark.parametrize("command", ["./everbatch", "everbatch"])
def test_the_examples_call_the_program_as_it_can_be_called_here(
    said: tuple[ConsoleReporter, io.StringIO], command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An installed copy is on the PATH, and there is no ./everbatch."""
    reporter, output = said
    monkeypatch.setattr("deploy.report.COMMAND", command)
    reporter.ready()
    assert f"\n  {command} generate" in output.getvalue() and f"\n  {command} chat" in output.getvalue()


OPENAI = "http://127.0.0.1:9000"


def shown(tmp_path: Path, *settings: str, keys: bool = False, ports: Ports | None = None, **served: Any) -> list[str]:
    server = TritonServer(load_config(overrides=list(settings)), ports or Ports(), tmp_path, **served)
    return examples(server, OPENAI, keys=keys)


@pytest.mark.parametrize(
    ("profile", "example"),
    [
        (
            "trtllm",
            'ensemble/generate_stream -d \'{"text_input": "{TEXT}", "max_tokens": 64, "stream": true}\'',
        ),
        (
            "langchain",
            'ensemble/generate_stream -d \'{"text_input": "{TEXT}", "max_tokens": 64, "stream": true}\'',
        ),
        (
            "llmapi",
            'tensorrt_llm/generate_stream -d \'{"text_input": "{TEXT}", "sampling_param_max_tokens": 64',
        ),
        ("lmdeploy", 'lmdeploy_model/generate_stream -d \'{"prompt": "{TEXT}", "max_tokens": 64'),
        (
            "vllm",
            'vllm_model/generate_stream -d \'{"text_input": "{TEXT}", "stream": true, "sampling_parameters"',
        ),
        (
            "turbomind",
            'turbomind/generate_stream -d \'{"input_ids": [10, 11, 12], "input_lengths": 3, "request_output_len"',
        ),
    ],
)
def test_each_profile_is_shown_by_a_model_of_its_own(tmp_path: Path, profile: str, example: str) -> None:
    assert shown(tmp_path, profiles=[profile])[0].startswith(
        f"curl -N http://127.0.0.1:8000/v2/models/{example.replace('{TEXT}', CODE)}"
    )


def test_a_model_that_generates_nothing_is_shown_by_an_embedding(tmp_path: Path) -> None:
    server = TritonServer(load_config(), Ports(), tmp_path)
    (example,) = examples(server, OPENAI, generates=False)
    assert example.startswith(f"curl {OPENAI}/v1/embeddings ") and '"input": ["Hello"]' in example
    assert examples(server, None, generates=False) == []


def test_there_is_an_example_of_every_profile() -> None:
    (mark,) = test_each_profile_is_shown_by_a_model_of_its_own.pytestmark  # type: ignore[attr-defined]
    assert {profile for profile, _ in mark.args[1]} == set(profiles())


@pytest.mark.parametrize("profile", ["trtllm", "langchain", "llmapi"])
def test_a_model_that_does_not_stream_is_shown_with_generate(tmp_path: Path, profile: str) -> None:
    example = shown(tmp_path, "triton.decoupled=false", profiles=[profile])[0]
    assert example.startswith("curl http") and "/generate -d" in example and "true" not in example


@pytest.mark.parametrize("profile", ["vllm", "lmdeploy", "turbomind"])
def test_one_whose_protocol_prescribes_streams_is_shown_streaming_all_the_same(tmp_path: Path, profile: str) -> None:
    settings = ("triton.decoupled=false",)
    assert shown(tmp_path, *settings, profiles=[profile]) == shown(tmp_path, profiles=[profile])


@pytest.mark.parametrize("keys", [True, False])
def test_the_endpoints_example_has_a_place_for_a_key_where_it_asks_for_one(tmp_path: Path, keys: bool) -> None:
    (example,) = [line for line in shown(tmp_path, keys=keys) if OPENAI in line]
    assert ('-H "Authorization: Bearer $KEY"' in example) is keys


def commands(lines: list[str]) -> list[str]:
    """The options behind `./everbatch chat`, and nothing where there is no such example."""
    return [
        line.partition(" chat")[2].strip() for line in lines if " chat" in line.split("-d")[0] and "curl" not in line
    ]


def test_the_command_line_is_shown_with_what_it_has_to_be_told(tmp_path: Path) -> None:
    add_model(tmp_path / "models", "mine", OURS.format(name="mine", role="ensemble"))
    mine = {"model_repository": tmp_path / "models"}
    assert commands(shown(tmp_path)) == [""]
    assert commands(shown(tmp_path, ports=Ports(1, 2, 3))) == ["--url 127.0.0.1:2"]
    assert commands(shown(tmp_path, host="127.0.0.2")) == ["--url 127.0.0.2:8001"]
    assert commands(shown(tmp_path, **mine)) == ["--model-name mine"]
    assert commands(shown(tmp_path, profiles=["vllm"])) == []
    assert commands(shown(tmp_path, profiles=["langchain"])) == ["--url http://127.0.0.1:8000"], "its types are older"


def test_long_events_are_one_line_and_brackets_are_no_markup(said: tuple[ConsoleReporter, io.StringIO]) -> None:
    reporter, output = said
    reporter.event("[bold]" + "x" * 200)
    reporter.problem("[bold]" + "y" * 200)
    first, second = output.getvalue().splitlines()
    assert first.endswith("  [bold]" + "x" * 200) and second.endswith("  [bold]" + "y" * 200)


def test_a_server_for_this_machine_has_its_own_addresses_only() -> None:
    assert addresses("127.0.0.1", Ports()) == [
        ("HTTP", "http://127.0.0.1:8000"),
        ("gRPC", "127.0.0.1:8001"),
        ("metrics", "http://127.0.0.1:8002/metrics"),
    ]


def test_a_server_on_every_interface_has_one_for_others_too_and_never_shows_0_0_0_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("deploy.report.seen_from_elsewhere", lambda host: "10.1.2.3" if host == "0.0.0.0" else None)
    shown = [address for _, address in addresses("0.0.0.0", Ports())]
    assert "http://10.1.2.3:8000 from elsewhere" in shown and "10.1.2.3:8001 from elsewhere" in shown
    assert "http://127.0.0.1:8000" in shown and not any("0.0.0.0" in address for address in shown)
    assert [address for address in shown if ":8002" in address] == ["http://127.0.0.1:8002/metrics"]


def test_the_address_for_others_is_looked_up_only_where_the_server_listens_everywhere() -> None:
    assert ports_module.seen_from_elsewhere("127.0.0.1") is None
    found = ports_module.seen_from_elsewhere("0.0.0.0")
    assert found is None or ports_module.check_port(found, 0, "--http-port") is None, "it is one of this machine's"
