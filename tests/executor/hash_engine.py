"""An engine process over the model-free worker group, without torch.

It takes the options of backend.executor.engine_process, --config FILE and --socket PATH.
A prompt that begins with HANGS never comes back from its step.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading

from backend.api.config_file import load_config
from backend.core.messages import Hello
from backend.core.step import StepInput
from backend.engine.core import EngineCore
from backend.engine.loop import EngineLoop
from backend.wire.engine_server import EngineServer
from tests.fakes.hash_worker import HashWorkerGroup

HANGS = 666


class HangingWorkerGroup(HashWorkerGroup):
    def submit(self, step: StepInput) -> None:
        if any(row.token_ids[0] == HANGS for row in step.new_rows):
            threading.Event().wait()
        super().submit(step)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-m", dest="module")
    parser.add_argument("--config", required=True)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--owns-directory", action="store_true")
    arguments = parser.parse_args()
    config = load_config(arguments.config)
    core = EngineCore(config, HangingWorkerGroup(keep_trace=False))
    loop = EngineLoop(core)
    server = EngineServer(
        arguments.socket,
        loop.post,
        lambda index: Hello(index, core.model, "", config),
        present_iteration=lambda: loop.present_iteration,
    )
    threading.Thread(target=lambda: (sys.stdin.read(), loop.stop()), daemon=True).start()
    print(json.dumps({"ready": True}), flush=True)
    loop.run(server.deliver)
    server.close()


if __name__ == "__main__":
    main()
