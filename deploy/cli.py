"""The command line: `./everbatch COMMAND`. Errors are one sentence, exit status 2 for a wrong use and 1 for a
failure.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from client import cli as client_cli
from client.cli import batch_command, chat_command, generate_command, top_command
from deploy import ROOT, __version__, running
from deploy.errors import ServerFailed, UserError
from deploy.repository import chosen_profiles, profiles

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Language models behind Triton Inference Server: a persistent batch over a KV cache that forgets no token.",
)
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


class LogFormat(Enum):
    text = "text"
    json = "json"


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"everbatch {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


@app.command("serve", context_settings={"allow_extra_args": True})
def serve_command(
    context: typer.Context,
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="Checkpoint directory, GGUF file or hub id (ORG/NAME or ORG/NAME:Q4_K_M); else the default model. "
            "NAME=DIRECTORY: several, an engine each."
        ),
    ] = None,
    models: Annotated[
        Path | None, typer.Option(metavar="FILE", help="models.json: several models, with what each gets.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is every interface.")] = "127.0.0.1",
    http_port: Annotated[int, typer.Option(help="HTTP port.")] = 8000,
    grpc_port: Annotated[int, typer.Option(help="gRPC port.")] = 8001,
    metrics_port: Annotated[int, typer.Option(help="Prometheus port.")] = 8002,
    engine_config: Annotated[Path | None, typer.Option(help="JSON file with the engine's configuration.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY.PATH=VALUE", help="Change one setting.")
    ] = None,
    lora: Annotated[
        list[str] | None, typer.Option(metavar="NAME=DIRECTORY", help="PEFT adapter that clients may name; several.")
    ] = None,
    profile: Annotated[
        str,
        typer.Option(help=f"Which clients are served: {', '.join(profiles())}; several with commas, or all."),
    ] = "",
    model_repository: Annotated[
        list[Path] | None,
        typer.Option(help="Directory of Triton models, beside those of --profile where that is given."),
    ] = None,
    exit_timeout: Annotated[int, typer.Option(min=1, help="Seconds that running requests get after Ctrl-C.")] = 30,
    ready_timeout: Annotated[float, typer.Option(min=1, help="Seconds the models may take to load.")] = 600.0,
    openai_port: Annotated[int, typer.Option(help="Port of the OpenAI-compatible endpoint; 0: none.")] = 9000,
    openai_host: Annotated[str, typer.Option(help="Address of that endpoint; --host when left out.")] = "",
    api_keys: Annotated[
        Path | None, typer.Option(help="File with lines of NAME KEY: that endpoint asks for one of these keys.")
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN", help="Web pages of this origin may use that endpoint, as https://chat.example; several."
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Further name of this server, which that endpoint answers to without keys; several."
        ),
    ] = None,
    allow_image_hosts: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST[,HOST]",
            help="That endpoint fetches images of requests from there: images.example.org, *.example.org; several.",
        ),
    ] = None,
    batches: Annotated[
        Path | None,
        typer.Option(metavar="DIRECTORY", help="That endpoint keeps files and batches of requests there; else none."),
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Jinja template for chats, in place of the model's own.")
    ] = None,
    tool_format: Annotated[
        str, typer.Option(metavar="NAME", help="How the model writes tool calls; auto: as its chat template shows.")
    ] = "auto",
    reasoning_format: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="How it marks its reasoning; auto: as its chat template shows; none: not at all."
        ),
    ] = "auto",
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="What clients of that endpoint may call the model; several."),
    ] = None,
    tritonserver_flag: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FLAG", help="Flag for tritonserver itself, such as --log-verbose=1; or all of them after --."
        ),
    ] = None,
    open_repository: Annotated[
        bool,
        typer.Option(help="Triton's repository index, load and unload without the admin key; on trusted hosts only."),
    ] = False,
    log_format: Annotated[
        LogFormat, typer.Option(help="Of the lines of models and engine.", envvar="EVERBATCH_LOG_FORMAT")
    ] = LogFormat.text,
    verbose: Annotated[bool, typer.Option(help="Show the server's log.")] = False,
) -> None:
    """Start a real tritonserver with a model, and keep it running until Ctrl-C."""
    from deploy.multi_model_options import chosen_models
    from deploy.ports import Ports
    from deploy.serve import ServeOptions, serve

    try:
        several = chosen_models(tuple(model or ()), models)
        options = ServeOptions(
            model=model[0] if model and several is None else "",
            models=several,
            host=host,
            ports=Ports(http_port, grpc_port, metrics_port),
            engine_config=engine_config,
            overrides=tuple(set_ or ()),
            adapters=tuple(lora or ()),
            profiles=chosen_profiles(profile),
            model_repositories=tuple(model_repository or ()),
            exit_timeout_s=exit_timeout,
            ready_timeout_s=ready_timeout,
            log_format=log_format.value,
            flags=(*(tritonserver_flag or ()), *context.args),
            open_repository=open_repository,
            openai_port=openai_port,
            openai_host=openai_host,
            api_keys=api_keys,
            allow_origins=tuple(allow_origin or ()),
            allow_hosts=tuple(allow_host or ()),
            allow_image_hosts=tuple(allow_image_hosts or ()),
            batches=batches,
            chat_template=chat_template,
            tool_format=tool_format,
            reasoning_format=reasoning_format,
            model_names=tuple(served_model_name or ()),
            verbose=verbose,
        )
        status = serve(options, Console())
    except (UserError, ServerFailed) as error:
        raise fail(error) from None
    raise typer.Exit(status)


def fail(error: UserError | ServerFailed) -> typer.Exit:
    """Print the error (and the log's last lines, when there are any) on standard error."""
    console = Console(stderr=True)
    if isinstance(error, ServerFailed) and error.log_tail:
        console.print(f"[dim]{escape(error.log_tail)}[/dim]", highlight=False, soft_wrap=True)
    console.print(f"[red]everbatch: {escape(str(error))}[/red]", highlight=False, soft_wrap=True)
    return typer.Exit(error.exit_code)


def exit_with(command: Callable[[], int]) -> NoReturn:
    """Run a command, and end with its exit status, or with its error on standard error."""
    try:
        status = command()
    except UserError as error:
        raise fail(error) from None
    raise typer.Exit(status)


@app.command("test", context_settings=PASS_ON)
def test_command(
    context: typer.Context,
    schedules: Annotated[int | None, typer.Option(min=1, help="Random schedules of the engine simulation.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Leave out what is slow: servers, planted bugs, GPU kernels, sanitizers.")
    ] = False,
    features: Annotated[
        bool,
        typer.Option("--features", help="Run nothing: print which promised features have tests, and what is open."),
    ] = False,
    again_alone: Annotated[
        int,
        typer.Option(
            min=0, help="Run up to this many failed tests once more, one after the other; say which passed then."
        ),
    ] = 0,
) -> None:
    """Run the test-suite on a CPU, tritonserver included. Further arguments go to pytest."""
    if not (ROOT / "tests").is_dir():
        raise fail(UserError("the tests are not installed with the packages; run ./everbatch test in a checkout"))
    from deploy import testing

    raise typer.Exit(testing.show_features() if features else testing.run(context.args, quick, schedules, again_alone))


@app.command("doctor")
def doctor_command(
    model: Annotated[
        str, typer.Option(help="Model to look at: its size, and how much of its KV the memory holds.")
    ] = "",
    host: Annotated[str, typer.Option(help="Address whose ports are looked at.")] = "127.0.0.1",
    http_port: Annotated[int, typer.Option(help="HTTP port.")] = 8000,
    grpc_port: Annotated[int, typer.Option(help="gRPC port.")] = 8001,
    metrics_port: Annotated[int, typer.Option(help="Prometheus port.")] = 8002,
    openai_port: Annotated[int, typer.Option(help="Port of the OpenAI-compatible endpoint.")] = 9000,
    kv_directory: Annotated[str, typer.Option(help="Directory for kv_cache.directory to look at.")] = "",
) -> None:
    """Say what this machine has and lacks, what to do about it, and how much of a model fits."""
    from deploy.doctor import examine, show
    from deploy.ports import Ports

    findings = examine(host, Ports(http_port, grpc_port, metrics_port), openai_port, model, kv_directory)
    raise typer.Exit(show(findings, Console()))


@app.command("rank")
def rank_command(
    join: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where rank 0 listens; left out: torchrun, mpirun or srun says it.")
    ] = "",
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for rank 0 to answer.")] = 600.0,
    once: Annotated[
        bool, typer.Option("--once", help="End with the first group, in place of joining the next one.")
    ] = False,
) -> None:
    """Run a part of a model whose rank 0 is on another machine (serve --set workers.join_address=HOST:PORT)."""
    from deploy.rank import RankOptions, run_rank

    exit_with(lambda: run_rank(RankOptions(join, timeout, once)))


@app.command("quantize")
def quantize_command(
    scheme: Annotated[
        str, typer.Option(help="w8a8 (int8 weights and activations), w4a16 (4-bit weights) or w4a8 (int8 activations).")
    ],
    output: Annotated[Path, typer.Option(help="Folder to write; a new one, or an empty one.")],
    model: Annotated[
        str, typer.Argument(help="Float checkpoint: directory, GGUF file or hub id; else the default model.")
    ] = "",
    kv: Annotated[str | None, typer.Option(help="Type of the KV cache: int8 or int4; else the model's own.")] = None,
    calibration: Annotated[
        str | None, typer.Option(help="Text file to calibrate with, or none; the default model has one of its own.")
    ] = None,
    group: Annotated[
        int | None, typer.Option(help="Columns that share a scale: 128 (w4a16 also 64, 32), or -1: one scale a row.")
    ] = None,
) -> None:
    """Quantise a checkpoint, and write a new one that `serve` reads."""
    from deploy.offline import QuantizeOptions, quantize

    exit_with(lambda: quantize(QuantizeOptions(model, scheme, output, kv, calibration, group)))


@app.command("convert")
def convert_command(
    model: Annotated[
        str, typer.Argument(help="Meta's files, pickled weights (.bin), a float checkpoint or GGUF file; or a hub id.")
    ],
    output: Annotated[Path, typer.Option(help="Folder to write, new or empty; or a new file NAME.gguf.")],
    to: Annotated[str, typer.Option(help="Form to write: huggingface, meta or gguf.")] = "huggingface",
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; else as stored.")] = None,
    max_positions: Annotated[
        int | None, typer.Option(help="Tokens of a sequence, which Meta's files do not say.")
    ] = None,
    rope_factor: Annotated[float | None, typer.Option(help="Factor of Llama 3's scaled rope: 8, or 32 (3.2).")] = None,
    type_name: Annotated[
        str | None,
        typer.Option("--type", help="Of a GGUF file: F32, F16, BF16 (default), Q8_0, Q6_K, Q4_K_M, Q4_0, ..."),
    ] = None,
    importance: Annotated[
        str | None,
        typer.Option(help="Of a GGUF file: columns count as measured, or as in an imatrix FILE; else alike (none)."),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Of a GGUF file: none, or the name of its words (tokenizer.ggml.pre); else found."),
    ] = None,
) -> None:
    """Convert a checkpoint to safetensors with Hugging Face's names, to Meta's files, or to a GGUF file."""
    from deploy.offline import ConvertOptions, convert

    options = ConvertOptions(
        *(model, output, to, dtype, max_positions, rope_factor),
        type=type_name,
        importance=importance,
        tokenizer=tokenizer,
    )
    exit_with(lambda: convert(options))


@app.command("bench", context_settings=PASS_ON, add_help_option=False)
def bench_command(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="Benchmark; without it they are listed.")] = None,
) -> None:
    """Run a benchmark; further arguments go to it, --help too."""
    known = benchmarks()
    if name == "--help":
        typer.echo(context.get_help())
        name = None
    if name is None:
        typer.echo(
            "\n".join(known)
            if known
            else "benchmarks are not installed with the packages; there are some in a checkout"
        )
        raise typer.Exit
    if name not in known:
        raise fail(UserError(f"there is no benchmark {name!r}; there are: {', '.join(known) or 'none'}"))
    command = [sys.executable, "-m", f"benchmarks.{name}", *context.args]
    # Benchmarks run in the checkout; relative paths in their arguments start from this directory all the same.
    environment = os.environ | {"EVERBATCH_CALLED_FROM": os.getcwd()}
    raise typer.Exit(subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode)


def benchmarks() -> list[str]:
    """The names in benchmarks/ that can be run: modules with a main guard, packages with a main module."""
    files = (ROOT / "benchmarks").glob("[a-z]*.py")
    modules = [file.stem for file in files if 'if __name__ == "__main__":' in file.read_text()]
    return sorted(modules + [file.parent.name for file in (ROOT / "benchmarks").glob("[a-z]*/__main__.py")])


app.command("generate")(generate_command)
app.command("chat")(chat_command)
app.command("top")(top_command)
app.command("batch")(batch_command)
client_cli.locate = running.locate


def main() -> None:
    """Entry point; a wrong option is one sentence as well. A Ctrl-C that came while the program was loaded is answered here."""
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        status = app(prog_name="everbatch", standalone_mode=False)
    except _UsageProblem as error:
        Console(stderr=True).print(
            f"[red]everbatch: {escape(error.format_message())}[/red]", highlight=False, soft_wrap=True
        )
        sys.exit(2)
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)
    sys.exit(status or 0)


# The base class of all errors of parsing. Older versions of typer take it from click, newer ones have a copy of their own.
_UsageProblem: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


if __name__ == "__main__":
    main()
