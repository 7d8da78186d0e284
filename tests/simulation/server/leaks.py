"""What must not be held any more once all requests have ended."""

from __future__ import annotations

from collections import Counter

from backend.engine.level_traffic import LevelTraffic
from tests.simulation.server.disk import STALLS
from tests.simulation.server.processes import MemoryFile
from tests.simulation.server.stubs import Stub
from tests.simulation.server.threads import here
from tests.simulation.server.world import Process, Violation

STUB_FILES = 3  # the connection to the engine, and the housekeeper's pipe
ENGINE_PIPES = 2
MAX_FRAMES = 4  # that may be on their way: statistics, and a heartbeat


def check_stub(stub: Stub) -> None:
    server, executor, process = stub.server, stub.executor, stub.process
    if server is None or executor is None or process is None or not process.is_alive:
        return
    text = server._intake.text
    held = {
        "live requests": len(executor._replay._live),
        "mailboxes": len(executor._mailboxes._boxes),
        "live streams": len(server._pump._live),
        "requests in the engine": server._intake._load._num_requests,
        "texts": len(text._queued) + len(text._lines) + len(text._reading) + text._num_bytes,
        "queued streams": sum(lane.qsize() for lane in (*server._pump._lanes, server._pump._long_lane)),
        "ended rows": len(server._books.ended._waiting),
    }
    _refuse(stub.model, held)
    names = Counter(thread.name for thread in process.threads if thread.is_alive)
    most = {"everbatch-text": text._num_threads + len(text._given_up)}
    many = {name: count for name, count in names.items() if count > most.get(name, 1)}
    if many:
        raise Violation(f"{stub.model} has more threads than it needs: {many}")
    num_files = STUB_FILES - (not executor.is_connected) + ENGINE_PIPES * stub.is_owner
    if _num_files(process) > num_files:
        raise Violation(f"{stub.model} has {len(process.files)} open files: {process.files}")


def _num_files(process: Process) -> int:
    """Open files, without those that hold sessions."""
    return sum(not isinstance(file, MemoryFile) for file in process.files.values())


def check_engine(process: Process, num_clients: int) -> None:
    engine = process.engine
    if engine is None or not process.is_alive:
        return
    core, server = engine._core, engine._server
    core.check_integrity()
    kv = core.kv.stats()
    slots = core.config.scheduler.max_batch_size - core.kv.state.slots.num_free
    _refuse(
        "the engine",
        {
            "live requests": core.num_live,
            "blocks": kv.used_num_blocks,
            "slots": slots,
            "tables": len(set(core.kv.state.tables) - {seq.seq_id for seq in core.sessions._sessions.values()}),
            "steps in flight": core.workers.num_in_flight,
            "commands": engine._loop._inbox.qsize(),
        },
    )
    traffic = core.level
    if isinstance(traffic, LevelTraffic):
        _refuse("the second level", {"loads": len(traffic._loading), "sequences that have asked": len(traffic._asked)})
        if STALLS not in here().disk.kinds:
            _refuse("the second level", {"reads": len(traffic._being_read), "bytes to read": traffic._queued_bytes})
    num_frames = max((len(each._outgoing._backlog) for each in server._connections.values()), default=0)
    if num_frames > MAX_FRAMES:
        raise Violation(f"{num_frames} frames wait for a client that reads")
    num_connections = len(server._connections)
    names = Counter(thread.name.rstrip("0123456789") for thread in process.threads if thread.is_alive)
    if num_connections > num_clients:
        raise Violation(f"the engine has {num_connections} connections of {num_clients} clients")
    if names["engine-reader-"] > num_connections or names["engine-writer-"] > num_connections:
        raise Violation(f"the engine has threads for connections that are gone: {names}")
    if names["engine-greeting"]:
        raise Violation(f"the engine still greets: {names}")
    if _num_files(process) > 1 + ENGINE_PIPES + num_connections:
        raise Violation(f"the engine has {len(process.files)} open files for {num_connections} connections")


def _refuse(who: str, held: dict[str, int]) -> None:
    left = {name: count for name, count in held.items() if count}
    if left:
        raise Violation(f"{who} still holds {left} though no request is left")
