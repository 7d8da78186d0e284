"""How ranks of other machines join: what is refused, in one sentence on both sides, and that strangers are not heard."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from backend.api import ConfigError, load_config
from backend.api.config.schema import EngineConfig, KvCacheConfig
from backend.api.processes.launched import KEY_VARIABLE
from backend.executor.load import workers_of
from backend.kvcache.sizing import block_bytes, num_pool_blocks
from backend.wire.address import NetworkAddress
from backend.worker import joined_group, joined_rank, joining, rank_process
from backend.worker.joining import Joined, Joiner, accept_links
from backend.worker.rank_messages import Join, Link, Refused, receive, send
from backend.worker.rank_process import RankWorker
from tests.parity.scenario import RecordingEngine
from tests.ranks.harness import engine_config, run
from tests.ranks.joined import KEY, address_of, joined, ranks_of
from tests.ranks.test_invariance import assert_same

pytestmark = pytest.mark.usefixtures("joined_ranks")
Checkpoint = Callable[..., Path]


def refused(config: EngineConfig, said: str) -> str:
    with pytest.raises(ConfigError, match=said) as error:
        workers_of(config).load()
    assert "\n" not in error.value.message
    return error.value.message


@contextmanager
def joiner(config: EngineConfig, *arguments: object, key: str = KEY) -> Iterator[list[str]]:
    """A rank, and what it is told when it is refused."""
    told: list[str] = []

    def be_a_rank() -> None:
        try:
            joined_rank.run(address_of(config, key), *(arguments or (None, None)), 60.0)
        except ConfigError as error:
            told.append(error.message)

    thread = threading.Thread(target=be_a_rank, daemon=True)
    thread.start()
    yield told
    thread.join(30)
    assert not thread.is_alive()


def test_ranks_of_another_program_or_world_are_refused_and_told(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = engine_config(checkpoint("llama"), 2)
    for counted, said in (((1, 4), "one of 4 .WORLD_SIZE.* is 2; start as many"), ((7, 2), "rank 7 .* are 1 to 1")):
        with joiner(config := joined(base), *counted) as told:
            message = refused(config, said)
        assert told == [message]
    own, asked = joining.program_version(), []

    def versions() -> str:
        asked.append(1)
        return own if len(asked) > 1 else "old"

    monkeypatch.setattr(joining, "program_version", versions)
    with joiner(config := joined(base)) as told:
        message = refused(config, "runs version old of the program, and rank 0 runs .* install the same version")
    assert told == [message]


def test_two_ranks_of_one_number_are_refused(checkpoint: Checkpoint) -> None:
    config = joined(engine_config(checkpoint("llama"), 4))
    with joiner(config, 2, 4), joiner(config, 2, 4):
        refused(config, "ranks at 127.0.0.1 and 127.0.0.1 both say that they are rank 2")


def test_ranks_have_the_numbers_that_they_were_given(checkpoint: Checkpoint) -> None:
    config = joined(engine_config(checkpoint("llama"), 1, stages=3))
    with joiner(config, 2, 3), joiner(config):
        workers = workers_of(config)
        try:
            workers.load()
            assert [each.join.rank for each in workers._joined] == [None, 2]
        finally:
            workers.shutdown()


def test_another_checkpoint_on_another_machine_is_refused(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, other = checkpoint("llama"), checkpoint("llama", rms_norm_eps=1e-3)
    opened = rank_process.open_checkpoint
    monkeypatch.setattr(rank_process, "open_checkpoint", lambda path, implementation: opened(other, implementation))
    config = joined(engine_config(own, 2))
    with ranks_of(config):
        refused(config, "rank 1 at 127.0.0.1 has another checkpoint .* copy the same files to every machine")


def test_other_kernels_are_refused(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    told = RankWorker.loaded
    monkeypatch.setattr(RankWorker, "loaded", lambda self, load: replace(told(self, load), kernels="another"))
    config = joined(engine_config(checkpoint("llama"), 2))
    with ranks_of(config):
        refused(config, "rank 1 at 127.0.0.1 has the kernels another, .* set EVERBATCH_ISA")


def test_a_machine_without_the_checkpoint_says_so(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*arguments: object) -> None:
        raise ConfigError("File does not exist: /models/llama")

    monkeypatch.setattr(rank_process, "open_checkpoint", missing)
    config = joined(engine_config(checkpoint("llama"), 2))
    with joiner(config) as told:
        refused(config, "rank 1 at 127.0.0.1: File does not exist: /models/llama")
    assert told == ["File does not exist: /models/llama"]


def test_strangers_are_not_heard_and_do_not_hold_up_a_start(checkpoint: Checkpoint) -> None:
    config = joined(engine_config(checkpoint("llama"), 2))
    plain = run(engine_config(checkpoint("llama"), 2))

    def disturb() -> None:
        host, port = config.workers.join_address.split(":")
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(1000)):
            with socket.create_connection((host, int(port)), timeout=10) as stranger:
                stranger.sendall(said)
        address = address_of(config)
        for message in (b"\x08" + bytes(7) + b"nonsense", b""):
            connection = address.connect()
            connection.sendall(message)
            connection.close()
        with address.connect() as connection:  # a rank of another group
            send(connection, Link("another group", 1))

    def late() -> None:
        for _ in range(100):
            try:
                disturb()
                break
            except OSError:
                time.sleep(0.05)
        joined_rank.run(address_of(config), None, None, 60.0)

    thread = threading.Thread(target=late, daemon=True)
    thread.start()
    assert_same(run(config), plain)
    thread.join(30)
    assert not thread.is_alive()


def test_links_of_another_group_are_ended() -> None:
    address = NetworkAddress("127.0.0.1", 0, KEY.encode())
    listener = address.listen()
    address = address._replace(port=listener.getsockname()[1])
    with listener, ThreadPoolExecutor(1) as pool:
        links = pool.submit(accept_links, 0, "this group", [1], listener, address)
        with address.connect() as other:
            send(other, Link("another group", 1))
            other.settimeout(30)
            message, _ = receive(other)
            assert message == Refused("the group has all its ranks")
        with address.connect() as own:
            send(own, Link("this group", 1))
            found = links.result()
            found[1].sendall(b"x")
            assert own.recv(1) == b"x"
            found[1].close()


def test_a_wrong_key_is_told_to_the_rank(checkpoint: Checkpoint) -> None:
    base = engine_config(checkpoint("llama"), 2)
    config = joined(replace(base, triton=replace(base.triton, attach_timeout_s=4.0)))
    with joiner(config, key="another key of sixteen characters") as told:
        refused(config, r"0 of 1 more ranks have joined at 127.0.0.1:\d+ within 3.6 s .*everbatch rank --join")
    assert len(told) == 1 and "has another key" in told[0]


def test_a_key_is_asked_for(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    config = joined(engine_config(checkpoint("llama"), 2))
    for key, said in (("", "is not set"), ("short", "has 5 characters")):
        monkeypatch.setenv(KEY_VARIABLE, key)
        refused(config, f"EVERBATCH_RANK_KEY {said}.* 16 characters or more on every machine")


def test_an_address_that_is_taken_is_one_sentence(checkpoint: Checkpoint) -> None:
    config = joined(engine_config(checkpoint("llama"), 2))
    with address_of(config).listen():
        refused(config, "workers.join_address is 127.0.0.1:.* cannot listen there")


def test_ranks_that_cannot_meet_say_who(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Joiner, "links", lambda self, own, *arguments: {})
    monkeypatch.setattr(joining, "LINK_S", 1.0)
    config = joined(engine_config(checkpoint("llama"), 2))
    with ranks_of(config):
        workers = workers_of(config)
        try:
            with pytest.raises(ConfigError, match="rank 1 has not connected to rank 0 at .* within 1 s"):
                RecordingEngine(config, workers)
        finally:
            workers.shutdown()


def test_configurations_that_contradict_themselves(checkpoint: Checkpoint) -> None:
    for overrides, said in (
        (["workers.join_address=everywhere"], "write HOST:PORT"),
        (["workers.join_address=host:99999"], "write HOST:PORT"),
        (["workers.join_address=host:5000"], "there is one rank"),
        (["workers.join_address=host:5000", "workers.tensor_parallel_size=2", "workers.replicas=2"], "one engine"),
    ):
        with pytest.raises(ConfigError, match=said):
            load_config(overrides=overrides)


def test_free_memory_is_that_of_the_fullest_machine(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    config = joined(engine_config(checkpoint("llama"), 1, stages=3))
    monkeypatch.setattr(joined_group, "free_bytes", lambda device: 8 << 20)
    monkeypatch.setattr(rank_process, "free_bytes", lambda device: 9 << 20)
    with ranks_of(config):
        workers = workers_of(config)
        try:
            workers.load()
            assert workers.free_memory_bytes() == (8 << 20) // 3
            workers._ranks_of = {"one": [0], "another": [1, 2]}
            assert workers.free_memory_bytes() == (9 << 20) // 2
        finally:
            workers.shutdown()


@pytest.mark.feature("003-62")
@pytest.mark.parametrize(("first", "second"), [(10, 8), (8, 10)])
def test_the_pool_has_as_many_blocks_as_fit_on_the_machine_that_holds_least(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, first: int, second: int
) -> None:
    """Two machines have memory for 10 and for 8 blocks."""
    config = joined(engine_config(checkpoint("llama"), 1, stages=2))
    config = replace(config, kv_cache=KvCacheConfig(block_size=32, free_memory_fraction=1.0))
    with ranks_of(config):
        workers = workers_of(config)
        try:
            info = workers.load()
            size = block_bytes(config, info)
            monkeypatch.setattr(joined_group, "free_bytes", lambda device: first * size)
            monkeypatch.setattr(rank_process, "free_bytes", lambda device: second * size)
            workers._ranks_of = {"one": [0], "another": [1]}
            assert num_pool_blocks(config, info, workers.free_memory_bytes()) == 8
        finally:
            workers.shutdown()


def test_more_ranks_than_their_machine_has_cores(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined_group, "physical_cores", lambda: 2)
    config = joined(engine_config(checkpoint("llama"), 1, stages=3))
    with ranks_of(config):
        refused(config, "3 ranks have joined on this machine, which has 2 cores; start fewer there")


def test_ranks_of_one_machine_share_its_cores(checkpoint: Checkpoint) -> None:
    config = joined(engine_config(checkpoint("llama"), 2, stages=2))
    config = replace(config, model=replace(config.model, num_threads=None))
    with ranks_of(config):
        workers = workers_of(config)
        try:
            workers.load()
            assert workers._section_of(0).num_threads == 4, "the stages take turns"
            workers._ranks_of = {"one": [0, 2], "another": [1, 3]}
            assert [workers._section_of(rank).num_threads for rank in range(4)] == [8, 8, 8, 8]
        finally:
            workers.shutdown()


def test_ranks_without_a_number_come_machine_by_machine_this_one_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "machine_id", lambda: "m")
    came = [("z", None), ("m", None), ("a", None), ("z", None), ("m", 2), ("m", None)]
    joined = [
        Joined(None, f"host-{machine}", Join("v", machine, 1, port, rank))  # type: ignore[arg-type]
        for port, (machine, rank) in enumerate(came)
    ]
    ordered = joining._in_order(joined)
    assert [(each.join.machine, each.join.port) for each in ordered] == [
        ("m", 1), ("m", 4), ("m", 5), ("a", 2), ("z", 0), ("z", 3)
    ]  # fmt: skip
    assert joining.machines("m", ordered) == {"m": [0, 1, 2, 3], "a": [4], "z": [5, 6]}
