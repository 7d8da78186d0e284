"""KvPublisher: publishes KV events over ZeroMQ as vLLM does, for routers that send a request to the engine that has its prefix.

    PUB     (topic, sequence number in 8 bytes, big endian, message)          kv_event_format.py describes the message
    ROUTER  a REQ sends the first sequence number that it wants, and gets (topic, sequence number, message) for each
            message that is kept, then (b"", -1, b"")                         after vLLM 0.33.0

An endpoint tcp://*:PORT is bound, for subscribers that connect to each engine; with another address the publisher connects
to a router that binds one socket for all engines (llm-d). The engine's thread only puts events into a bounded queue; a thread
of the publisher owns the sockets. A subscriber that does not read loses messages, sees a gap in the sequence numbers, and asks
for what it has missed. Where events are lost between the engine and the publisher, or asked for when they are no longer kept,
the next message begins with AllBlocksCleared and lists all blocks again. So does the first message of an engine, for its
subscribers may have known the one before.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from backend.api.config.endpoints import is_bound
from backend.api.config.schema import KvEventsConfig
from backend.api.errors import ConfigError
from backend.api.stats import BlocksStored, KvEvent
from backend.wire.kv_event_format import KvEventEncoder

log = logging.getLogger("everbatch.kv_events")
END = (-1).to_bytes(8, "big", signed=True)  # in place of the sequence number behind the last message of a replay
MAX_REQUEST_BYTES = 64  # the longest frame that is read from a subscriber; a request for a replay has 8
LINGER_MS = 500  # for what is on its way to subscribers at the end
ANEW_PERIOD_S = 5.0  # how often at most subscribers can have all blocks told again


class EventBatch(NamedTuple):
    """The content of one message: the events of a step, or all that is cached."""

    seconds: float  # since 1970
    events: list[KvEvent]
    cached: list[BlocksStored] | None = None


def _zmq() -> ModuleType:
    """The library, which is loaded only where events are published. Raises ConfigError where it is not installed."""
    try:
        return importlib.import_module("zmq")
    except ImportError:
        raise ConfigError(
            "kv_events.endpoint is set and pyzmq is not installed; pip install 'everbatch[events]' (or pip install -r "
            "requirements/events.txt), or leave it out"
        ) from None


def publisher_of(config: KvEventsConfig) -> KvPublisher | None:
    """None if the configuration names no endpoint. Raises ConfigError if pyzmq lacks or an endpoint cannot be had."""
    return KvPublisher(config) if config.endpoint else None


class KvPublisher:
    """`offer` and `close` are called by the engine's thread; `num_published` and `num_dropped` count messages."""

    def __init__(self, config: KvEventsConfig) -> None:
        """Open the sockets. Raises ConfigError."""
        zmq = _zmq()
        self._config = config
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.setsockopt(zmq.SNDHWM, config.hwm)
        self._replay: Any | None = None
        if config.replay_endpoint:
            self._replay = self._context.socket(zmq.ROUTER)
            self._replay.setsockopt(
                zmq.SNDHWM, 2 * (config.buffer_steps + 1)
            )  # a whole replay, with read ones in between
            self._replay.setsockopt(zmq.RCVHWM, 100)
            self._replay.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        self._bind()
        self._queue: queue.Queue[EventBatch] = queue.Queue(config.max_queue_size)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._tell_all = threading.Event()  # set: the next message lists all that is cached
        self._tell_all.set()
        self._next_event = 0
        self._next_number = self._first_number = time.time_ns() // 1000  # numbers grow from one engine to the next, too
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._may_tell_all_at = 0.0
        self._is_closing = False
        self._thread: threading.Thread | None = None
        self.num_published = 0
        self.num_dropped = 0

    def start(self, block_size: int) -> None:
        """Begin to publish. `block_size`: tokens of a block."""
        self._encoder = KvEventEncoder(block_size, self._config.layout, self._config.data_parallel_rank)
        self._thread = threading.Thread(target=self._run, name="kv-publisher", daemon=True)
        self._thread.start()

    def offer(self, events: list[KvEvent], cached: Callable[[], list[BlocksStored]]) -> None:
        """Publish the events of a step. Never waits. `cached`: what is cached behind these events."""
        is_whole = events[0].event_id == self._next_event
        self._next_event = events[-1].event_id + 1
        if not is_whole:
            self._tell_all.set()
        try:
            if self._tell_all.is_set():
                self._tell_all.clear()
                self._queue.put_nowait(EventBatch(time.time(), [], cached()))
            else:
                self._queue.put_nowait(EventBatch(time.time(), events))
        except queue.Full:
            self._tell_all.set()
            self.num_dropped += 1
            if self.num_dropped & (self.num_dropped - 1) == 0:
                log.warning(
                    "%d messages of KV events were dropped, because their thread gets no time", self.num_dropped
                )
        self._notify()

    def close(self) -> None:
        """Publish what is queued, for a second at most, and close the sockets. Safe to call twice."""
        if self._is_closing:
            return
        self._is_closing = True
        if self._thread is None:
            self._context.destroy(linger=0)
            return
        self._notify()
        self._thread.join(1.0)

    def _notify(self) -> None:
        os.eventfd_write(self._wake, 1)

    def _bind(self) -> None:
        zmq = _zmq()
        for key, socket in (("endpoint", self._pub), ("replay_endpoint", self._replay)):
            if socket is None:
                continue
            endpoint = getattr(self._config, key)
            try:
                socket.setsockopt(zmq.IPV6, "[" in endpoint)
                if socket is self._pub and not is_bound(endpoint):
                    socket.connect(endpoint)
                else:
                    socket.bind(endpoint)
            except zmq.ZMQError as error:
                self._context.destroy(linger=0)
                raise ConfigError(
                    f"kv_events.{key} is {endpoint}, where no socket can be bound ({zmq.strerror(error.errno)}); choose another "
                    f"port, or end the process that has it"
                ) from None

    def _run(self) -> None:
        zmq = _zmq()
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        while not (self._is_closing and self._queue.empty()):
            ready = dict(poller.poll())
            if self._wake in ready:
                os.eventfd_read(self._wake)
            self._publish_queued()
            if self._replay is not None and self._replay in ready:
                self._answer(self._replay)
        self._context.destroy(linger=LINGER_MS)
        os.close(self._wake)

    def _publish_queued(self) -> None:
        while not self._queue.empty():
            batch = self._queue.get_nowait()
            if batch.cached is None:
                message = self._encoder.encode(batch.events, batch.seconds)
            else:
                message = self._encoder.encode_anew(batch.cached, batch.seconds)
            if message is not None:
                self._publish(message)

    def _publish(self, message: bytes) -> None:
        number = self._next_number
        self._next_number += 1
        self._pub.send_multipart((self._config.topic.encode(), number.to_bytes(8, "big"), message))
        self.num_published += 1
        if self._replay is None:
            return
        self._kept.append((number, message))
        self._kept_bytes += len(message)
        while len(self._kept) > self._config.buffer_steps or self._kept_bytes > self._config.buffer_bytes:
            self._kept_bytes -= len(self._kept.popleft()[1])

    def _answer(self, replay: Any) -> None:
        """Send one subscriber the messages that it asks for. A request of another form is ignored."""
        client, *request = replay.recv_multipart()
        if len(request) != 2 or request[0] or len(request[1]) != 8:
            return
        start, topic = int.from_bytes(request[1], "big"), self._config.topic.encode()
        for number, message in itertools.dropwhile(lambda kept: kept[0] < start, self._kept):
            replay.send_multipart((client, b"", topic, number.to_bytes(8, "big"), message))
        replay.send_multipart((client, b"", b"", END, b""))
        first_kept = self._kept[0][0] if self._kept else self._next_number
        lacks_some = start < first_kept > self._first_number
        if lacks_some and time.monotonic() >= self._may_tell_all_at:
            self._may_tell_all_at = time.monotonic() + ANEW_PERIOD_S
            self._tell_all.set()
