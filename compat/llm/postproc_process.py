"""A post-processing process: `python -m compat.llm.postproc_process --fd N --tokenizer DIR`. It ends when its socket does."""

from __future__ import annotations

import signal
import socket

import msgspec

from backend.api import EverbatchError
from backend.api.processes.arguments import arguments_of
from backend.api.processes.setup import set_up_logging
from backend.text.tokenizer import Tokenizer
from compat.llm.postprocessing import Pipe, PostprocInput, PostprocWorker, Ready


class PostprocArguments(msgspec.Struct, forbid_unknown_fields=True):
    """`fd`: the descriptor of the socket. `tokenizer`: its directory."""

    fd: int
    tokenizer: str


def main() -> None:
    arguments = arguments_of(PostprocArguments)
    set_up_logging("postproc")
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches all processes of the terminal; the executor ends this one itself.
    pipe = Pipe(socket.socket(fileno=arguments.fd))
    try:
        tokenizer = Tokenizer.from_directory(arguments.tokenizer)
    except EverbatchError as error:
        pipe.send(Ready(error.message))
        return
    serve(pipe, PostprocWorker(tokenizer))


def serve(pipe: Pipe, worker: PostprocWorker) -> None:
    """Answer inputs until the pipe ends."""
    pipe.send(Ready())
    decode = msgspec.msgpack.Decoder(PostprocInput).decode
    while (body := pipe.receive()) is not None:
        output = worker.handle(decode(body))
        if output is not None:
            pipe.send(output)


if __name__ == "__main__":
    main()
