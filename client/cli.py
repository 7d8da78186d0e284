"""`chat` and `generate` in the terminal. Registered in ./everbatch; also `python -m client.cli`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from client.located import Located, introduced
from client.options import GenerateOptions

if TYPE_CHECKING:
    from client.client import EverbatchClient
    from client.guide import Guide

Url = Annotated[
    str | None,
    typer.Option(
        help="Server: HOST:PORT or grpcs://HOST:PORT for gRPC, http:// or https:// for HTTP; left out: the one that "
        "./everbatch serve has started here, else 127.0.0.1 with the default port."
    ),
]
ModelName = Annotated[str, typer.Option(help="Text model of the server.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Maximum number of tokens of a reply.")]
Temperature = Annotated[float | None, typer.Option(min=0.0, help="0 is greedy.")]
TopP = Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Nucleus sampling.")]
TopK = Annotated[int | None, typer.Option(min=0, help="Sample among the k likeliest; 1 is greedy.")]
LoraName = Annotated[str | None, typer.Option(metavar="NAME", help="LoRA adapter of the server (serve --lora).")]
Seed = Annotated[
    int | None,
    typer.Option(
        min=0, help="Same seed, same text (exactly so in float32); left out: another one each time, which is told."
    ),
]
Protocol = Annotated[str | None, typer.Option(help="grpc or http; taken from the URL when left out.")]
Namespace = Annotated[
    str, typer.Option(help="Share sessions and cached prompts with requests of this namespace only; empty: anonymous.")
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar="EVERBATCH_API_KEY",
        help="Key for a gateway in front of the server. Every user of this machine can read it in the command line, so "
        "the environment variable is the better place.",
    ),
]
CaFile = Annotated[
    str | None,
    typer.Option(
        envvar="EVERBATCH_CA_FILE",
        help="Certificates (PEM) to trust in place of the system's, for https:// and grpcs://.",
    ),
]
Timeout = Annotated[float, typer.Option(min=0.1, help="Seconds a reply may take.")]

OPENAI_URL = "http://127.0.0.1:9000"
NO_END = -1  # as end_id: no token ends the output


def locate() -> Located | None:
    """The server that a command without --url talks to. deploy/, which starts servers, replaces this function."""
    return None


app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.command("generate")
def generate_command(
    prompt: Annotated[
        str | None,
        typer.Argument(help="Text to continue; - reads it from standard input, as leaving it out does in a pipe."),
    ] = None,
    max_tokens: MaxTokens = 64,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    lora_name: LoraName = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop at this string; may be repeated.")] = None,
    min_tokens: Annotated[
        int | None, typer.Option(min=0, help="Minimum number of tokens before the reply may end.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on to --max-tokens where the model would end the text.")
    ] = False,
    json_schema: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The reply is JSON that satisfies the schema in this file.")
    ] = None,
    regex: Annotated[str | None, typer.Option(help="The reply as a whole matches this regular expression.")] = None,
    url: Url = None,
    model_name: ModelName = "ensemble",
    protocol: Protocol = None,
    namespace: Namespace = "",
    api_key: ApiKey = None,
    ca_file: CaFile = None,
    timeout: Timeout = 600.0,
    quiet: Annotated[bool, typer.Option(help="No statistics.")] = False,
    chat: Annotated[bool, typer.Option("--chat", help="The prompt is a message, which the model answers.")] = False,
) -> None:
    """Continue a text, or answer it; it streams to standard output, statistics go to standard error."""
    from client.terminal import run_generate

    text = _prompt(prompt)
    options = GenerateOptions(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, min_tokens=min_tokens,
        stop_words=list(stop or ()), lora_name=lora_name, guide=_guide(json_schema, regex),
        end_id=NO_END if ignore_eos else None,
    )  # fmt: skip
    server = Server(url, protocol, model_name)
    _run(
        server,
        lambda: server.connect(namespace, api_key, ca_file),
        lambda client: run_generate(client, text, options, timeout, quiet, server.introduction(), chat=chat),
    )


@app.command("chat")
def chat_command(
    max_tokens: MaxTokens = 256,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    lora_name: LoraName = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    image: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE", help="Send this image with the first turn, to a model that takes images; several."
        ),
    ] = None,
    url: Url = None,
    model_name: ModelName = "ensemble",
    protocol: Protocol = None,
    namespace: Namespace = "",
    api_key: ApiKey = None,
    ca_file: CaFile = None,
) -> None:
    """Talk with the model; every turn reuses the KV cache of those before. /help, /image, /reset, /exit; Ctrl-C ends a reply."""
    from client.chat import run_chat

    options = GenerateOptions(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, lora_name=lora_name
    )
    images = _images(image or ())
    server = Server(url, protocol, model_name)
    _run(
        server,
        lambda: server.connect(namespace, api_key, ca_file),
        lambda client: run_chat(client, system, options, server.introduction(), images),
    )


@app.command("top")
def top_command(
    period: Annotated[float, typer.Option(min=0.1, max=60.0, help="Seconds between two looks.")] = 0.5,
    once: Annotated[bool, typer.Option("--once", help="Look once, and end.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="With --once: everything that a look tells, as JSON.")
    ] = False,
    model_name: Annotated[
        str, typer.Option(help="Model that is asked; NAME.everbatch on a server of several models.")
    ] = "everbatch",
    url: Url = None,
    protocol: Protocol = None,
    api_key: ApiKey = None,
    ca_file: CaFile = None,
) -> None:
    """Watch the persistent batch: rows and their progress, the queue, the blocks of the KV cache, evictions. Ctrl-C ends it."""
    from client import top

    if as_json and not once:
        raise _refusal("--json is for --once; add it, or leave --json out")
    server, console = Server(url, protocol, model_name), Console()

    def show(client: EverbatchClient) -> int:
        look, whose = partial(client.look, model=model_name), server.introduction() or client.url
        if as_json:
            console.print_json(data=look())
        elif once:
            top.once(look, console, whose)
        else:
            top.watch(look, console, period, whose)
        return 0

    _run(server, lambda: server.connect("", api_key, ca_file), show)


@app.command("batch")
def batch_command(
    file: Annotated[Path, typer.Argument(metavar="FILE.jsonl", help="Requests as OpenAI's batches have them.")],
    output: Annotated[
        Path | None, typer.Option(metavar="OUT.jsonl", help="Answers; else FILE.out.jsonl, beside the requests.")
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            help="OpenAI endpoint: http:// or https://; left out: that of the server started here, else :9000."
        ),
    ] = None,
    api_key: ApiKey = None,
    ca_file: CaFile = None,
) -> None:
    """Answer a file of requests in what other clients leave; run again, it goes on where it was interrupted."""
    from client.batch_command import run_batch_file

    located = locate()
    known = located.openai_url if located is not None else ""
    try:
        status = run_batch_file(url or known or OPENAI_URL, api_key, ca_file, file, output)
    except ValueError as error:
        raise _refusal(str(error)) from None
    raise typer.Exit(status)


class Server:
    """The server that a command talks to: at the given address, else the one that `locate` finds, else at the default address."""

    def __init__(self, url: str | None, protocol: str | None, model_name: str) -> None:
        self._url, self._protocol, self._model_name = url, protocol, model_name
        self._located = locate()

    def connect(self, namespace: str, api_key: str | None = None, ca_file: str | None = None) -> EverbatchClient:
        """A client of the arguments of the command line. Raises ValueError."""
        from client.address import parse_address
        from client.client import EverbatchClient

        chosen = parse_address(self._url, self._protocol).protocol  # It refuses what is neither.
        url = self._url
        if url is None and self._located is not None:
            url = self._located.url(self._protocol)
        return EverbatchClient(url, chosen, self._model_name, namespace, api_key, ca_file=ca_file)

    def introduction(self) -> str | None:
        """A line about the server that will answer; None if the address was given on the command line."""
        return None if self._url is not None else introduced(self._located, self._protocol, self._model_name)

    def why_not(self, url: str) -> str | None:
        """Why the server at this address, which did not answer, takes no request now; None where that is not known."""
        located = locate()  # again: it may have changed meanwhile
        if located is None or url not in (located.grpc_url, located.http_url):
            return None
        return located.why_not()

    def right_url(self, url: str) -> str:
        """The end of the sentence about an address of this machine at which no Triton answers; empty if no other is known."""
        located = locate()
        return "" if located is None else located.instead_of(url)


def _prompt(given: str | None) -> str:
    """The given prompt, or the text of standard input if that is `-` or no terminal. Exits if there is neither."""
    if given not in (None, "-"):
        return given
    text = ""
    if sys.stdin is not None and (given == "-" or not sys.stdin.isatty()):
        try:
            text = sys.stdin.read()
        except UnicodeDecodeError:
            raise _refusal("standard input is no text in UTF-8; convert it") from None
    if not text:
        raise _refusal("there is no prompt; name one, or send one to standard input (- reads that from a terminal too)")
    return text


def _images(names: Sequence[str]) -> list[str]:
    """The images of these files. Exits where one cannot be sent."""
    from client.images import read_image

    try:
        return [read_image(name) for name in names]
    except ValueError as error:
        raise _refusal(f"--image {error}") from None


def _guide(json_schema: Path | None, regex: str | None) -> Guide | None:
    """The guide that is asked for. Exits where both are given, or the file of the schema cannot be read."""
    from client.guide import Guide

    if json_schema is None:
        return None if regex is None else Guide("regex", regex)
    if regex is not None:
        raise _refusal("--json-schema and --regex are both given; a reply has one form, so give one of them")
    try:
        return Guide("json_schema", json_schema.read_text("utf-8"))
    except OSError as error:
        raise _refusal(f"--json-schema {str(json_schema)!r} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise _refusal(f"--json-schema {str(json_schema)!r} is no text in UTF-8; convert it") from None


def _refusal(text: str) -> typer.Exit:
    """Print one sentence about a wrong use on standard error. Returns the exit with status 2."""
    _complain(text)
    return typer.Exit(2)


def _complain(text: str) -> None:
    Console(stderr=True).print(f"[red]everbatch: {escape(text)}[/red]", highlight=False, soft_wrap=True)


def _run(server: Server, make_client: Callable[[], EverbatchClient], action: Callable[[EverbatchClient], int]) -> None:
    """Exit with the status of the action, or with 1 and one sentence on standard error."""
    from client.option_names import on_the_command_line

    try:
        status = _status(server, make_client(), action)
    except ValueError as error:
        _complain(on_the_command_line(str(error)))
        status = 1
    except BrokenPipeError:  # The reader of the pipe has left, as `head` does.
        sys.stderr.close()
        status = 0
    raise typer.Exit(status)


def _status(server: Server, client: EverbatchClient, action: Callable[[EverbatchClient], int]) -> int:
    from client.errors import ClientError
    from client.option_names import on_the_command_line
    from client.served_models import explained

    try:
        return action(client)
    except ClientError as error:
        known = server.why_not(client.url) if error.code in ("UNREACHABLE", "UNAVAILABLE") else None
        right = server.right_url(client.url) if error.code in ("UNREACHABLE", "NOT_FOUND") else ""
        _complain(known or on_the_command_line(explained(error, client.settings)) + right)
        return 1


if __name__ == "__main__":
    app()
