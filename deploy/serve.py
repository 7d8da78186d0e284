"""The `serve` command: options -> configuration -> supervised server."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape

from backend.api.checkpoint.adapter_files import check_adapter_files
from backend.api.checkpoint.prompt_adapter_files import check_prompt_adapter
from backend.api.config.checks import check_config
from backend.api.config.file import load_config
from backend.api.config.schema import EngineConfig
from backend.api.config.telemetry import check_traces
from backend.api.errors import ConfigError, EverbatchError
from backend.architectures.checkpoint import Checkpoint
from deploy import capacity, chat_template, default_model, launch, passed_flags, rundir
from deploy.errors import UserError
from deploy.gateway import GatewayOptions, ServerWithGateway
from deploy.model_source import names_of, resolve_model
from deploy.models_file import Models
from deploy.multi_model import MultiModel
from deploy.multi_model_options import described, of_several, several_of
from deploy.multi_model_server import MultiModelServer
from deploy.ports import Ports, is_loopback
from deploy.report import ConsoleReporter, differences, effective
from deploy.repository import compose
from deploy.supervisor import StopSignals, supervise
from deploy.triton_server import TritonServer

OPEN_REPOSITORY = (
    "warning: the model repository API asks for no key (--open-repository): whoever reaches this server can unload its models, "
    "and run code as its user by loading one"
)


@dataclass(frozen=True)
class ServeOptions:
    """The options of `serve`, as given."""

    model: str = ""
    models: Models | None = None  # several models, in the place of `model`
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
    flags: tuple[str, ...] = ()  # further flags of tritonserver
    open_repository: bool = False
    openai_port: int = 0  # 0: no OpenAI endpoint
    openai_host: str = ""  # "": the same as `host`
    api_keys: Path | None = None
    allow_origins: tuple[str, ...] = ()  # origins of the web pages that may use the OpenAI endpoint
    allow_hosts: tuple[str, ...] = ()  # further names that it answers to without keys
    batches: Path | None = None  # where it keeps files and batches
    allow_image_hosts: tuple[str, ...] = ()  # hosts from which it fetches images of requests
    chat_template: Path | None = None
    tool_format: str = "auto"  # how the model writes tool calls
    reasoning_format: str = "auto"  # how it marks its reasoning
    model_names: tuple[str, ...] = ()  # names for the OpenAI endpoint, instead of the model's own
    verbose: bool = False

    @property
    def gateway(self) -> GatewayOptions | None:
        if self.openai_port == 0:
            return None
        return GatewayOptions(
            self.openai_port,
            self.openai_host or self.host,
            self.api_keys,
            self.served_names,
            tool_format=self.tool_format,
            reasoning_format=self.reasoning_format,
            allow_origins=self.allow_origins,
            allow_hosts=self.allow_hosts,
            allow_image_hosts=self.allow_image_hosts,
            batches=self.batches,
        )

    @property
    def served_names(self) -> tuple[str, ...]:
        """Names that clients may send as `model`, in the order of /v1/models: those of the options, else the model's own and
        what it was started by; and always `everbatch`.
        """
        return tuple(dict.fromkeys((*self.model_names, "everbatch") if self.model_names else names_of(self.model)))


def effective_config(options: ServeOptions) -> EngineConfig:
    """File, then `--set`, then `--model` and `--chat-template`, both with absolute paths. Raises UserError in one sentence."""
    try:
        config = _loaded(options)
        config = with_prompt_adapters(with_adapters(config, options.adapters))
        check_traces(config.telemetry)
    except ConfigError as error:
        raise UserError(str(error)) from None
    name = options.model or config.model.path
    if not name and not _needs_checkpoint(options):
        if options.chat_template is not None:
            raise UserError(
                f"--chat-template {options.chat_template}: no model of this server would use it; leave it out"
            )
        return config  # A repository of the user's own may need no checkpoint of ours.
    model = msgspec.structs.replace(config.model, path=str(resolve_model(name)))
    template = options.chat_template or model.chat_template
    if template:
        model = msgspec.structs.replace(model, chat_template=str(Path(template).expanduser().absolute()))
    return msgspec.structs.replace(config, model=model)


def names_no_model(options: ServeOptions) -> bool:
    """True where a checkpoint is wanted, and neither the options nor the configuration say which. Raises UserError."""
    try:
        return (
            options.models is None and not (options.model or _loaded(options).model.path) and _needs_checkpoint(options)
        )
    except ConfigError as error:
        raise UserError(str(error)) from None


def _loaded(options: ServeOptions) -> EngineConfig:
    return load_config(options.engine_config, options.overrides)


def _needs_checkpoint(options: ServeOptions) -> bool:
    return any(model.is_ours for model in compose(options.profiles, options.model_repositories))


def with_adapters(config: EngineConfig, given: tuple[str, ...]) -> EngineConfig:
    """The configuration with these LoRA adapters (NAME=DIRECTORY) besides its own. All directories become absolute.

    Raises ConfigError, and UserError for a directory without an adapter, or with one that is not served.
    """
    adapters = (*config.lora.adapters, *given)
    if not adapters:
        return config
    lora = msgspec.structs.replace(config.lora, enabled=config.lora.enabled or bool(given), adapters=adapters)
    config = msgspec.structs.replace(config, lora=lora)
    check_config(config)
    for name, directory in lora.directories.items():
        try:
            check_adapter_files(Path(directory), lora.max_rank)
        except EverbatchError as error:
            raise UserError(f"--lora {name}={directory}: {error}") from None
    absolute = tuple(f"{name}={Path(directory).resolve()}" for name, directory in lora.directories.items())
    return msgspec.structs.replace(config, lora=msgspec.structs.replace(lora, adapters=absolute))


def with_prompt_adapters(config: EngineConfig) -> EngineConfig:
    """The configuration with absolute directories of its prompt adapters. Raises UserError for one that is not served."""
    section = config.prompt_adapters
    for name, directory in section.directories.items():
        try:
            check_prompt_adapter(Path(directory))
        except EverbatchError as error:
            raise UserError(f"prompt_adapters.adapters: {name}={directory}: {error}") from None
    absolute = tuple(f"{name}={Path(directory).resolve()}" for name, directory in section.directories.items())
    return msgspec.structs.replace(config, prompt_adapters=msgspec.structs.replace(section, adapters=absolute))


def serve(options: ServeOptions, console: Console) -> int:
    """Serve until a signal. Returns the exit status; raises UserError or ServerFailed if it does not come up."""
    too_low = launch.raise_open_files()
    options.ports.check_free(options.host)
    if names_no_model(options):
        found, settings = default_model.find(console)
        options = replace(options, model=found, overrides=(*settings, *options.overrides))
    several = None if options.models is None else several_of(options, options.models)
    config = effective_config(options) if several is None else several.default.engine.share.config
    checkpoint = capacity.examined(config) if config.model.path else None
    chat_template.check_own(config)
    generates = checkpoint is None or checkpoint.generates
    server = _server(options, config, probe_model="" if generates else None, several=several)
    gateway = options.gateway
    if gateway is not None:
        soft = tuple(config.prompt_adapters.directories)
        gateway = replace(gateway, adapters=tuple(config.lora.directories), prompt_adapters=soft)
        gateway = gateway if several is None else of_several(gateway, several)
        gateway.check((options.ports.http, options.ports.grpc, options.ports.metrics))
        gateway = gateway.with_formats_of(chat_template.source(config))
    served = server if gateway is None else ServerWithGateway(server, gateway)
    openai_url = served.url if isinstance(served, ServerWithGateway) else None
    chats = chat_template.exists(config)
    has_keys = options.api_keys is not None
    name = gateway.names[0] if gateway is not None else ""
    reporter = ConsoleReporter(console, server, openai_url, keys=has_keys, chats=chats, generates=generates, name=name)
    server.on_event = reporter.event
    _introduce(options, config, checkpoint, console)
    for each in several.sets if several is not None else ():
        console.print(escape(described(each)), highlight=False, soft_wrap=True)
    if too_low is not None:
        console.print(f"[yellow]{escape(too_low)}[/yellow]", highlight=False, soft_wrap=True)
    with StopSignals() as signals:
        if options.verbose:
            threading.Thread(target=_follow, args=(server.log_path, console), daemon=True).start()
        status = supervise(served, reporter, signals, options.ready_timeout_s)
    reporter.stopped()
    return status


def _server(
    options: ServeOptions, config: EngineConfig, probe_model: str | None, several: MultiModel | None
) -> TritonServer:
    common: dict[str, Any] = {
        "ports": options.ports,
        "run_dir": rundir.default_run_directory(f"serve-{options.ports.http}"),
        "host": options.host,
        "exit_timeout_s": options.exit_timeout_s,
        "log_format": options.log_format,
        "open_repository": options.open_repository,
        "extra_flags": passed_flags.check(options.flags),
    }
    if several is not None:
        return MultiModelServer(several, **common)
    return TritonServer(
        config,
        profiles=options.profiles,
        model_repository=options.model_repositories,
        probe_model=probe_model,
        **common,
    )


def _introduce(options: ServeOptions, config: EngineConfig, checkpoint: Checkpoint | None, console: Console) -> None:
    """Print the model and the settings that are not the default, and what to know before others can reach the server."""
    if checkpoint is not None:
        console.print(f"model     {escape(config.model.path)}", highlight=False, soft_wrap=True)
        console.print(f"          {escape(capacity.described(checkpoint, config))}", highlight=False, soft_wrap=True)
    for number, setting in enumerate(differences(config)):
        console.print(f"{'' if number else 'changed':<9} --set {escape(setting)}", highlight=False, soft_wrap=True)
    if options.verbose:
        for line in effective(config):
            console.print(f"[dim]{escape(line)}[/dim]", highlight=False, soft_wrap=True)
    if not is_loopback(options.host):
        console.print(f"[yellow]{escape(exposed(options))}[/yellow]", highlight=False, soft_wrap=True)
    if options.open_repository:
        console.print(f"[yellow]{OPEN_REPOSITORY}[/yellow]", highlight=False, soft_wrap=True)
    gateway = options.gateway
    if gateway is not None and gateway.api_keys is None and not is_loopback(gateway.host):
        console.print(f"[yellow]{escape(open_endpoint(gateway))}[/yellow]", highlight=False, soft_wrap=True)


def open_endpoint(gateway: GatewayOptions) -> str:
    return (
        f"warning: others reach the OpenAI endpoint on {gateway.host}:{gateway.port}, and nobody is asked for a key; give "
        "--api-keys FILE, or --openai-host 127.0.0.1"
    )


def exposed(options: ServeOptions) -> str:
    """Warnings for a server that other machines can reach."""
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
        try:
            position = _copy_rest(path, position, console)
        except OSError:  # The log was put aside just now, or the console takes nothing: the next turn looks again.
            pass
        except SystemExit:  # The console's reader has left; rich ends the program then.
            return
        # The log may be emptied or replaced at any time, so it is looked at again rather than waited for.
        time.sleep(0.2)


def _copy_rest(path: Path, position: int, console: Console) -> int:
    """Print what the log holds from `position` on, or all of it where it has become shorter. Returns where it ends."""
    size = path.stat().st_size if path.is_file() else 0
    position = 0 if size < position else position
    if size == position:
        return position
    with path.open("rb") as file:
        file.seek(position)
        console.out(file.read().decode(errors="replace"), end="", highlight=False)
        return file.tell()
