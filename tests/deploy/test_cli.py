"""The command line: errors are one sentence on standard error, before anything is started."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from backend.api import EngineConfig
from deploy import ROOT, __version__, cli, environment, serve
from deploy.cli import app
from deploy.errors import UserError
from deploy.ports import Ports
from deploy.report import differences, effective
from deploy.serve import ServeOptions, effective_config
from deploy.triton_server import TritonServer


@pytest.fixture(autouse=True)
def nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TritonServer, "_start_process", lambda *_: pytest.fail("a server was started"))


def refused(*arguments: str) -> str:
    """Run `everbatch ARGUMENTS`, expect status 2, return what it said: one line."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    (line,) = [line for line in result.stderr.splitlines() if line.strip()]
    assert line.startswith("everbatch: ")
    return line


def on_free_ports() -> list[str]:
    ports = Ports.free()
    return [
        "--http-port",
        str(ports.http),
        "--grpc-port",
        str(ports.grpc),
        "--metrics-port",
        str(ports.metrics),
        "--openai-port",
        "0",
    ]


def test_an_unknown_setting_is_named() -> None:
    line = refused("serve", *on_free_ports(), "--set", "kv_cache.max_tokns=3")
    assert "kv_cache.max_tokns" in line and "did you mean kv_cache.max_tokens?" in line


def test_a_setting_out_of_range_names_value_limit_and_remedy() -> None:
    line = refused("serve", *on_free_ports(), "--set", "triton.sender_threads=1000")
    assert "triton.sender_threads is 1000" in line and "1 to 64" in line and "--set" in line


def test_a_port_in_use_is_named_with_its_option() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen(1)
        taken = str(other.getsockname()[1])
        line = refused("serve", *on_free_ports()[:2], "--grpc-port", taken)
    assert taken in line and "--grpc-port PORT" in line


def test_a_missing_configuration_file_is_named(tmp_path: Path) -> None:
    assert "none.json" in refused("serve", *on_free_ports(), "--engine-config", str(tmp_path / "none.json"))


@pytest.mark.parametrize("name", ["./no/such/model", "nosuchmodel", "a/b/c"])
def test_a_model_that_is_nowhere_is_named(name: str) -> None:
    assert f"--model {name}" in refused("serve", *on_free_ports(), "--model", name)


def test_a_directory_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    assert "is no checkpoint" in refused("serve", *on_free_ports(), "--model", str(tmp_path))


def test_an_empty_model_repository_is_refused(tmp_path: Path) -> None:
    assert "holds no model" in refused("serve", *on_free_ports(), "--model-repository", str(tmp_path))


def test_an_unknown_benchmark_is_refused() -> None:
    assert "no benchmark 'nope'" in refused("bench", "nope")


def test_benchmarks_are_listed_packages_too_and_their_help_is_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments in (["bench"], ["bench", "--help"]):
        listed = CliRunner().invoke(app, arguments)
        assert listed.exit_code == 0 and listed.output.split()[-len(cli.benchmarks()) :] == cli.benchmarks()
        assert {"gpu", "peers"} <= set(listed.output.split())
    commands = []
    done = subprocess.CompletedProcess([], 0)
    monkeypatch.setattr(cli.subprocess, "run", lambda command, **_: commands.append(command) or done)
    assert CliRunner().invoke(app, ["bench", "gpu", "--help"]).exit_code == 0
    assert commands[0][1:] == ["-m", "benchmarks.gpu", "--help"]


def test_wrong_options_are_one_sentence_too() -> None:
    for arguments in (["serve", "--no-such-option"], ["serve", "--http-port", "x"], ["nocommand"], ["generate"]):
        result = subprocess.run(
            [sys.executable, "-P", "-m", "deploy.cli", *arguments],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False,
        )  # fmt: skip
        assert result.returncode == 2
        assert len(result.stderr.strip().splitlines()) == 1 and result.stderr.startswith("everbatch: ")


@pytest.mark.parametrize("url", ["127.0.0.1:1", "http://127.0.0.1:1"])
@pytest.mark.parametrize("command", [["generate", "hello"], ["chat"]])
def test_no_server_names_the_url_and_how_to_start_one(command: list[str], url: str) -> None:
    result = CliRunner().invoke(app, [*command, "--url", url], input="hello\n")
    assert result.exit_code == 1
    assert f"no server answers at {url}; start one with ./everbatch serve" in result.stderr


def test_the_version_is_printed() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0 and result.stdout.strip() == f"everbatch {__version__}"


def test_file_overrides_and_model_option_are_applied_in_this_order(tmp_path: Path) -> None:
    file = tmp_path / "engine.json"
    file.write_text('{"kv_cache": {"max_tokens": 100, "block_size": 16}, "model": {"path": "ignored"}}')
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_text("")
    config = effective_config(ServeOptions(str(model), engine_config=file, overrides=("kv_cache.max_tokens=200",)))
    assert (config.kv_cache.max_tokens, config.kv_cache.block_size) == (200, 16)
    assert config.model.path == str(model)


def test_a_hub_id_that_cannot_be_downloaded_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def no_network(*_: object, **__: object) -> None:
        raise ConnectionError("unreachable")

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", no_network)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_network)
    with pytest.raises(
        UserError, match="--model owner/name is not in the local cache and cannot be downloaded"
    ) as caught:
        serve.resolve_model("owner/name")
    assert "\n" not in str(caught.value)


def test_only_changed_settings_are_listed_as_changed() -> None:
    config = serve.load_config(None, ["triton.decoupled=false", "kv_cache.max_tokens=64"])
    assert differences(config) == ["kv_cache.max_tokens=64", "triton.decoupled=false"]
    assert differences(serve.load_config()) == []
    lines = effective(config)
    assert len(lines) == len(EngineConfig.__struct_fields__)
    lines = [line for line in lines if "=" in line]  # A section may have nothing that is set.
    assert len({line.index("=") - len(line.split()[1].split("=")[0]) for line in lines}) == 1, "all begin in one column"


@pytest.mark.parametrize("host, warned", [("127.0.0.1", False), ("0.0.0.0", True)])
def test_an_address_that_others_reach_is_warned_about_with_what_must_stand_in_front(
    host: str, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "supervise", lambda *_: 0)
    output = CliRunner().invoke(app, ["serve", *on_free_ports(), "--host", host]).output
    assert ("warning: others reach this server" in output) == warned
    assert ("deploy/nginx.conf" in output and "docs/behind-a-proxy.md" in output) == warned


def test_what_the_warning_names_is_there() -> None:
    text = serve.exposed(ServeOptions(host="0.0.0.0"))
    for name in ("deploy/nginx.conf", "docs/behind-a-proxy.md"):
        assert name in text and (ROOT / name).is_file()


@pytest.mark.parametrize("what", ["/dev/zero", "/", "large", "no UTF-8", "deep", "many digits"])
def test_a_configuration_that_is_no_file_of_a_reasonable_size_is_one_sentence(tmp_path: Path, what: str) -> None:
    path = Path(what)
    if not path.is_absolute():
        path = tmp_path / "config.json"
        contents = {"large": b" " * (1 << 20) + b"{}", "no UTF-8": b"\xff\xfe\xfd", "deep": b"[" * 100_000}
        path.write_bytes(contents.get(what, b'{"a": ' + b"1" * 5000 + b"}"))
    line = refused("serve", *on_free_ports(), "--engine-config", str(path))
    assert "configuration file" in line and "name a JSON file" in line


PROGRAM = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
os.kill(os.getpid(), signal.SIGINT)
from deploy.{module} import main
sys.argv[1:] = ["--version"]
{call}
"""


@pytest.mark.parametrize(
    "module, call, status",
    [("cli", "main()", 130), ("entry", "main()", 130), ("environment", f"main({str(ROOT)!r}, ['--version'])", 1)],
)
def test_ctrl_c_while_the_program_is_being_loaded_is_no_traceback(module: str, call: str, status: int) -> None:
    """It is pressed before the first import of ours, and waits until it can be answered."""
    program = PROGRAM.format(module=module, call=call)
    done = subprocess.run([sys.executable, "-c", program, str(ROOT)], capture_output=True, text=True, check=False)
    assert done.returncode == status and "Traceback" not in done.stderr, done.stderr
    assert "everbatch 0" not in done.stdout


def test_the_launcher_lets_ctrl_c_wait_until_its_python_can_answer_it() -> None:
    """The program it becomes is a script that only says which signals wait."""
    lines = (ROOT / "everbatch").read_text().splitlines()
    blocked = next(number for number, line in enumerate(lines) if "SIG_BLOCK" in line)
    assert all(not line.startswith(("from deploy", "import deploy")) for line in lines[:blocked])
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from deploy.environment import main; main('/', [])"
    shows = (
        f"#!{sys.executable} -S\nimport signal\nprint(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))\n"
    )
    with tempfile.TemporaryDirectory() as directory:
        python = Path(directory, "python")
        python.write_text(shows)
        python.chmod(0o755)
        said = subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"EVERBATCH_PYTHON": str(python)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    assert said == "True\n"


def test_a_checkout_whose_path_holds_a_colon_is_refused_in_one_sentence() -> None:
    with pytest.raises(SystemExit, match="the path /a:b holds a colon, .* move the checkout"):
        environment.main("/a:b", [])
