"""The engine process: `python -m backend.executor.engine_process --config FILE --socket PATH`.

It reports to its supervisor on standard output, with one JSON object a line: {"phase": ...}, {"ready": true},
{"error": "one sentence"}, or {"remark": "one sentence"} on how the model runs, which the launcher prints. Logs go to standard
error. It ends when its standard input ends, so it never outlives its parent.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable

from backend.api.config.file import load_config
from backend.api.config.schema import EngineConfig
from backend.api.errors import EverbatchError
from backend.api.processes.arguments import arguments_of
from backend.api.processes.setup import set_up_logging
from backend.core.step import WorkersLost
from backend.executor.kept_files import KeptArguments, KeptFiles
from backend.executor.served_engine import ServedEngine, load_libraries

log = logging.getLogger("everbatch.engine")


class EngineArguments(KeptArguments, forbid_unknown_fields=True, kw_only=True):
    """`config`: a JSON file of backend.api.config.schema; defaults without it.

    `owns_directory`: remove the socket's directory if the parent dies. `spare`: load libraries only, until standard input has
    a line.
    """

    socket: str
    config: str | None = None
    owns_directory: bool = False
    spare: bool = False


def serve_engine(config: EngineConfig, socket_path: str, kept: KeptFiles) -> None:
    """Load the model, listen on the socket, and run until SIGTERM. Raises ConfigError when model or KV pool cannot be made."""
    engine = ServedEngine(config, socket_path, tell, kept)
    signal.signal(signal.SIGTERM, lambda *_: engine.stop())
    tell({"ready": True})
    engine.run()


def main(serve: Callable[[EngineConfig, str, KeptFiles], None] = serve_engine) -> int:
    """The program of a process that clients reach at a socket as an engine. `serve` runs until SIGTERM; its last argument is
    what the parent holds for it.
    """
    arguments = arguments_of(EngineArguments)
    set_up_logging("engine")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; only the supervisor acts on it
    own = os.path.dirname(arguments.socket) if arguments.owns_directory else None
    called = threading.Event()
    watch = threading.Thread(target=_die_with_parent, args=(own, called), name="engine-parent-watch", daemon=True)
    watch.start()
    try:
        if arguments.spare:
            load_libraries()
            called.wait()
        serve(load_config(arguments.config), arguments.socket, KeptFiles.of(arguments))
    except EverbatchError as error:
        tell({"error": error.message})
        return 1
    except WorkersLost as error:
        log.critical("%s; the engine ends", error)
        return 1
    return 0


def tell(line: dict[str, object]) -> None:
    """Report to the supervisor. If the supervisor has just ended, `_die_with_parent` ends this process as well."""
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


def _die_with_parent(directory: str | None, called: threading.Event | None = None) -> None:
    """End this process when standard input ends: only the parent holds the other end of that pipe, so the parent is gone.

    `directory`: made for this engine by a parent that had no chance to remove it, killed as it was. `called` is set when the
    parent has written something: this process was a spare, and is the engine process from now on.
    """
    while os.read(0, 4096):
        if called is not None:
            called.set()
    if directory is not None:
        shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
