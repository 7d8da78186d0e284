"""An engine process over the model-free worker group, without torch.

It takes the options of backend.executor.engine_process, --config FILE and --socket PATH.
A prompt that begins with HANGS never comes back from its step, one that begins with KILLS ends the process. EVERBATCH_STEP_MS is
the least time of a step.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import threading
import time

from backend.api.config.file import load_config
from backend.api.processes.arguments import arguments_of
from backend.core.messages import Hello
from backend.core.step import StepInput
from backend.engine.core import EngineCore
from backend.engine.loop import EngineLoop
from backend.engine.restoring import restore_sessions
from backend.executor.kept_files import KeptArguments, KeptFiles
from backend.wire.engine_server import EngineServer
from tests.fakes.hash_worker import HashWorkerGroup

HANGS, KILLS = 666, 667
STEP_S = float(os.environ.get("EVERBATCH_STEP_MS", "0")) / 1000


class HangingWorkerGroup(HashWorkerGroup):
    def submit(self, step: StepInput) -> None:
        if any(row.token_ids[0] == HANGS for row in step.new_rows):
            threading.Event().wait()
        if any(row.token_ids[0] == KILLS for row in step.new_rows):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(STEP_S)
        super().submit(step)


class HashArguments(KeptArguments, kw_only=True):
    config: str
    socket: str


def main() -> None:
    arguments = arguments_of(HashArguments)
    config = load_config(arguments.config)
    kept = KeptFiles.of(arguments)
    core = EngineCore(
        config,
        HangingWorkerGroup(keep_trace=False, kv_block_size=config.kv_cache.block_size),
        pool_descriptor=kept.pool,
    )
    if kept.sessions:
        restore_sessions(core, (kept.sessions[0], kept.sessions[1]))
    loop = EngineLoop(core, clients_hold=config.triton.resume_requests)
    name = secrets.token_hex(8)
    server = EngineServer(
        arguments.socket,
        loop.post,
        lambda index: Hello(
            *(index, core.model, "", config, core.max_kv_tokens, core.names.directories),
            *(name, loop.trials.request_id),
        ),
        present_iteration=lambda: loop.present_iteration,
    )
    threading.Thread(target=lambda: (sys.stdin.read(), loop.stop()), daemon=True).start()

    def publish_trial(request_id: int | None) -> None:
        print(json.dumps({"trial": request_id is not None}), flush=True)
        server.publish_trial(request_id)

    print(json.dumps({"ready": True}), flush=True)
    loop.run(server.deliver, publish_adapters=server.publish_adapters, publish_trial=publish_trial)
    server.close()


if __name__ == "__main__":
    main()
