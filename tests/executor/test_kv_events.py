"""KV events of a real engine process, which is killed and started again."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from backend.api import ConfigError, EngineConfig, Request
from backend.api.config.schema import KvCacheConfig, KvEventsConfig, ModelConfigSection
from backend.executor import Executor
from backend.wire.client import wait_until
from tests.executor.helpers import drain
from tests.wire.kv_subscriber import Subscriber


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    """For sockets, whose paths may have 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="kv-"))
    yield path
    shutil.rmtree(path)


def config(events: KvEventsConfig) -> EngineConfig:
    model = ModelConfigSection(device="cpu", num_threads=1, kernels="torch", dtype="float32")
    return EngineConfig(model, KvCacheConfig(block_size=4, max_tokens=256), kv_events=events)


@pytest.mark.slow("starts an engine process twice")
def test_a_router_forgets_what_an_engine_had_that_was_killed(socket_dir: Path) -> None:
    endpoints = f"ipc://{socket_dir}/events", f"ipc://{socket_dir}/replay"
    with Executor.launch(config(KvEventsConfig(*endpoints)), str(socket_dir / "engine.sock")) as executor:
        subscriber = Subscriber(*endpoints)

        def first_tokens(start: int) -> set[int]:
            """The first tokens of the prompts that it knows, once it has heard of new ones, which begin at `start`."""
            number = subscriber.next_number
            for first in range(start, start + 80, 8):
                drain(executor, [executor.enqueue_request(Request(list(range(first, first + 8)), 2))])
                subscriber.read(0.3)
                if subscriber.next_number > number:
                    break
            return {tokens[0] for _, tokens in subscriber.prefixes.values()}

        assert 10 in first_tokens(10)
        os.kill(executor._transport.engine_pid, signal.SIGKILL)
        assert wait_until(lambda: not executor.is_ready(), 10) and wait_until(executor.is_ready, 60)
        after = first_tokens(100)
        assert 100 in after and min(after) == 100
        subscriber.close()


def test_an_endpoint_that_cannot_be_had_is_one_sentence_before_anything_is_loaded(socket_dir: Path) -> None:
    events = KvEventsConfig(f"ipc://{socket_dir}/none/events")
    with pytest.raises(ConfigError, match="kv_events.endpoint is ipc://.*, where no socket can be bound"):
        Executor.launch(config(events), str(socket_dir / "engine.sock"))
