"""The engine process: `python -m backend.executor.engine_process --config FILE --socket PATH`.

It reports to its supervisor on standard output, with one JSON object a line: {"phase": ...}, {"ready": true},
{"error": "one sentence"}, or {"remark": "one sentence"} on how the model runs, which the launcher prints. Logs go to standard
error. It ends when its standard input ends, so it never outlives its parent.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import signal
import sys
import threading
import time

from backend.api.config import EngineConfig
from backend.api.config_file import load_config
from backend.api.errors import EverbatchError
from backend.api.log_lines import set_up_logging
from backend.core.garbage import calm_garbage_collector
from backend.core.messages import Hello
from backend.engine.core import EngineCore
from backend.engine.loop import EngineLoop
from backend.executor.load import workers_of
from backend.wire.engine_server import EngineServer

log = logging.getLogger("everbatch.engine")

# This is how often an idle OpenMP thread looks for work before it sleeps. By libgomp's default it spins for milliseconds. When
# another process (the server, a stub) holds one of the cores, each parallel region then waits for a thread that spins in vain.
SPIN_COUNT = "10000"


def main() -> int:
    parser = argparse.ArgumentParser(prog="everbatch-engine")
    parser.add_argument("--config", help="JSON file of backend.api.config; defaults without it")
    parser.add_argument("--socket", required=True)
    parser.add_argument(
        "--owns-directory", action="store_true", help="remove the socket's directory if the parent dies"
    )
    arguments = parser.parse_args()
    set_up_logging("engine")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; only the supervisor acts on it
    own = os.path.dirname(arguments.socket) if arguments.owns_directory else None
    threading.Thread(target=_die_with_parent, args=(own,), name="engine-parent-watch", daemon=True).start()
    try:
        serve(load_config(arguments.config), arguments.socket)
    except EverbatchError as error:
        _tell({"error": error.message})
        return 1
    return 0


def serve(config: EngineConfig, socket_path: str) -> None:
    """Load the model, listen on the socket, and run until SIGTERM. Raises ConfigError when model or KV pool cannot be made."""
    started = time.monotonic()
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)  # OpenMP reads it when torch is loaded
    _tell({"phase": "loading torch"})
    import torch  # noqa: F401  (here, so that its time counts as this phase)

    _tell({"phase": "loading the model"})
    workers = workers_of(config, progress=lambda line: _tell({"phase": line}))
    core = EngineCore(config, workers)
    loop = EngineLoop(core, stats_period_s=config.triton.stats_period_ms / 1000)
    server = EngineServer(
        socket_path,
        loop.post,
        lambda index: Hello(
            index, core.model, str(workers.model_path), core.config, core.max_kv_tokens, core.names.directories
        ),
        present_iteration=lambda: loop.present_iteration,
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
    if workers.guides is not None:
        workers.guides.start()
    calm_garbage_collector()
    for remark in core.model.remarks:
        _tell({"remark": remark})
    _tell({"ready": True})
    try:
        loop.run(server.deliver, server.publish_stats, server.publish_records, server.publish_adapters)
    finally:
        server.close()
        workers.shutdown()


def _tell(line: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _die_with_parent(directory: str | None) -> None:
    """End this process when standard input ends: only the parent holds the other end of that pipe, so the parent is gone.

    `directory`: made for this engine by a parent that had no chance to remove it, killed as it was.
    """
    while os.read(0, 4096):
        pass
    if directory is not None:
        shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
