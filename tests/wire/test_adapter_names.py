"""Names of LoRA adapters over the socket: every client hears of a change, and who comes later is greeted with it."""

from __future__ import annotations

import queue
import socket
from pathlib import Path

from backend.api import EngineConfig
from backend.api.request import RequestId
from backend.core.messages import Adapters, ClientGone, Command, Hello, NameAdapter
from backend.core.step import ModelInfo
from backend.wire.engine_server import EngineServer
from backend.wire.framing import decode_message, encode_frame, receive_frame
from tests.wire.test_engine_server import MINE, Peer, posted  # noqa: F401 (fixture)


def test_names_of_adapters_reach_all_clients_and_those_that_come_later(
    tmp_path: Path,
    posted: queue.SimpleQueue[Command | ClientGone],  # noqa: F811 (fixture)
) -> None:
    names = {"doll": "/loras/doll"}
    hello = lambda index: Hello(index, ModelInfo("m", 9, 9), "", EngineConfig(), adapters=names)
    server = EngineServer(str(tmp_path / "s"), posted.put, hello)
    try:
        first, second = Peer(str(tmp_path / "s")), Peer(str(tmp_path / "s"))
        first.sock.sendall(encode_frame(NameAdapter(RequestId(MINE | 1), "sheep", "sheep")))
        assert posted.get(timeout=5) == NameAdapter(RequestId(MINE | 1), "sheep", "sheep")
        names = {**names, "sheep": "/loras/sheep"}
        server.publish_adapters(names)
        assert first.receive() == second.receive() == Adapters(names)
        third = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        third.connect(str(tmp_path / "s"))
        greeting = decode_message(receive_frame(third) or b"")
        assert isinstance(greeting, Hello) and greeting.adapters == names
        third.close()
    finally:
        server.close()
