"""The OpenAI endpoint beside a server: stand-ins for both, scripts that are started as the real ones are."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from backend.api.config.schema import EngineConfig
from deploy import __version__, cli, gateway, invocation, serve
from deploy.errors import ServerFailed, UserError
from deploy.gateway import GatewayOptions, ServerWithGateway
from deploy.invocation import Installation
from deploy.ports import Ports
from deploy.report import examples
from deploy.triton_server import TritonServer

SERVER = f"""#!{sys.executable}
import threading, time
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
time.sleep(600)
"""
ENDPOINT = """
import os, signal, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

def leave(number, frame):
    print("asked to leave", flush=True)
    os._exit(0)

signal.signal(signal.SIGTERM, leave)
print(*sys.argv[1:], "run", os.environ["EVERBATCH_RUN_ID"], "log", os.environ["EVERBATCH_LOG_FORMAT"], flush=True)
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TritonServer:
    script = tmp_path / "tritonserver"
    script.write_text(SERVER)
    script.chmod(0o755)
    monkeypatch.setattr(invocation, "find_installation", lambda: Installation(script))
    server = TritonServer(EngineConfig(), run_dir=tmp_path / "run", exit_timeout_s=7)
    monkeypatch.setattr(server, "wait_ready", lambda *_, **__: None)
    return server


Make = Callable[[str], ServerWithGateway]


@pytest.fixture
def make(server: TritonServer, tmp_path: Path) -> Iterator[Make]:
    made: list[ServerWithGateway] = []

    def build(program: str) -> ServerWithGateway:
        (tmp_path / "endpoint.py").write_text(program)
        keys = tmp_path / "keys"
        options = GatewayOptions(
            Ports.free().http,
            api_keys=keys,
            names=("everbatch", "own"),
            adapters=("doll",),
            allow_image_hosts=("a.example,*.b.example",),
        )
        made.append(ServerWithGateway(server, options, (sys.executable, str(tmp_path / "endpoint.py"))))
        return made[-1]

    yield build
    for both in made:
        both.kill()


def start(both: ServerWithGateway) -> None:
    both.start()
    both.wait_ready(60, on_phase=lambda phase: None)


def wait_until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_the_endpoint_is_told_where_the_server_is_and_whom_it_may_serve(make: Make, server: TritonServer) -> None:
    server.log_format = "json"
    both = make(ENDPOINT)
    start(both)
    said = both.log_path.read_text()
    assert f"--triton {server.grpc_url} --host 127.0.0.1 --port {both.options.port}" in said
    assert f"--server-version {__version__}" in said and "--allow-image-hosts=a.example,*.b.example" in said
    assert f"--metrics-url {server.metrics_url}" in said and "--shutdown-grace-s 7" in said
    assert (
        f"--api-keys {both.options.api_keys}" in said and "--model-name everbatch --model-name own --lora doll" in said
    )
    assert f"run {server.run_id} log json" in said  # so that whatever ends the server's processes ends it too
    assert both.failure() is None


def test_an_endpoint_that_dies_is_started_again_and_the_server_goes_on(make: Make, server: TritonServer) -> None:
    told: list[str] = []
    server.on_event = told.append
    both = make(ENDPOINT)
    start(both)
    first, server_pid = both._process, server.pid
    assert first is not None
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    assert wait_until(lambda: both.failure() is None and both._process is not first)
    assert wait_until(both._answers)
    assert "the OpenAI endpoint was ended by signal 9 (SIGKILL); starting it again in 0.5 s" in told[0]
    assert len(told) == 1 and server.pid == server_pid and server.running()


def test_an_endpoint_that_dies_again_and_again_is_started_ever_later_and_never_given_up(
    make: Make, server: TritonServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    server.on_event = told.append
    both = make("raise SystemExit(3)")
    clock = itertools.count()
    both.start()
    monkeypatch.setattr(
        gateway, "time", SimpleNamespace(monotonic=lambda: float(next(clock)))
    )  # a second for each look
    monkeypatch.setattr(both, "_status", lambda: 3)
    for _ in range(200):
        both.failure()
    delays = [line.split(" in ")[1].split(" s;")[0] for line in told]
    assert delays[:8] == ["0.5", "1", "2", "4", "8", "16", "30", "30"] and len(delays) > 8


def test_stop_asks_the_endpoint_to_leave_and_leaves_no_process(make: Make, server: TritonServer) -> None:
    both = make(ENDPOINT)
    start(both)
    both.stop()
    assert "asked to leave" in both.log_path.read_text()
    assert not server.processes() and both._process is None


def test_kill_ends_an_endpoint_that_does_not_listen(make: Make, server: TritonServer) -> None:
    both = make("import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)")
    both.start()
    process = both._process
    both.kill()
    assert process is not None and process.returncode is not None and not server.processes()


def test_an_endpoint_outlives_a_server_that_is_started_again_and_leaves_with_it_in_the_end(
    make: Make, server: TritonServer
) -> None:
    both = make(ENDPOINT)
    start(both)
    endpoint, former = both._process, server.pid
    assert endpoint is not None
    both.abandon()
    assert not server.running() and both._answers(), "it goes on answering while there is no server"
    start(both)
    assert both._process is endpoint and server.pid != former
    assert set(server.processes()) == {endpoint.pid, server.pid}
    both.abandon()
    both.kill()
    assert endpoint.returncode == 0, "it was asked to leave, and not killed, while its clients are told"
    assert not server.processes() and "asked to leave" in both.log_path.read_text()


def test_a_full_disk_is_told_of_the_endpoints_log_once_and_ends_nothing(
    make: Make, server: TritonServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    server.on_event = told.append
    both = make(ENDPOINT)
    start(both)
    troubles: list[str | None] = ["no space", "no space", None, "no space"]
    monkeypatch.setattr(gateway.log_files, "look_after", lambda path: troubles.pop(0))
    assert [both.failure() for _ in range(4)] == [None] * 4
    assert told == ["no space", "no space"]


def test_an_endpoint_that_does_not_come_up_fails_the_start_with_its_last_words(make: Make) -> None:
    both = make("raise SystemExit('gateway: keys: mode 0644, must be 0600')")
    with pytest.raises(
        ServerFailed, match="the OpenAI endpoint ended with exit status 1; the log is .*gateway.log"
    ) as error:
        start(both)
    assert "must be 0600" in error.value.log_tail


@pytest.fixture
def free() -> int:
    return Ports.free().http


def test_a_taken_port_is_named_with_its_option(free: int) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", free))
        other.listen(1)
        with pytest.raises(UserError, match=f"port {free} on 127.0.0.1 is already in use; .* with --openai-port PORT"):
            GatewayOptions(free).check(())


def test_a_port_out_of_range_or_given_twice_is_refused(free: int) -> None:
    with pytest.raises(UserError, match="--openai-port is 70000, allowed is 1 to 65535, or 0"):
        GatewayOptions(70000).check(())
    with pytest.raises(UserError, match=f"port {free} is given twice"):
        GatewayOptions(free).check((1, free))


def test_a_host_of_images_that_is_none_is_refused(free: int) -> None:
    with pytest.raises(UserError, match="--allow-image-hosts 'https://b' is no host; write it as"):
        GatewayOptions(free, allow_image_hosts=("a.example,https://b",)).check(())


def test_a_key_file_that_is_not_there_is_refused(free: int, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--api-keys .*none is no file"):
        GatewayOptions(free, api_keys=tmp_path / "none").check(())
    with pytest.raises(UserError, match="--lora own=...: clients know the model by this name"):
        GatewayOptions(free, names=("everbatch", "own"), adapters=("own",)).check(())


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("alice", "line 2 of the file of API keys is not NAME KEY"),
        ("alice short", "the key in line 2 is not 16 or more ASCII characters"),
        (
            "alice 0123456789abcdef models=own,cow",
            "line 2 of the file of API keys names model 'cow', there are own, doll",
        ),
    ],
)
def test_a_key_file_that_is_wrong_ends_the_start_with_the_line(
    line: str, sentence: str, free: int, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"# tenants\n{line}\n")
    keys.chmod(0o600)
    options = GatewayOptions(free, api_keys=keys, names=("own",), adapters=("doll",))
    with pytest.raises(UserError, match=f"^--api-keys {keys}: {sentence}") as caught:
        options.check(())
    assert "0123456789abcdef" not in str(caught.value)
    keys.write_text("alice 0123456789abcdef models=own,doll\n")
    options.check(())


@pytest.mark.parametrize("name", ["", "x" * 257])
def test_a_name_that_no_request_can_have_is_refused(name: str, free: int) -> None:
    with pytest.raises(UserError, match="^--served-model-name '.*': a name has 1 to 256 characters"):
        GatewayOptions(free, names=(name,)).check(())


def test_without_the_package_the_remedy_is_named(free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="give --openai-port 0"):
        GatewayOptions(free).check(())


def test_serve_starts_the_endpoint_unless_its_port_is_zero(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    served: list[object] = []
    monkeypatch.setattr(serve, "supervise", lambda server, *_: served.append(server) or 0)
    monkeypatch.setattr(GatewayOptions, "check", lambda *_: None)
    ports = Ports.free()
    taken = ["--http-port", str(ports.http), "--grpc-port", str(ports.grpc), "--metrics-port", str(ports.metrics)]
    for port in ("0", str(free)):
        result = CliRunner().invoke(cli.app, ["serve", *taken, "--openai-port", port, "--openai-host", "::1"])
        assert result.exit_code == 0, result.output
    assert isinstance(served[0], TritonServer) and isinstance(served[1], ServerWithGateway)
    assert (served[1].options.port, served[1].options.host) == (free, "::1")


def test_the_model_has_its_own_name_and_those_that_it_was_started_by(tmp_path: Path) -> None:
    options = lambda model: serve.ServeOptions(model, openai_port=1)
    assert options("").served_names == ("everbatch",)
    assert options("owner/name").served_names == ("name", "everbatch", "owner/name")
    assert options("owner/name-GGUF:Q4_K_M").served_names == ("name-GGUF", "everbatch", "owner/name-GGUF:Q4_K_M")
    assert options(str(tmp_path)).served_names == (tmp_path.name, "everbatch", str(tmp_path))
    asked = serve.ServeOptions("owner/name", openai_port=1, model_names=("big", "small", "everbatch"))
    assert asked.served_names == ("big", "small", "everbatch"), "in the order in which /v1/models lists them"
    assert serve.ServeOptions(model_names=("big",)).served_names == ("big", "everbatch")


def test_others_that_reach_the_endpoint_without_a_key_are_warned_about() -> None:
    open_to_all = serve.ServeOptions(host="0.0.0.0", openai_port=9000).gateway
    assert open_to_all is not None and open_to_all.host == "0.0.0.0"
    text = serve.open_endpoint(open_to_all)
    assert "--api-keys FILE" in text and "0.0.0.0:9000" in text


def test_the_console_shows_how_to_ask_it(server: TritonServer) -> None:
    assert any("http://here:1/v1/chat/completions" in line for line in examples(server, "http://here:1"))
    assert not any("/v1/" in line for line in examples(server, None))


def test_the_formats_of_the_endpoint_are_those_of_the_chat_template_unless_they_are_given() -> None:
    template = "{{ '[TOOL_CALLS]' }}<think></think>"
    found = GatewayOptions(9000).with_formats_of(template)
    assert (found.tool_format, found.reasoning_format) == ("mistral", "think")
    given = GatewayOptions(9000, tool_format="llama", reasoning_format="none").with_formats_of(template)
    assert (given.tool_format, given.reasoning_format) == ("llama", "none")
    plain = GatewayOptions(9000).with_formats_of("")
    assert (plain.tool_format, plain.reasoning_format) == ("hermes", "none")
    for fields in ({"tool_format": "xml"}, {"reasoning_format": "xml"}):
        with pytest.raises(UserError, match="'xml' is not known; allowed are auto, "):
            GatewayOptions(Ports.free().http, **fields).check(())
