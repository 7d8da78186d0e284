"""Runner of this project's engine: the public Executor with the engine's own scheduler and sampling, in process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from backend.api import EngineConfig, Request, Response
from backend.api.config.schema import KvCacheConfig, ModelConfigSection, SchedulerConfig
from backend.api.processes.setup import calm_garbage_collector
from backend.executor.served_engine import SPIN_COUNT
from benchmarks.peers.protocol import Load, Stopwatch, Timing, serve

MIN_SLOTS = 32


class Everbatch:
    def __init__(self, load: Load) -> None:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)  # read when torch's OpenMP is loaded
        from backend.executor import Executor
        from backend.worker.group import InProcessWorkerGroup

        quantization = load.setting if load.weights in ("int8", "int4") else "none"
        section = ModelConfigSection(
            path=load.model,
            dtype="bfloat16",
            device="cpu",
            num_threads=load.threads,
            quantization=quantization,
        )
        scheduler = SchedulerConfig(max_batch_size=max(MIN_SLOTS, load.max_concurrency))
        room = load.max_concurrency * (load.max_length + KvCacheConfig().block_size)
        kv_cache = KvCacheConfig(max_tokens=room, free_memory_fraction=0.9, watermark=0.0, enable_block_reuse=False)
        config = EngineConfig(section, kv_cache, scheduler)
        workers = InProcessWorkerGroup(section, scheduler, kv_cache)
        self._executor = Executor.in_process(config, workers, load.model)
        calm_garbage_collector()
        self.note = f"{self._executor.hello.model.kernels} kernels"

    def measure(self, prompts: list[list[int]], new: int) -> Timing:
        done = threading.Event()
        errors: list[str] = []
        unfinished = set(range(len(prompts)))
        watch = Stopwatch(len(prompts))

        def receiver(index: int) -> Callable[[Response], None]:
            def on_response(response: Response) -> None:
                if response.has_error():
                    errors.append(response.error_msg)
                else:
                    watch.add(index, len(response.result.output_token_ids[0]))
                if response.is_final:
                    unfinished.discard(index)
                    if not unfinished:
                        done.set()

            return on_response

        for index, prompt in enumerate(prompts):
            self._executor.submit(Request(prompt, new, streaming=True), receiver(index))
        done.wait()
        if errors:
            raise RuntimeError(errors[0])
        return watch.timing(new)


if __name__ == "__main__":
    serve(Everbatch, ["torch"])
