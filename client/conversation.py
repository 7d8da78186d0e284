"""A multi-turn conversation with one server-side session.

Every turn sends the whole conversation, and the server keeps the common prefix's KV. So a session that the server has
forgotten (idle too long, restarted) costs nothing but time: the turn is sent again with START. A conversation that no
longer fits loses its oldest turns.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Unpack

from client.client import EverbatchClient
from client.errors import ClientError
from client.history import END_TIMEOUT_S, History
from client.messages import TextChunk
from client.options import GenerateOptions


class Conversation(History):
    """Messages so far (`messages`, of which `left_out` old turns are gone) and the session that holds their KV. One turn
    at a time.
    """

    def __init__(self, client: EverbatchClient, system: str | None = None, **options: Unpack[GenerateOptions]) -> None:
        """`options`: for every turn. Raises TypeError for one that there is not."""
        self._client = client
        super().__init__(system, dict(options))

    def say(self, text: str, images: Sequence[str] = ()) -> Generator[TextChunk, None, None]:
        """Send a turn, yield the reply. Closing the iterator or Ctrl-C cancels; what had come by then stays.

        `images`: encoded files in base64 (client/images.py), which stand ahead of the text.

        A turn that fails, or was cancelled before its first text, is taken back: the conversation is as before. Raises
        ClientError.
        """
        self._begin(text, images)
        reply: list[str] = []
        keep = False
        try:
            with closing(self._send()) as chunks:
                for chunk in chunks:
                    reply.append(chunk.text)
                    yield chunk
            keep = True
        except (GeneratorExit, KeyboardInterrupt):
            keep = any(reply)
            raise
        finally:
            self._finish("".join(reply), keep=keep)

    def end(self) -> None:
        """Let the server forget the session. Best effort: it forgets idle ones by itself."""
        request = self._end_request()
        if request is None:
            return
        try:
            for _ in self._client.send(request, timeout_s=END_TIMEOUT_S):
                pass
        except ClientError:
            return  # A server that is gone, or that has forgotten the session already, has nothing to end.

    def _send(self) -> Generator[TextChunk, None, None]:
        while True:
            try:
                request = self._request()
                with closing(self._client.send(request)) as chunks:
                    for chunk in chunks:
                        self._known |= request.session is not None
                        yield chunk
                return
            except ClientError as error:
                pause_s = self._pause_after(error)
            time.sleep(pause_s)
