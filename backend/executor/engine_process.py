"""The engine process: `python -m backend.executor.engine_process --config FILE --socket PATH`.

Its standard output is the channel to its supervisor, one JSON object a line: {"phase": ...}, {"ready": true} or
{"error": "one sentence"}. Logs go to standard error. It ends when its standard input does, so it never outlives its parent.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import signal
import sys
import threading
import time

from backend.api.config import EngineConfig, load_config
from backend.api.errors import EverbatchError
from backend.core.messages import Hello
from backend.engine.core import EngineCore
from backend.engine.loop import EngineLoop
from backend.wire.engine_server import EngineServer

log = logging.getLogger("everbatch.engine")

# How long an idle OpenMP thread spins before it sleeps. libgomp's default spins for milliseconds; as soon as another process
# (the server, a stub) holds one of the cores, each parallel region then waits for a thread that spins in vain.
SPIN_COUNT = "10000"


def main() -> int:
    parser = argparse.ArgumentParser(prog="everbatch-engine")
    parser.add_argument("--config", help="JSON file of backend.api.config; defaults without it")
    parser.add_argument("--socket", required=True)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the supervisor decides
    threading.Thread(target=_die_with_parent, name="engine-parent-watch", daemon=True).start()
    try:
        serve(load_config(arguments.config), arguments.socket)
    except EverbatchError as error:
        _tell({"error": error.message})
        return 1
    return 0


def serve(config: EngineConfig, socket_path: str) -> None:
    """Load, listen, run until SIGTERM. Raises ConfigError when the model or the pool cannot be had."""
    started = time.monotonic()
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)  # read when torch's OpenMP is loaded
    _tell({"phase": "loading torch"})
    from backend.worker.group import InProcessWorkerGroup

    _tell({"phase": "loading the model"})
    workers = InProcessWorkerGroup(
        config.model, config.scheduler, config.kv_cache, progress=lambda line: _tell({"phase": line})
    )
    core = EngineCore(config, workers)
    loop = EngineLoop(core, stats_period_s=config.triton.stats_period_ms / 1000)
    server = EngineServer(
        socket_path,
        loop.post,
        lambda index: Hello(index, core.model, str(workers.model_path), config, core.max_kv_tokens),
        present_turn=lambda: loop.present_turn,
    )
    signal.signal(signal.SIGTERM, lambda *_: loop.stop())
    kv = core.kv.stats()
    log.info(
        "ready in %.1f s: %s, %s on %s, %d slots, %d KV blocks of %d tokens",
        time.monotonic() - started,
        core.model.name,
        core.model.dtype,
        core.model.device,
        config.scheduler.max_batch_size,
        kv.max_num_blocks,
        kv.tokens_per_block,
    )
    calm_garbage_collector()
    _tell({"ready": True})
    try:
        loop.run(server.deliver, server.publish_stats)
    finally:
        server.close()
        workers.shutdown()


def calm_garbage_collector() -> None:
    """Call once all is loaded: what exists stays, and what a step makes and drops is seldom looked through.

    Otherwise a full collection visits every object of torch (60 ms within a step), and small ones take a fifth of the host's
    time at 256 rows. Nothing in the engine makes cycles step by step.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)


def _tell(line: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _die_with_parent() -> None:
    """Standard input is a pipe whose other end only the parent holds: its end of file means the parent is gone."""
    while os.read(0, 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
