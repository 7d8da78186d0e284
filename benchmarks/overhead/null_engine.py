"""An engine process without a model, for benchmarks only: the real EngineCore, loop and socket over workers that compute nothing.

    python -m benchmarks.overhead.null_engine --config FILE --socket PATH --step-ms 4

Every row that samples gets the next of a few token ids. `--step-ms`: what a step lasts at least, asleep, as with a GPU.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque

from msgspec import Struct

from backend.api.config.file import load_config
from backend.api.errors import InvalidRequest
from backend.api.lora import LoraConfig
from backend.api.processes.arguments import arguments_of
from backend.api.processes.setup import calm_garbage_collector
from backend.core.messages import Hello
from backend.core.step import MemoryUse, ModelInfo, PreparedAdapter, SampledToken, StepInput, StepOutput
from backend.engine.core import EngineCore
from backend.engine.loop import EngineLoop
from backend.wire.engine_server import EngineServer

FIRST_TOKEN, NUM_TOKENS = 1000, 4000  # ids that are told in turn: ordinary words of the tokenizer


class NullWorkerGroup:
    """Implements WorkerGroup."""

    guides = images = None

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._next_at = 0.0
        self._next = 0
        self._done: deque[StepOutput] = deque()

    def load(self) -> ModelInfo:
        return ModelInfo("null", vocab_size=32_000, max_seq_len=1 << 20, kv_bytes_per_token=1, device="null")

    def prepare_adapter(self, lora: LoraConfig) -> PreparedAdapter:
        raise InvalidRequest("the null engine takes no adapters")

    def free_memory_bytes(self) -> int:
        return 1 << 30

    def check(self) -> None:
        """Nothing to check: these workers have no processes."""

    def memory_use(self) -> MemoryUse:
        return MemoryUse()

    def initialize_kv_cache(
        self, max_blocks: int, block_size: int, num_blocks: int, layers: object = None, num_snapshots: int = 0
    ) -> None:
        pass

    def submit(self, step: StepInput) -> None:
        sampled = []
        for row in step.rows:
            if row.samples:
                self._next = (self._next + 1) % NUM_TOKENS
                sampled.append(SampledToken(row.slot, FIRST_TOKEN + self._next))
        self._done.append(StepOutput(step.step_id, sampled))

    def collect(self) -> StepOutput:
        now = time.monotonic()
        self._next_at = max(self._next_at + self._step_s, now)
        time.sleep(self._next_at - now)
        return self._done.popleft()

    def shutdown(self) -> None:
        pass


class NullArguments(Struct, forbid_unknown_fields=True):
    config: str
    socket: str
    step_ms: float = 0.0


def main() -> None:
    arguments = arguments_of(NullArguments)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    config = load_config(arguments.config)
    core = EngineCore(config, NullWorkerGroup(arguments.step_ms / 1e3))
    loop = EngineLoop(core)
    server = EngineServer(
        arguments.socket,
        loop.post,
        lambda index: Hello(index, core.model, config.model.path, config, core.max_kv_tokens),
        present_iteration=lambda: loop.present_iteration,
    )
    signal.signal(signal.SIGTERM, lambda *_: loop.stop())
    calm_garbage_collector()
    if "EVERBATCH_WAY_PROBE" in os.environ:
        from benchmarks.overhead import probe

        probe.start("engine")
    loop.run(server.deliver, server.publish_stats, server.publish_records)


def _die_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
