"""KV events over ZeroMQ: a router that reads them knows what the engine has cached."""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from backend.api import EngineConfig, OutputConfig
from backend.api.config.checks import check_config
from backend.api.config.schema import KvEventsConfig, WorkersConfig
from backend.api.errors import ConfigError
from backend.api.lora import LoraConfig
from backend.api.request import KvOrigin, Request
from backend.api.stats import BlocksCreated, BlocksRemoved, BlocksStored, KvEvent, StoredBlock
from backend.wire.kv_event_format import KvEventEncoder
from backend.wire.kv_publisher import KvPublisher, publisher_of
from tests.engine.driver import Driver
from tests.wire.kv_subscriber import KVEventBatch, Subscriber

BLOCK = 4


@pytest.fixture
def directory() -> Iterator[Path]:
    """For sockets, whose paths may have 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="kv-"))
    yield path
    shutil.rmtree(path)


class Street:
    """An engine of 16 blocks, its publisher and a subscriber."""

    def __init__(self, directory: Path, **config: Any) -> None:
        self.endpoints = f"ipc://{directory}/events", f"ipc://{directory}/replay"
        self.config = KvEventsConfig(*self.endpoints, **config)
        self.publisher = KvPublisher(self.config)
        self.driver = Driver(pool_tokens=64, block_size=BLOCK, sharing="all", kv_events=self.publisher)
        self.subscriber = Subscriber(*self.endpoints, self.config.topic, self.config.layout)
        self.reach(self.subscriber)
        self.subscriber.num_replayed = 0

    def reach(self, subscriber: Subscriber) -> None:
        """Ask until the subscriber gets messages: what is published before its subscription has arrived does not reach it."""
        for first in range(50, 1000, 9):
            self.ask(list(range(first, first + 6)))
            subscriber.read(0.1)
            if subscriber.next_number:
                return
        raise AssertionError("the subscriber gets no message")

    def ask(self, prompt: list[int], salt: str = "") -> int:
        """Tokens of the prompt whose KV was found."""
        output = OutputConfig(return_perf_metrics=True)
        request = self.driver.ask(prompt, 3, streaming=False, output_config=output, cache_salt=salt)
        self.driver.run()
        self.driver.core.take_records()
        return self.driver.responses[request][-1].result.perf_metrics.num_cached_tokens

    def findable(self) -> set[tuple[str, tuple[int, ...]]]:
        """The full blocks that the engine can find, by walking its trie."""
        found, stack = set(), [(root, ()) for root in self.driver.core.kv.state.trie._roots.values()]
        while stack:
            node, before = stack.pop()
            for key, child in node.children.items():
                stack.append((child, (*before, *key)))
                if len(key) == BLOCK:
                    found.add((self._salt(node), (*before, *key)))
        return found

    def _salt(self, node: Any) -> str:
        while node.parent is not None:
            node = node.parent
        return node.namespace

    def agrees(self) -> bool:
        self.subscriber.read(0.01)
        return set(self.subscriber.prefixes.values()) == self.findable()

    def close(self) -> None:
        self.subscriber.close()
        self.driver.core.close()


@pytest.fixture
def street(directory: Path) -> Iterator[Callable[..., Street]]:
    made: list[Street] = []

    def make(**config: Any) -> Street:
        made.append(Street(directory, **config))
        return made[-1]

    yield make
    for each in made:
        each.close()


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
    return True


@pytest.mark.feature("000-61")
@pytest.mark.parametrize("layout", ["map", "array"])
def test_the_events_alone_say_what_prompts_will_find_under_eviction_pressure(
    street: Callable[..., Street], layout: str
) -> None:
    """vLLM's events name full blocks only, so hits are compared in whole blocks, without those that match in part."""
    way, dice = street(layout=layout, topic="kv@here@model"), random.Random(1)
    conversations = [[first] * 24 for first in (1, 2)]
    num_hits = 0
    for _ in range(60):
        known, salt = dice.choice(conversations), dice.choice(["", "alice"])
        prompt = known[: dice.randrange(2, 24)] + [dice.randrange(2)]
        assert eventually(way.agrees), "the subscriber's set of blocks differs from the engine's"
        predicted = way.subscriber.cached_tokens(prompt, salt, BLOCK)
        found = way.ask(prompt, salt)
        assert predicted == found // BLOCK * BLOCK
        num_hits += predicted > 0
    assert num_hits > 10 and way.driver.core.kv.stats().evicted_blocks_total > 20


def test_messages_that_a_subscriber_has_lost_are_sent_again(street: Callable[..., Street]) -> None:
    way = street()
    for first in (1, 100, 200):
        way.ask(list(range(first, first + 20)))
    assert eventually(way.agrees)
    way.subscriber.lose = 2
    for first in (300, 400, 500):  # the pool holds less than all, so blocks go as well
        way.ask(list(range(first, first + 30)))
    assert eventually(way.agrees) and way.subscriber.num_replayed == 2


def test_a_subscriber_that_comes_late_gets_everything_from_the_beginning(
    street: Callable[..., Street], directory: Path
) -> None:
    way = street()
    for first in (1, 100, 200, 300):
        way.ask(list(range(first, first + 30)))
    assert eventually(way.agrees)
    late = Subscriber(*way.endpoints)
    way.reach(late)
    way.subscriber = late
    assert eventually(way.agrees) and late.num_replayed > 0
    late.close()


def test_a_router_that_binds_one_socket_for_all_engines_is_connected_to() -> None:
    with zmq.Context() as context, context.socket(zmq.SUB) as router:
        router.subscribe("kv@")
        port = router.bind_to_random_port("tcp://127.0.0.1")
        publishers = [KvPublisher(KvEventsConfig(f"tcp://127.0.0.1:{port}", topic=f"kv@{name}")) for name in "ab"]
        drivers = [Driver(pool_tokens=64, block_size=BLOCK, kv_events=publisher) for publisher in publishers]
        heard: set[bytes] = set()
        for first in range(0, 900, 10):
            for driver in drivers:
                driver.ask(list(range(first, first + 6)), 1)
                driver.run()
                driver.core.take_records()
            while router.poll(50):
                heard.add(router.recv_multipart()[0])
            if len(heard) == 2:
                break
        assert heard == {b"kv@a", b"kv@b"}
        for driver in drivers:
            driver.core.close()


def test_what_is_no_longer_kept_is_told_anew_in_one_message(street: Callable[..., Street]) -> None:
    way = street(buffer_steps=2)
    for first in (1, 100, 200, 300):
        way.ask(list(range(first, first + 30)))
    assert eventually(way.agrees)
    late = Subscriber(*way.endpoints)
    assert len(late.ask_again(0)) == 2
    late._replay = ""  # from now on it takes only what is published
    way.reach(late)
    way.subscriber = late
    assert eventually(way.agrees)
    assert next(type(event).__name__ for event in late.events) == "AllBlocksCleared"
    late.close()


@pytest.mark.parametrize("limit", [{"buffer_bytes": 900}, {"buffer_steps": 3}])
def test_the_messages_that_are_kept_are_bounded(street: Callable[..., Street], limit: dict[str, int]) -> None:
    way = street(**limit)
    for first in range(0, 1000, 100):
        way.ask(list(range(first, first + 30)))
    assert eventually(way.agrees)
    kept = way.subscriber.ask_again(0)
    assert 1 <= len(kept) <= 3 and sum(len(message) for _, message in kept) <= limit.get("buffer_bytes", 10_000)
    assert kept[-1][0] == way.subscriber.next_number - 1


def test_a_subscriber_of_an_engine_that_is_started_again_begins_anew(street: Callable[..., Street]) -> None:
    first = street()
    for start in (1, 100, 200):
        first.ask(list(range(start, start + 30)))
    assert eventually(first.agrees)
    subscriber, number = first.subscriber, first.subscriber.next_number
    first.driver.core.close()
    assert eventually(lambda: not first.publisher._thread.is_alive())
    second = street()
    second.subscriber.close()
    second.subscriber = first.subscriber = subscriber
    for start in range(300, 900, 20):
        second.ask(list(range(start, start + 10)))
        if eventually(second.agrees, 0.2):
            break
    assert second.agrees() and subscriber.prefixes and subscriber.next_number > number + 3


def test_a_full_queue_drops_messages_and_the_next_one_tells_all(directory: Path) -> None:
    """The publisher's thread starts late, so that the queue is full meanwhile."""
    endpoints = f"ipc://{directory}/events", f"ipc://{directory}/replay"
    publisher = KvPublisher(KvEventsConfig(*endpoints, max_queue_size=2))
    start, publisher.start = publisher.start, lambda block_size: None
    driver = Driver(pool_tokens=64, block_size=BLOCK, kv_events=publisher)
    for first in range(0, 600, 100):
        driver.ask(list(range(first, first + 30)), 1)
        driver.run()
        driver.core.take_records()
    num_dropped = publisher.num_dropped
    assert num_dropped > 2
    start(BLOCK)
    assert eventually(publisher._queue.empty)
    driver.ask(list(range(5)), 1)
    driver.run()
    driver.core.take_records()
    subscriber = Subscriber(*endpoints)
    assert eventually(lambda: publisher.num_published == 3)
    for number, message in subscriber.ask_again(0):
        subscriber._take(number, message)
    blocks = {tokens for _, tokens in subscriber.prefixes.values()}
    assert {len(tokens) for tokens in blocks} >= {4, 28}
    assert len(blocks) == sum(len(node.key) == BLOCK for node in driver.core.kv.state.trie._nodes.values())
    subscriber.close()
    driver.core.close()


def test_a_subscriber_that_never_reads_costs_the_engine_nothing(street: Callable[..., Street]) -> None:
    way = street(hwm=2)
    dead = Subscriber(way.endpoints[0])
    way.reach(dead)
    for first in range(0, 900, 30):
        way.ask(list(range(first, first + 30)))
    assert way.publisher.num_dropped == 0

    def hears_of_its_losses() -> bool:
        """With a mark of 2, ZeroMQ drops messages for a reader that gets no processor time as well; the next one tells."""
        way.ask([7] * 6)
        return eventually(way.agrees, 0.5)

    assert eventually(hears_of_its_losses)
    dead.close()


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"", b"1"],
        [b"", b"123456789"],
        [b"x", bytes(8)],
        [b"", bytes(8), b""],
        [b"", b"\xff" * 8],
        [b"", b"x" * 65],
    ],
)
def test_a_replay_request_of_another_form_is_ignored(street: Callable[..., Street], frames: list[bytes]) -> None:
    way = street()
    way.ask(list(range(20)))
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(way.endpoints[1])
        stranger.send_multipart(frames)
        assert not stranger.poll(50) or stranger.recv_multipart()[2] == (-1).to_bytes(8, "big", signed=True)
    assert eventually(way.agrees) and way.subscriber.ask_again(0)


def test_blocks_name_the_adapter_and_the_salt_and_blocks_that_are_not_full_are_left_out() -> None:
    request = Request([1], 1, lora=LoraConfig(7, name="tuned", content="hash"), cache_salt="alice")
    encoder = KvEventEncoder(2, "map")
    blocks = [StoredBlock(11, [1, 2]), StoredBlock(12, [3, 4]), StoredBlock(13, [5])]
    events = [BlocksCreated(3), BlocksStored(None, blocks, request.kv_origin), BlocksRemoved([13, 12])]
    message = encoder.encode([KvEvent(number, data) for number, data in enumerate(events)], 1e9)
    stored, removed = msgspec.msgpack.decode(message, type=KVEventBatch).events
    assert (stored.block_hashes, stored.token_ids, stored.parent_block_hash) == ([11, 12], [1, 2, 3, 4], None)
    assert (stored.lora_id, stored.lora_name) == (7, "tuned")
    assert stored.extra_keys == [("tuned", "alice"), ("tuned",)]
    assert removed.block_hashes == [12]
    assert (
        encoder.encode([KvEvent(3, BlocksRemoved([13])), KvEvent(4, BlocksStored(12, [StoredBlock(5, [1])]))], 1e9)
        is None
    )


def test_requests_with_other_inputs_have_a_key_that_no_other_request_has() -> None:
    plain, embedded = Request([1], 1), Request([1], 1, extra_inputs={"image": b"x"})
    assert plain.kv_origin == KvOrigin() and embedded.kv_origin.has_inputs
    stored = BlocksStored(None, [StoredBlock(1, [1, 2])], embedded.kv_origin)
    message = KvEventEncoder(2, "map").encode([KvEvent(0, stored)], 1e9)
    assert embedded.kv_origin.digest.encode() in message


@pytest.mark.parametrize(
    "config, why",
    [
        ({"endpoint": "inproc://x"}, "kv_events.endpoint is inproc://x, which is no endpoint; write tcp://*:5557"),
        ({"endpoint": "tcp://*:0"}, "no endpoint"),
        ({"endpoint": "tcp://*:65536"}, "no endpoint"),
        ({"endpoint": "tcp://a b:5557"}, "no endpoint"),
        ({"endpoint": "tcp://*:5557\n"}, "no endpoint"),
        ({"endpoint": "ipc://relative"}, "no endpoint"),
        ({"endpoint": "ipc:///" + "x" * 107}, "the path has 108 bytes, the limit is 107"),
        ({"endpoint": "tcp://*:5557", "replay_endpoint": "udp://x"}, "kv_events.replay_endpoint is udp://x"),
        ({"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5557"}, "a port of its own"),
        ({"replay_endpoint": "tcp://*:5557"}, "nothing to ask for"),
        ({"endpoint": "tcp://*:5557", "topic": "x" * 513}, "kv_events.topic has 513 characters, the limit is 512"),
        ({"endpoint": "tcp://*:5557", "hwm": 0}, "kv_events.hwm is 0"),
    ],
)
def test_an_endpoint_is_checked_before_anything_starts(config: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why.replace("*", r"\*")):
        check_config(EngineConfig(kv_events=KvEventsConfig(**config)))


def test_each_replica_has_endpoints_and_a_number_of_its_own() -> None:
    events = KvEventsConfig("tcp://*:5557", "tcp://[::1]:6000").of_replica(2)
    assert (events.endpoint, events.replay_endpoint, events.data_parallel_rank) == (
        "tcp://*:5559",
        "tcp://[::1]:6002",
        2,
    )
    events = KvEventsConfig("tcp://router:5557", "ipc:///run/x").of_replica(1)
    assert (events.endpoint, events.replay_endpoint) == ("tcp://router:5557", "ipc:///run/x-1")
    assert KvEventsConfig().of_replica(0) == KvEventsConfig()
    two = WorkersConfig(replicas=2)
    with pytest.raises(ConfigError, match="choose ports that are 2 or more apart"):
        check_config(EngineConfig(kv_events=KvEventsConfig("tcp://*:5557", "tcp://*:5558"), workers=two))
    check_config(EngineConfig(kv_events=KvEventsConfig("tcp://*:5557", "tcp://*:5559"), workers=two))
    stored = KvEvent(0, BlocksStored(None, [StoredBlock(1, [1, 2])]))
    message = KvEventEncoder(2, "map", rank=2).encode([stored], 1e9)
    assert msgspec.msgpack.decode(message, type=KVEventBatch).data_parallel_rank == 2


@pytest.mark.parametrize("endpoint", ["tcp://*:5557", "tcp://127.0.0.1:1", "tcp://[::1]:65535", "ipc:///run/x.sock"])
def test_endpoints_as_operators_write_them(endpoint: str) -> None:
    check_config(EngineConfig(kv_events=KvEventsConfig(endpoint)))


def test_a_port_that_is_taken_and_a_missing_package_are_one_sentence(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert publisher_of(KvEventsConfig()) is None
    with zmq.Context() as context, context.socket(zmq.PUB) as other:
        port = other.bind_to_random_port("tcp://127.0.0.1")
        for taken in ({"endpoint": f"tcp://*:{port}"}, {"replay_endpoint": f"tcp://127.0.0.1:{port}"}):
            config = KvEventsConfig(**{"endpoint": f"ipc://{directory}/events", **taken})
            with pytest.raises(
                ConfigError, match="where no socket can be bound .Address already in use.; choose another"
            ):
                publisher_of(config)
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ConfigError, match="pyzmq is not installed; pip install 'everbatch.events.'"):
        publisher_of(KvEventsConfig(f"ipc://{directory}/events"))
