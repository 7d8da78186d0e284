"""What idle sessions cost a real engine process: the memory that it accounts for them, besides the KV pool."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from backend.api import EngineConfig, OutputConfig, Request, SessionConfig
from backend.api.config.schema import KvCacheConfig, ModelConfigSection, SchedulerConfig, SessionsConfig
from backend.engine.sessions import idle_bytes
from backend.executor import Executor
from tests.executor.helpers import drain

BLOCK, LENGTH, TOGETHER = 32, 500, 8
POOL = 2048  # tokens: four sessions fill it


@pytest.fixture
def executor(checkpoint: Callable[[str], Path], native_kernels: None, tmp_path: Path) -> Executor:
    config = EngineConfig(
        ModelConfigSection(path=str(checkpoint("llama2")), num_threads=1, device="cpu"),
        KvCacheConfig(block_size=BLOCK, max_tokens=POOL),
        SchedulerConfig(max_batch_size=TOGETHER, max_num_tokens=POOL),
        sessions=SessionsConfig(max_sessions=10_000),
    )
    return Executor.launch(config, str(tmp_path / "s" / "engine.sock"))


def begin(executor: Executor, numbers: range) -> None:
    """Idle sessions of LENGTH tokens each, the last of which is sampled."""
    output = OutputConfig(exclude_input_from_output=True)
    for first in numbers[::TOGETHER]:
        ids = []
        for number in range(first, min(first + TOGETHER, numbers.stop)):
            prompt = random.Random(number).choices(range(2, 120), k=LENGTH - 1)
            session = SessionConfig(number, start=True)
            ids.append(executor.enqueue_request(Request(prompt, 1, output_config=output, session=session)))
        assert all(answers[-1].error_or_none is None for answers in drain(executor, ids).values())


def anonymous_bytes(pid: int | None) -> int:
    """Memory of the process that is its own, and no file's."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    (kib,) = re.findall(r"^Anonymous: +(\d+) kB$", text, re.MULTILINE)
    return 1024 * int(kib)


def test_an_engine_process_grows_by_what_it_accounts_for_idle_sessions(executor: Executor) -> None:
    with executor:
        # Afterwards all of the pool and of the buffers has been written, and no free memory of the start is left in the heap.
        begin(executor, range(1, 1 + 50 * TOGETHER))
        before = anonymous_bytes(executor._process.pid)
        begin(executor, range(1000, 2200))
        grown = (anonymous_bytes(executor._process.pid) - before) / 1200
    accounted = idle_bytes(LENGTH, BLOCK)
    assert accounted == 3392 + 4 * 500 + 112 * 16
    assert accounted / 2 < grown <= accounted
