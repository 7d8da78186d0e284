"""Ranks that join over TCP and are threads of the test's process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from msgspec.structs import replace

from backend.api.config.schema import EngineConfig
from backend.wire.address import NetworkAddress
from backend.worker import joined_rank
from tests.ranks.harness import Ran, run

KEY = "a key of sixteen characters or more"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def joined(config: EngineConfig, **fields: float) -> EngineConfig:
    """The same with ranks that join, and one thread for each rank."""
    workers = replace(config.workers, join_address=f"127.0.0.1:{free_port()}", **fields)
    return replace(config, model=replace(config.model, num_threads=1), workers=workers)


@contextmanager
def ranks_of(config: EngineConfig) -> Iterator[list[threading.Thread]]:
    """The ranks besides rank 0, which are threads. They must end with it."""
    host, port = config.workers.join_address.split(":")
    address = NetworkAddress(host, int(port), KEY.encode())
    threads = [
        threading.Thread(target=joined_rank.run, args=(address, None, None, 60.0), daemon=True)
        for _ in range(config.workers.num_ranks - 1)
    ]
    for thread in threads:
        thread.start()
    try:
        yield threads
    finally:
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a rank does not end with rank 0"


def address_of(config: EngineConfig, key: str = KEY) -> NetworkAddress:
    host, port = config.workers.join_address.split(":")
    return NetworkAddress(host, int(port), key.encode())


def run_joined(config: EngineConfig, **keys: object) -> Ran:
    config = joined(config)
    with ranks_of(config):
        return run(config, **keys)  # type: ignore[arg-type]
