"""The process that renders chats: `python -m backend.serving.intake.render_process FD`, FD being its end of a socket pair.

It compiles the templates once. A child renders one chat after the other, until one of them fails (core/limited_server.py).
"""

from __future__ import annotations

import gc
import json
import signal
import socket
import sys
from functools import partial

import msgspec

from backend.api.errors import EverbatchError
from backend.api.processes.log_lines import set_up_logging
from backend.core.limited_messages import READY, Begin, Ending, Frames, Outcome
from backend.core.limited_server import LimitedServer, first_message
from backend.serving.intake.rendering import Setup
from backend.text.template import Render, Renderer

CHATS_OF_CHILD = 1000


def render_chat(render: Render, begin: Begin) -> Outcome:
    """Raises MemoryError."""
    try:
        text = render(*json.loads(begin.task.decode("utf-8", "surrogatepass")))
    except EverbatchError as error:
        text = error.message.encode("utf-8", "replace").decode()  # it may quote half a surrogate pair of a client's
        return Outcome(begin.job, Ending.REFUSED, text=text)
    return Outcome(begin.job, Ending.DONE, text.encode("utf-8", "surrogatepass"))


def main() -> int:
    set_up_logging("chats")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; this one ends with its stub
    connection, frames = socket.socket(fileno=int(sys.argv[1])), Frames()
    if (body := first_message(connection, frames)) is None:
        return 0
    setup = msgspec.msgpack.decode(body, type=Setup)
    render = Renderer(setup.templates)
    gc.collect()
    gc.freeze()
    server = LimitedServer(connection, frames, partial(render_chat, render), setup.limits, jobs_of_child=CHATS_OF_CHILD)
    server.tell(Outcome(READY, Ending.DONE))
    server.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
