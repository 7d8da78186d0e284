"""perf_analyzer 2.50 against the models that it knows: every request ends, and its responses are those that were asked for.

The program is in tritonclient's 2.50.0 wheel only. EVERBATCH_PERF_ANALYZER names a directory that holds `perf_analyzer`, and
libcudart.so.12 beside it; without one the tests are skipped. `.ci/run` fetches both.
"""

from __future__ import annotations

import json
import os
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from backend.api import load_config
from deploy import ROOT
from deploy.triton_server import TritonServer
from tests.e2e.conftest import EXACT, everything_is_answered
from tests.e2e.starts import wait_ready

TOOL = Path(os.environ.get("EVERBATCH_PERF_ANALYZER", "/nonexistent"), "perf_analyzer")
pytestmark = pytest.mark.skipif(not TOOL.is_file(), reason="EVERBATCH_PERF_ANALYZER names no perf_analyzer 2.50")
TOKENS = 6
TEXT = {"text_input": ["def main("], "max_tokens": [TOKENS], "stream": [True], "exclude_input_in_output": [True]}
TEXT |= {"min_length": [TOKENS]}
# Triton model -> one request of it
REQUESTS: dict[str, dict[str, Any]] = {
    "ensemble": TEXT,
    "tensorrt_llm_bls": TEXT,
    "vllm_model": {
        "text_input": ["def main("],
        "stream": [True],
        "exclude_input_in_output": [True],
        "sampling_parameters": [json.dumps({"max_tokens": str(TOKENS), "min_tokens": str(TOKENS)})],
    },
    "tensorrt_llm": {
        "input_ids": {"content": [5, 6, 7], "shape": [3]},
        "input_lengths": [3],
        "request_output_len": [TOKENS],
        "streaming": [True],
    },
}
SHAPES = {"text_input": 1, "max_tokens": 1}
LOADS = (["--concurrency-range", "1"], ["--concurrency-range", "16"], ["--concurrency-range", "64"])
POISSON = ["--request-rate-range", "20", "--request-distribution", "poisson"]


@pytest.fixture(scope="module")
def models_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    directory = tmp_path_factory.mktemp("perf")
    repository = directory / "models"
    repository.mkdir()
    for source in (*(ROOT / "model_repository").iterdir(), *(ROOT / "deploy" / "profiles" / "vllm").iterdir()):
        (repository / source.name).symlink_to(source)
    config = load_config(overrides=list(EXACT))
    with TritonServer(config, run_dir=directory / "run", model_repository=repository, exit_timeout_s=5) as server:
        wait_ready(server)
        yield server


@pytest.mark.parametrize("model", REQUESTS)
def test_every_request_ends_with_a_response_for_each_token(
    model: str, models_server: TritonServer, tmp_path: Path
) -> None:
    for load in (*LOADS, POISSON):
        requests = measure(model, models_server, load, tmp_path)
        counts = [len(request["response_timestamps"]) for request in requests]
        assert len(counts) >= 64 and set(counts) == {TOKENS}, (load, counts)


def measure(model: str, server: TritonServer, load: list[str], directory: Path) -> list[dict[str, Any]]:
    """The requests that perf_analyzer has measured."""
    data, export = directory / "data.json", directory / "export.json"
    data.write_text(json.dumps({"data": [REQUESTS[model]]}))
    shapes = [
        f"--shape={name}:{size}" for name, size in SHAPES.items() if name in REQUESTS[model] and model != "vllm_model"
    ]
    command = [
        str(TOOL),
        "-m",
        model,
        "-u",
        server.grpc_url,
        "-i",
        "grpc",
        "--streaming",
        "--async",
        "--input-data",
        str(data),
    ]
    command += [*shapes, *load, "--request-count", "64", "-s", "999", "--profile-export-file", str(export)]
    variables = os.environ | {"LD_LIBRARY_PATH": str(TOOL.parent)}
    for _ in range(5):
        export.unlink(missing_ok=True)  # perf_analyzer refuses to replace it
        try:
            done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=False)
        except (
            subprocess.TimeoutExpired
        ) as stuck:  # Seen once in some thousand runs. It is ours unless all was answered.
            everything_is_answered(server)
            warnings.warn(f"perf_analyzer did not end although every request was answered: {stuck}", stacklevel=2)
            continue
        assert done.returncode == 0, (done.stdout + done.stderr)[:1000]
        if (requests := exported(export)) is not None:
            return requests
    raise AssertionError(
        f"perf_analyzer wrote no whole report in five runs; the last one printed {done.stdout[-1000:]}"
    )


def exported(report: Path) -> list[dict[str, Any]] | None:
    """The requests of one report; None when perf_analyzer 2.50 did not write it to the end.

    For an output that a response leaves out it prints whatever lies at a stale address; where that happens to be a NaN, its
    JSON writer stops there without an error. On a busy machine it may also find no stable window and write nothing.
    """
    text = report.read_text() if report.is_file() else ""
    try:
        return list(json.loads(text)["experiments"][0]["requests"])
    except json.JSONDecodeError:
        return None
