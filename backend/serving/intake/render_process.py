"""The process that renders chats: `python -m backend.serving.intake.render_process FD`, FD being its end of a socket pair.

It compiles the templates once. A child renders one chat after the other, until one of them fails (core/limited_server.py).
"""

from __future__ import annotations

import json
import sys
from functools import partial

import msgspec

from backend.api.errors import EverbatchError
from backend.core.limited_messages import Begin, Ending, Limits, Outcome
from backend.core.limited_server import Perform, serve_jobs
from backend.serving.intake.rendering import RenderSetup
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


def set_up(body: bytes) -> tuple[Perform, Limits]:
    setup = msgspec.msgpack.decode(body, type=RenderSetup)
    return partial(render_chat, Renderer(setup.templates)), setup.limits


if __name__ == "__main__":
    sys.exit(serve_jobs("chats", set_up, jobs_of_child=CHATS_OF_CHILD))
