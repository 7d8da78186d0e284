"""The `serve` command: options -> configuration -> supervised server."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
from rich.console import Console
from rich.markup import escape

from backend.api.config import EngineConfig, check_config, load_config
from backend.api.errors import ConfigError, EverbatchError
from backend.api.gguf import SUFFIX
from backend.api.lora import check_adapter_files
from deploy import passed_flags, rundir
from deploy.errors import UserError
from deploy.gateway import GatewayOptions, ServerWithGateway
from deploy.model_source import resolve_model
from deploy.ports import Ports, is_loopback
from deploy.report import ConsoleReporter, differences, effective
from deploy.repository import compose
from deploy.supervisor import StopSignals, supervise
from deploy.triton_server import TritonServer


@dataclass(frozen=True)
class ServeOptions:
    """The options of `serve`, as given."""

    model: str = ""
    host: str = "127.0.0.1"
    ports: Ports = field(default_factory=Ports)
    engine_config: Path | None = None
    overrides: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()  # NAME=DIRECTORY
    profiles: tuple[str, ...] = ()
    model_repositories: tuple[Path, ...] = ()
    exit_timeout_s: int = 30
    ready_timeout_s: float = 600.0
    log_format: str = "text"
    flags: tuple[str, ...] = ()  # of tritonserver
    openai_port: int = 0  # 0: no OpenAI endpoint
    openai_host: str = ""  # "": the same as `host`
    api_keys: Path | None = None
    verbose: bool = False

    @property
    def gateway(self) -> GatewayOptions | None:
        if self.openai_port == 0:
            return None
        return GatewayOptions(self.openai_port, self.openai_host or self.host, self.api_keys, self.served_names)

    @property
    def served_names(self) -> tuple[str, ...]:
        """What clients may call the model: this project's name, and the hub id or the name of the directory or file, no path."""
        path = Path(self.model)
        own = path.resolve().name if path.is_dir() else path.name.removesuffix(SUFFIX) if path.is_file() else self.model
        return ("everbatch", own) if own and self.model else ("everbatch",)


def effective_config(options: ServeOptions) -> EngineConfig:
    """File, then `--set`, then `--model`, with the model as an absolute directory. Raises UserError in one sentence."""
    try:
        config = load_config(options.engine_config, options.overrides)
        config = with_adapters(config, options.adapters)
    except ConfigError as error:
        raise UserError(str(error)) from None
    name = options.model or config.model.path
    if not name and not any(model.is_ours for model in compose(options.profiles, options.model_repositories)):
        return config  # A repository of the user's own may need no checkpoint of ours.
    path = str(resolve_model(name))
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, path=path))


def with_adapters(config: EngineConfig, given: tuple[str, ...]) -> EngineConfig:
    """The configuration with these LoRA adapters (NAME=DIRECTORY) besides its own. All directories become absolute.

    Raises ConfigError, and UserError for a directory without an adapter, or one of a kind that is not served.
    """
    adapters = (*config.lora.adapters, *given)
    if not adapters:
        return config
    lora = msgspec.structs.replace(config.lora, enabled=config.lora.enabled or bool(given), adapters=adapters)
    config = msgspec.structs.replace(config, lora=lora)
    check_config(config)
    for name, directory in lora.directories.items():
        try:
            check_adapter_files(Path(directory))
        except EverbatchError as error:
            raise UserError(f"--lora {name}={directory}: {error}") from None
    absolute = tuple(f"{name}={Path(directory).resolve()}" for name, directory in lora.directories.items())
    return msgspec.structs.replace(config, lora=msgspec.structs.replace(lora, adapters=absolute))


def serve(options: ServeOptions, console: Console) -> int:
    """Serve until a signal. Returns the exit status; raises UserError or ServerFailed if it does not come up."""
    options.ports.check_free(options.host)
    config = effective_config(options)
    server = _server(options, config)
    gateway = options.gateway
    if gateway is not None:
        gateway = replace(gateway, adapters=tuple(config.lora.directories))
        gateway.check((options.ports.http, options.ports.grpc, options.ports.metrics))
    served = server if gateway is None else ServerWithGateway(server, gateway)
    openai_url = served.url if isinstance(served, ServerWithGateway) else None
    reporter = ConsoleReporter(console, server, openai_url, keys=options.api_keys is not None)
    server.on_event = reporter.event
    _introduce(options, config, console)
    with StopSignals() as signals:
        if options.verbose:
            threading.Thread(target=_follow, args=(server.log_path, console), daemon=True).start()
        status = supervise(served, reporter, signals, options.ready_timeout_s)
    reporter.stopped()
    return status


def _server(options: ServeOptions, config: EngineConfig) -> TritonServer:
    return TritonServer(
        config,
        options.ports,
        rundir.default_run_directory(f"serve-{options.ports.http}"),
        profiles=options.profiles,
        model_repository=options.model_repositories,
        host=options.host,
        exit_timeout_s=options.exit_timeout_s,
        log_format=options.log_format,
        extra_flags=passed_flags.check(options.flags),
    )


def _introduce(options: ServeOptions, config: EngineConfig, console: Console) -> None:
    """Print the settings in force, and what to know before others can reach the server."""
    for line in effective(config):
        console.print(f"[dim]{escape(line)}[/dim]", highlight=False, soft_wrap=True)
    changed = " ".join(f"--set {setting}" for setting in differences(config))
    console.print(f"changed: {escape(changed) or 'nothing'}", highlight=False, soft_wrap=True)
    if not is_loopback(options.host):
        console.print(f"[yellow]{escape(exposed(options))}[/yellow]", highlight=False, soft_wrap=True)
    gateway = options.gateway
    if gateway is not None and gateway.api_keys is None and not is_loopback(gateway.host):
        console.print(f"[yellow]{escape(open_endpoint(gateway))}[/yellow]", highlight=False, soft_wrap=True)


def open_endpoint(gateway: GatewayOptions) -> str:
    return (
        f"warning: others reach the OpenAI endpoint on {gateway.host}:{gateway.port}, and nobody is asked for a key; give "
        "--api-keys FILE, or --openai-host 127.0.0.1"
    )


def exposed(options: ServeOptions) -> str:
    """What to know before others can reach the server."""
    return (
        f"warning: others reach this server on {options.host}, and no authentication is in front of it: Triton asks nobody "
        "for a key and limits no request, and some bodies of a few MB end it. Let only a proxy with a body limit of 1 MB, "
        f"time limits, TLS and keys reach ports {options.ports.http} and {options.ports.grpc}, and nobody "
        f"{options.ports.metrics} (deploy/nginx.conf is one for nginx; docs/behind-a-proxy.md)"
    )


def _follow(path: Path, console: Console) -> None:
    """Copy the growing log to the console; starts over when it is replaced by a shorter one."""
    position = path.stat().st_size if path.is_file() else 0
    while True:
        size = path.stat().st_size if path.is_file() else 0
        position = 0 if size < position else position
        if size > position:
            with path.open("rb") as file:
                file.seek(position)
                console.out(file.read().decode(errors="replace"), end="", highlight=False)
                position = file.tell()
        # The log may be emptied or replaced at any time, so it is looked at again rather than waited for.
        time.sleep(0.2)
