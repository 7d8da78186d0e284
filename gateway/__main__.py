"""`python -m gateway`: serves the OpenAI-compatible endpoint until SIGTERM or SIGINT."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from gateway.batches.database import DatabaseError
from gateway.browsers import fault_of
from gateway.detected import REASONING_FORMATS, TOOL_FORMATS
from gateway.image_hosts import fault_of_hosts, split
from gateway.keys import FORM, KeysError
from gateway.log_lines import set_up_logging
from gateway.served import Served, served_of
from gateway.server import GatewayServer
from gateway.settings import Settings

SWITCH_INTERVAL_S = 0.001  # so long the event loop waits for the thread that reads large bodies; Python's own is 0.005
PROGRAM = "python -m gateway"
D = Settings()  # the defaults
# The base class of all errors of parsing. Older versions of typer take it from click, newer ones have a copy of their own.
_UsageProblem: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def _option(help_text: str, metavar: str = "N", name: str = "", **more: Any) -> Any:
    """`name`: of the flag, where it is not that of the parameter."""
    return typer.Option(*filter(None, [name]), metavar=metavar, help=help_text, **more)


def _several(flag: str, help_text: str, metavar: str = "NAME", **more: Any) -> Any:
    return typer.Option(*flag.split(), metavar=metavar, help=f"{help_text}; may be given several times", **more)


@_app.command()
def _read(
    triton: Annotated[str, _option("Triton's gRPC address", "HOST:PORT")] = D.triton,
    triton_model: Annotated[str, _option("the Triton model to ask", "NAME")] = D.triton_model,
    model_names: Annotated[
        list[str] | None, _several("--model-name --model-names", "a name clients may use as `model`")
    ] = None,
    adapters: Annotated[
        list[str] | None, _several("--lora", "a LoRA adapter of the server that clients may name as `model`")
    ] = None,
    others: Annotated[
        list[Served] | None,
        _several(
            "--other-model",
            "a further model of the server: triton_model, names, adapters, label (gateway/served.py)",
            "JSON",
            parser=served_of,
        ),
    ] = None,
    metrics_label: Annotated[str, _option("what the metrics of the first model's engine call it", "NAME")] = "",
    control: Annotated[Path | None, _option("the launcher's, for operations on models", "SOCKET")] = None,
    prompt_adapters: Annotated[
        list[str] | None, _several("--prompt-adapter", "a prompt adapter of the server, likewise")
    ] = None,
    tool_format: Annotated[
        Literal[TOOL_FORMATS],  # type: ignore[valid-type]
        typer.Option(help="how the model writes tool calls"),
    ] = D.tool_format,
    reasoning_format: Annotated[
        Literal[REASONING_FORMATS],  # type: ignore[valid-type]
        typer.Option(help="how the model marks its reasoning; none: that is part of the content"),
    ] = D.reasoning_format,
    host: Annotated[str, _option("address to listen at", "HOST")] = D.host,
    port: Annotated[int, _option("0: any free port, which is printed", "PORT")] = D.port,
    api_keys: Annotated[Path | None, _option(f"lines of {FORM}; mode 0600", "FILE")] = None,
    allow_origins: Annotated[
        list[str] | None,
        _several("--allow-origin", "of web pages that may use the endpoint, such as https://chat.example", "ORIGIN"),
    ] = None,
    allow_hosts: Annotated[
        list[str] | None,
        _several("--allow-host", "a further name of the server, which it answers to without keys"),
    ] = None,
    server_version: Annotated[str, _option("what /version tells", "VERSION")] = D.server_version,
    metrics_url: Annotated[str | None, _option("Triton's metrics page, passed on at /metrics", "URL")] = None,
    max_body_bytes: Annotated[int, _option("of one request")] = D.max_body_bytes,
    max_image_body_bytes: Annotated[
        int, _option("the same where a model takes images, and all images of one request together")
    ] = D.max_image_body_bytes,
    max_image_bytes: Annotated[int, _option("of one image")] = D.max_image_bytes,
    max_images: Annotated[int, _option("of one request, those of earlier turns included")] = D.max_images,
    allow_image_hosts: Annotated[
        list[str] | None,
        _several(
            "--allow-image-hosts",
            "images of requests are fetched from there, such as images.example.org, *.example.org",
            "HOST[,HOST]",
        ),
    ] = None,
    image_timeout_s: Annotated[float, _option("for the images of a request to be fetched")] = D.image_timeout_s,
    body_timeout_s: Annotated[float, _option("for a body to arrive")] = D.body_timeout_s,
    request_timeout_s: Annotated[float, _option("for a reply to be complete")] = D.request_timeout_s,
    resume_timeout_s: Annotated[
        float, _option("for a server that has ended to be back, until a reply is given up; 0: at once")
    ] = D.resume_timeout_s,
    max_requests: Annotated[int, _option("POST requests at once; more get 429")] = D.max_requests,
    max_choices: Annotated[int, _option("replies at once; more get 429")] = D.max_choices,
    max_choices_per_request: Annotated[
        int, _option("prompts times n, or best_of, of one request")
    ] = D.max_choices_per_request,
    shutdown_grace_s: Annotated[float, _option("replies may run on so long after SIGTERM")] = D.shutdown_grace_s,
    batches: Annotated[
        Path | None, _option("files and batches of clients are kept there; left out: there are none", "DIRECTORY")
    ] = None,
    max_file_bytes: Annotated[int, _option("of one file")] = D.max_file_bytes,
    files_count: Annotated[int, _option("files, and as many batches, for each namespace")] = D.files_count,
    files_bytes: Annotated[int, _option("of disk that its files take")] = D.files_bytes,
    store_count: Annotated[int, _option("responses kept for previous_response_id, for each namespace")] = D.store_count,
    store_bytes: Annotated[int, _option("of memory that they take")] = D.store_bytes,
    store_ttl_s: Annotated[float, _option("since a response was last used")] = D.store_ttl_s,
) -> Settings:
    """An OpenAI-compatible endpoint before Triton."""
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in locals().items()
    }
    values["model_names"] = values["model_names"] or D.model_names
    for key in ("adapters", "others", "prompt_adapters", "allow_origins", "allow_hosts", "allow_image_hosts"):
        values[key] = values[key] or ()
    values["allow_image_hosts"] = split(values["allow_image_hosts"])
    if (fault := fault_of(values["allow_origins"], values["allow_hosts"], api_keys is not None)) is not None:
        raise typer.BadParameter(fault)
    if (fault := fault_of_hosts(values["allow_image_hosts"])) is not None:
        raise typer.BadParameter(fault)
    for kind, key in (("LoRA", "adapters"), ("prompt", "prompt_adapters")):
        if same := set(values["model_names"]) & set(values[key]):
            raise typer.BadParameter(
                f"{min(same)} is the name of a model and of a {kind} adapter; give one of them another name"
            )
    return Settings(**values)


def settings_of(arguments: list[str]) -> Settings:
    """Raises SystemExit: 2 with one sentence on standard error for wrong flags, 0 after --help."""
    try:
        settings = _app(arguments, prog_name=PROGRAM, standalone_mode=False)
    except _UsageProblem as error:
        print(f"{PROGRAM}: {error.format_message()}", file=sys.stderr)
        raise SystemExit(2) from None
    if not isinstance(settings, Settings):
        raise SystemExit(0)
    return settings


def main(arguments: list[str]) -> int:
    set_up_logging()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        settings = settings_of(arguments)
        server = GatewayServer(settings)
    except KeysError as error:
        print(f"gateway: --api-keys {settings.api_keys}: {error}", file=sys.stderr)
        return 2
    except DatabaseError as error:
        print(f"gateway: --batches {settings.batches}: {error}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))  # raised once more when the server has ended
    try:
        server.run()
    except KeyboardInterrupt:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
