"""The lines that `everbatch serve` prints."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape

from backend.api.config.schema import EngineConfig
from deploy import COMMAND, ROOT, server_log
from deploy.engine_sets import OWN_MODEL
from deploy.ports import Ports, reachable, seen_from_elsewhere, url_host
from deploy.questions import TOKENS, shown_model
from deploy.triton_server import TritonServer

COMMAND_LINE_MODEL = "ensemble"  # the model of `generate` and `chat` without --model-name
# Roles of models that they can ask -> over which protocol. Triton makes tensors of the older, unsigned types over HTTP only.
COMMAND_LINE_ROLES = {"ensemble": "grpc", "tensorrt_llm_bls": "grpc", "ensemble_uint32": "http"}
DEFAULT_GRPC_URL = "127.0.0.1:8001"  # their server without --url
CODE, TEXT, QUESTION = "def main(", "The capital of France is", "What is the capital of France?"
DEFAULT_MODEL = ROOT / "models" / "default"
NO_CHAT = "this model has no chat template, so it continues texts and does not chat; --chat-template FILE gives it one"


def differences(config: EngineConfig) -> list[str]:
    """The settings that are not the default, as the `--set` arguments that would make them. The model is none of them."""
    default, actual = msgspec.to_builtins(EngineConfig()), msgspec.to_builtins(config)
    return [
        f"{section}.{key}={_plain(value)}"
        for section, values in actual.items()
        for key, value in values.items()
        if value != default[section][key] and (section, key) != ("model", "path")
    ]


def effective(config: EngineConfig) -> list[str]:
    """Every setting that has a value, a line per section."""
    sections: dict[str, dict[str, Any]] = msgspec.to_builtins(config)
    width = max(map(len, sections))
    return [
        f"{section:<{width}} "
        + "  ".join(f"{key}={_plain(value)}" for key, value in values.items() if value not in (None, ""))
        for section, values in sections.items()
    ]


def _plain(value: object) -> str:
    """As --set takes it."""
    return json.dumps(value) if isinstance(value, bool | tuple) else str(value)


def addresses(host: str, ports: Ports) -> list[tuple[str, str]]:
    """(name, address) of each port. A server that listens on every interface has an address for this machine and one for
    others.
    """
    found = []
    for suffix, address in (("", reachable(host)), (" from elsewhere", seen_from_elsewhere(host))):
        if address is not None:
            name = url_host(address)
            found.append(("HTTP", f"http://{name}:{ports.http}{suffix}"))
            found.append(("gRPC", f"{name}:{ports.grpc}{suffix}"))
            if not suffix:  # Others have no business with the metrics (docs/behind-a-proxy.md).
                found.append(("metrics", f"http://{name}:{ports.metrics}/metrics"))
    return found


def examples(
    server: TritonServer,
    openai_url: str | None,
    *,
    keys: bool = False,
    chats: bool = True,
    generates: bool = True,
    name: str = OWN_MODEL,
) -> list[str]:
    """Commands that ask this server for text, by models that it has, or for an embedding where the model does not generate.
    `keys`: the OpenAI endpoint asks for one, and knows the model by `name`; `chats`: the model has a chat template.
    """
    start_of_text = CODE if server.config.model.path in ("", str(DEFAULT_MODEL)) else TEXT
    headers = "-H 'Content-Type: application/json'" + ' -H "Authorization: Bearer $KEY"' * keys
    if not generates:
        body = json.dumps({"model": name, "input": ["Hello"]})
        return [] if openai_url is None else [f"curl {openai_url}/v1/embeddings {headers} -d '{body}'"]
    found = []
    if shown := shown_model(server.models):
        form, model = shown
        streams = model.streams(bool(server.config.triton.decoupled))
        body = json.dumps(form.body(start_of_text, 16 if form is TOKENS else 64, streams))
        start, verb = ("curl -N", "generate_stream") if streams else ("curl", "generate")
        found.append(f"{start} {server.http_url}/v2/models/{model.name}/{verb} -d '{body}'")
    if openai_url is not None:
        way = "chat/completions" if chats else "completions"
        asked = {"messages": [{"role": "user", "content": QUESTION}]} if chats else {"prompt": start_of_text}
        body = json.dumps({"model": name, **asked, "max_tokens": 64})
        found.append(f"curl {openai_url}/v1/{way} {headers} -d '{body}'")
    if (options := _command_line_options(server)) is not None:
        found.append(f'{COMMAND} generate "{start_of_text}" --max-tokens 64{options}')
        found += [f"{COMMAND} chat{options}"] * chats
    return found


def _command_line_options(server: TritonServer) -> str | None:
    """Options that `generate` and `chat` need for this server; None if it has no model for them."""
    fitting = {
        model.name: COMMAND_LINE_ROLES[model.role] for model in server.models if model.role in COMMAND_LINE_ROLES
    }
    if not fitting:
        return None
    name = COMMAND_LINE_MODEL if COMMAND_LINE_MODEL in fitting else next(iter(fitting))
    url = server.grpc_url if fitting[name] == "grpc" else server.http_url
    options = f" --url {url}" if url != DEFAULT_GRPC_URL else ""
    return options + (f" --model-name {name}" if name != COMMAND_LINE_MODEL else "")


class ConsoleReporter:
    """Progress of a server on a console: a line per phase with its duration, then how to talk to it."""

    def __init__(
        self,
        console: Console,
        server: TritonServer,
        openai_url: str | None = None,
        *,
        keys: bool = False,
        chats: bool = True,
        generates: bool = True,
        name: str = OWN_MODEL,
    ) -> None:
        """`openai_url`: of the OpenAI endpoint, if there is one; `keys`: whether it asks for one. `chats`: whether the model has
        a chat template. `generates`: false for a model that makes embeddings only. `name`: by which the endpoint knows it.
        """
        self._console = console
        self._server = server
        self._openai_url = openai_url
        self._keys = keys
        self._chats = chats
        self._generates = generates
        self._name = name
        self._phase: str | None = None
        self._phase_began = self._began = time.monotonic()

    def phase(self, text: str) -> None:
        now = time.monotonic()
        if self._phase is None:
            self._began = now
        self._finish_phase(now)
        self._phase, self._phase_began = text, now
        if self._console.is_terminal:
            self._print(f"[dim]  ...  {escape(text)}[/dim]", end="\r")
        elif (
            "compiling" in text
        ):  # it takes minutes, and other phases seconds: a reader of the file must not take it for a hang
            self._line(f"   ...    {escape(text)}")

    def ready(self) -> None:
        now = time.monotonic()
        self._finish_phase(now)
        server = self._server
        with_token = ", with one token generated" if server.text_model else ""
        self._line(f"[green]ready[/green] after {now - self._began:.1f} s{with_token}\n")
        for name, value in addresses(server.host, server.ports):
            self._print(f"  {name:<8} {value}")
        if self._openai_url is not None:
            self._print(f"  {'OpenAI':<8} {self._openai_url}/v1")
            self._print(f"  {'page':<8} {self._openai_url}")
        self._print(f"  {'log':<8} {escape(str(server.log_path))}\n")
        for remark in server_log.remarks(server_log.tail(server.log_path)):
            self._print(f"  [yellow]{escape(remark)}[/yellow]\n")
        if not self._chats and self._generates:
            self._print(f"  [yellow]{NO_CHAT}[/yellow]\n")
        for command in examples(
            server,
            self._openai_url,
            keys=self._keys,
            chats=self._chats,
            generates=self._generates,
            name=self._name,
        ):
            self._print(f"  [cyan]{escape(command)}[/cyan]")
        self._print("\n[dim]Ctrl-C stops it.[/dim]")

    def problem(self, text: str) -> None:
        self._phase = None
        self._line(f"[red]{escape(text)}[/red]")

    def event(self, text: str) -> None:
        """Something that the server lives through. Any thread may call it."""
        self._line(f"[yellow]{escape(text)}[/yellow]")

    def stopping(self) -> None:
        self._line("stopping: running requests may finish; Ctrl-C again stops at once")

    def stopped(self) -> None:
        self._line("stopped; no process of it is left")

    def _finish_phase(self, now: float) -> None:
        if self._phase is not None:
            self._line(f"{now - self._phase_began:5.1f} s  {escape(self._phase)}")
        self._phase = None

    def _line(self, markup: str) -> None:
        """One event, with the time of day in front."""
        self._print(f"[dim]{time.strftime('%H:%M:%S')}[/dim]  {markup}")

    def _print(self, markup: str, end: str = "\n") -> None:
        # The disk is full, or the reader has gone, for which rich ends the program (SystemExit).
        with contextlib.suppress(OSError, SystemExit):
            self._console.print(markup, highlight=False, soft_wrap=True, end=end)
