"""Replicas as actors of a Ray cluster: `pip install everbatch[ray]`, `--set workers.orchestrator=ray`, RAY_ADDRESS as usual.

Ray chooses the node of each replica (one placement group, `workers.placement`), starts it, and starts it again elsewhere when its
process or node is lost. Tokens do not travel through Ray: the front connects to each engine over TCP, with a key that every actor
gets from Ray.

    front -- Executor -- SocketTransport -- TCP -- EngineServer -- engine        in the actor's process, on any node
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any

import msgspec
from msgspec.structs import replace

from backend.api.config.schema import EngineConfig
from backend.api.errors import ConfigError, EngineUnavailable
from backend.executor.executor import Executor
from backend.executor.served_engine import ServedEngine
from backend.replicas.processes import of_replica
from backend.replicas.ray_ranks import RayRanks, Worker, reason, runtime_env
from backend.wire.address import NetworkAddress
from backend.wire.client import SocketTransport, wait_until

log = logging.getLogger("everbatch.replicas")
NAMESPACE = "everbatch"  # Ray namespace of the actors
PLACEMENT_S = 60  # how long nodes may take to have processors for all replicas free


class EngineActor(Worker):
    """The actor: an engine in a thread of its process, which ends with the engine. Of several ranks it is rank 0."""

    def __init__(self, config: bytes, key: bytes, index: int) -> None:
        """Load the model, and listen. index: of the replica. Raises ConfigError."""
        self._host = str(import_module("ray.util").get_node_ip_address())
        self._config = msgspec.json.decode(config, type=EngineConfig)
        ranks = self._config.workers.num_ranks
        self.number, self._ranks = index * ranks, None
        if ranks > 1:
            threads, timeout_s = self._config.model.num_threads or 1, self._config.triton.attach_timeout_s
            self._ranks = RayRanks(self.number, ranks, threads, self._host, timeout_s)
        point = None if self._ranks is None else self._ranks.point
        self._engine = ServedEngine(self._config, NetworkAddress(self._host, 0, key), point=point)
        threading.Thread(target=self._run, name="engine", daemon=True).start()

    def _run(self) -> None:
        try:
            self._engine.run()
        except BaseException:
            log.exception("the engine failed")
        os._exit(1)  # whatever ended it: Ray starts the actor again

    def address(self) -> tuple[str, int]:
        return self._host, self._engine.port

    def wait(self) -> None:
        """Never returns: the call fails when this process ends."""
        threading.Event().wait()

    def call(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Call a method of every rank, for `collective_rpc`; returns one value for each."""
        own = getattr(self, method)(*args, **kwargs)
        return [own] if self._ranks is None else [own, *self._ranks.call(method, args, kwargs)]


class RayEngine:
    """One actor, as the EngineProcess of an Executor, and the Address that its transport connects to."""

    def __init__(self, index: int, config: EngineConfig, key: bytes, group: Any, actor_name: str) -> None:
        """Create the actor, which loads in the background. `group`: a placement group with a bundle for each rank of each
        replica.
        """
        ray = self._ray = import_module("ray")
        strategies = import_module("ray.util.scheduling_strategies")
        self._key, self._limits, self._index = key, config.triton, index
        self._actor = (
            ray.remote(EngineActor)
            .options(
                name=actor_name,
                num_cpus=config.model.num_threads,
                max_restarts=-1,
                max_concurrency=8,
                scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=index * config.workers.num_ranks
                ),
                runtime_env=runtime_env({}),
            )
            .remote(msgspec.json.encode(config), key, index)
        )
        self._at: tuple[str, int] | None = None  # host and port of the present engine
        self._stopping = threading.Event()
        self.num_deaths = 0
        self.num_signs = 0
        self.why_given_up = ""
        self._first_known = threading.Event()
        self._first_error = ""

    def connect(self) -> socket.socket:
        if self._at is None:
            raise ConnectionRefusedError(f"replica {self._index} is not running")
        return NetworkAddress(*self._at, self._key).connect()

    def may_be_served(self) -> bool:
        return not self.has_given_up

    @property
    def has_given_up(self) -> bool:
        return bool(self.why_given_up)

    @property
    def patience_s(self) -> float | None:
        return None if self._at is None else self._limits.watchdog_timeout_s

    @property
    def longest_turn_s(self) -> float:
        return self._limits.step_timeout_s

    def start(self, timeout_s: float) -> None:
        """Wait until it is ready. Raises ConfigError with the engine's reason, or EngineUnavailable when the time is over."""
        threading.Thread(target=self._follow, name=f"replica-{self._index}", daemon=True).start()
        if not self._first_known.wait(timeout_s):
            raise EngineUnavailable(
                f"replica {self._index} was not ready after {timeout_s:g} s (triton.attach_timeout_s)"
            )
        if self._first_error:
            raise ConfigError(self._first_error)

    def kill(self, reason: str, stuck_s: float) -> None:
        log.error("replica %d %s; its process is killed", self._index, reason)
        self._ray.kill(self._actor, no_restart=False)

    def stop(self) -> None:
        self._stopping.set()
        self._ray.kill(self._actor, no_restart=True)

    def _follow(self) -> None:
        """Know where the engine listens, whenever Ray has started it again, until it is stopped or Ray has given it up."""
        errors = import_module("ray.exceptions")
        while not self._stopping.is_set():
            try:
                self._at = tuple(self._ray.get(self._actor.address.remote()))
                self.num_signs += 1
                self._first_known.set()
                self._ray.get(self._actor.wait.remote())
            except errors.ActorDiedError as error:
                self._at = None
                self._give_up(reason(error))
                return
            except errors.RayError as error:  # its process or node is lost, and Ray starts it again
                if self._at is not None and not self._stopping.is_set():
                    self.num_deaths += 1
                    log.error("replica %d is lost (%s); Ray starts it again", self._index, type(error).__name__)
                self._at = None
                self._stopping.wait(0.2)

    def _give_up(self, reason: str) -> None:
        if self._stopping.is_set():
            return
        if self._first_known.is_set():
            self.why_given_up = f"replica {self._index} is not started again: {reason}"
            log.critical("%s", self.why_given_up)
        else:
            self._first_error = reason
            self._first_known.set()


def connect_ray(address: str | None = None) -> Any:
    """The library, connected to the cluster of RAY_ADDRESS, else to `address`; None starts one on this machine.

    Raises ConfigError if it is not installed, or there is no such cluster.
    """
    try:
        ray: Any = import_module("ray")
    except ModuleNotFoundError:
        raise ConfigError(
            "workers.orchestrator is ray, which is not installed; run pip install -r requirements/ray.txt"
        ) from None
    if not ray.is_initialized():
        # Ray's progress bars would put a function of theirs in the place of print, for all of this process.
        os.environ.setdefault("RAY_TQDM_PATCH_PRINT", "0")
        at = os.environ.get("RAY_ADDRESS", address)
        own = {} if at else {"include_dashboard": False}  # a cluster that is started here needs no dashboard
        try:
            ray.init(at, namespace=NAMESPACE, configure_logging=False, **own)
        except (ConnectionError, ValueError, RuntimeError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise ConfigError(f"RAY_ADDRESS is {at}, and no Ray cluster answers there: {reason}") from None
    return ray


def call_replicas(
    socket_path: str, number: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Any]:
    """Call a method of Worker on each rank of each replica of the engine at a socket; returns one value for each, in order."""
    was_connected = "ray" in sys.modules and sys.modules["ray"].is_initialized()
    ray = connect_ray("auto")
    try:
        actors = [ray.get_actor(_name(socket_path, index), namespace=NAMESPACE) for index in range(number)]
        return [
            value for of_one in ray.get([each.call.remote(method, args, kwargs) for each in actors]) for value in of_one
        ]
    finally:
        if not was_connected:
            ray.shutdown()


def _name(socket_path: str, index: int) -> str:
    """The name of a replica's actor in Ray. It is made of the front's socket, so that two servers do not share names."""
    return f"engine-{hashlib.sha256(socket_path.encode()).hexdigest()[:16]}-{index}"


def start_in_ray(config: EngineConfig, socket_path: str) -> list[Executor]:
    """Start all replicas of the front at a socket, and block until they are ready. Raises ConfigError or EngineUnavailable."""
    ray = connect_ray()
    groups = import_module("ray.util.placement_group")
    number, ranks = config.workers.replicas, config.workers.num_ranks
    bundles = number * ranks
    threads = config.model.num_threads or max(1, int(ray.cluster_resources().get("CPU", 1)) // bundles)
    share = replace(
        config,
        model=replace(config.model, num_threads=threads),
        workers=replace(config.workers, replicas=1, orchestrator="processes"),
    )
    group = groups.placement_group([{"CPU": threads}] * bundles, strategy=config.workers.placement)
    total = ray.cluster_resources().get("CPU", 0)
    if bundles * threads > total or not group.wait(PLACEMENT_S):
        groups.remove_placement_group(group)
        raise ConfigError(
            f"workers.replicas is {number} with {_ranks_in_words(ranks)}{threads} CPUs each (model.num_threads), and the Ray "
            f"cluster has "
            f"{ray.available_resources().get('CPU', 0):g} of {total:g} CPUs free; use fewer, or add nodes"
        )
    key = secrets.token_bytes(32)
    engines = [
        RayEngine(index, of_replica(share, index), key, group, _name(socket_path, index)) for index in range(number)
    ]
    try:
        with ThreadPoolExecutor(number) as pool:
            list(pool.map(lambda engine: engine.start(config.triton.attach_timeout_s), engines))
        replicas = [Executor(SocketTransport(engine), engine) for engine in engines]
        if not wait_until(lambda: all(each.is_ready() for each in replicas), timeout_s=10):
            raise EngineUnavailable(
                "the replicas are ready but do not answer; may this machine reach the nodes' ports?"
            )
        return replicas
    except BaseException:
        for engine in engines:
            engine.stop()
        raise


def _ranks_in_words(number: int) -> str:
    return "" if number == 1 else f"{number} ranks of "
