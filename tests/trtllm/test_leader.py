"""The same program on every rank, as mpirun starts it: rank 0 leads, the others compute, and rank 0 alone has the output."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from deploy import ROOT
from tests.families.tiny import make
from tests.model.tiers import native_kernels  # noqa: F401 (a fixture)
from tests.ranks.conftest import SIZES

pytestmark = [pytest.mark.slow("two processes that load torch"), pytest.mark.usefixtures("native_kernels")]
PROGRAM = """
import json, os, sys
from compat import trtllm
from backend.api import EngineConfig
from backend.api.config.schema import ModelConfigSection

config = trtllm.ExecutorConfig(parallel_config=trtllm.ParallelConfig(participant_ids=[0, 1], num_nodes=int(sys.argv[2])))
config.kv_cache_config = trtllm.KvCacheConfig(max_tokens=2048)
config.engine_config = EngineConfig(model=ModelConfigSection(num_threads=1, device="cpu"))
found = {}
executor = trtllm.Executor(sys.argv[1], trtllm.ModelType.DECODER_ONLY, config)
found["leads"] = executor.can_enqueue_requests()
try:
    (response,) = executor.await_responses(executor.enqueue_request(trtllm.Request([1, 2, 3, 4], 8)))
    found["tokens"] = response.result.output_token_ids
    found["iterations"] = len(executor.get_latest_iteration_stats())
except RuntimeError as error:
    found["refused"] = str(error)
executor.shutdown()
found["leads after shutdown"] = executor.can_enqueue_requests()
print(json.dumps(found))
"""


@pytest.mark.feature("002-36", "000-57")
def test_rank_0_leads_and_the_others_compute(tmp_path: Path) -> None:
    checkpoint = make(tmp_path / "model", "llama", "float32", **SIZES)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    world = {
        "OMPI_COMM_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "EVERBATCH_RANK_KEY": "a key of sixteen characters or more",
    }

    def start(rank: int) -> subprocess.Popen[str]:
        environment = {**os.environ, **world, "OMPI_COMM_WORLD_RANK": str(rank), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", PROGRAM, str(checkpoint), "2"]
        return subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True)

    processes = [start(rank) for rank in (1, 0)]
    try:
        other, leader = (json.loads(each.communicate(timeout=240)[0].splitlines()[-1]) for each in processes)
    finally:
        for each in processes:
            each.kill()
    assert leader["leads"] and len(leader["tokens"][0]) == 12 and leader["iterations"] > 0
    assert other == {
        "leads": False,
        "refused": "this process is rank 1 of 2, and rank 0 alone takes requests and gives responses; ask "
        "can_enqueue_requests() first",
        "leads after shutdown": False,
    }
