"""tritonserver on model_repository/ without the launcher: the very lines of docs/triton.md."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy import ROOT, invocation, probe
from deploy.ports import Ports
from deploy.processes import RUN_ID_VARIABLE, kill_run, processes_of_run, remove_shared_memory, shared_memory_files
from tests import compiled_once
from tests.e2e.wire import eventually, post

pytestmark = pytest.mark.feature("W-12")
PAGE = (ROOT / "docs" / "triton.md").read_text()


def documented_lines(backends: Path, flags: list[str]) -> str:
    """The block of the page, with this interpreter, another place for the backend, and `flags` at its end."""
    (block,) = re.findall(r"^## A plain tritonserver$.*?^```sh\n(.*?)\n```$", PAGE, re.MULTILINE | re.DOTALL)
    *before, command = block.replace("\\\n", "").splitlines()
    assert command.startswith("$TS/bin/tritonserver --model-repository=model_repository")
    text = "\n".join(["set -e", *before, f"exec {command} {' '.join(flags)}"])
    text = text.replace("$PWD/.run/plain", str(backends)).replace(".run/plain", str(backends))
    text = text.replace("stubs/3.11/", f"stubs/{sys.version_info.major}.{sys.version_info.minor}/")
    bin_directory = Path(sys.executable).parent
    return text.replace(".venv/bin/python", sys.executable).replace("$PWD/.venv/bin", str(bin_directory))


@pytest.fixture(scope="module")
def plain_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ports]:
    if invocation.find_installation().wheel is None:
        pytest.skip("the page's lines are for the wheel's tritonserver")
    directory, ports, run_id = tmp_path_factory.mktemp("plain"), Ports.free(), f"plain-{os.getpid()}"
    prefix = f"triton_python_backend_shm_region_{run_id}_"
    flags = [f"--{name}-port={port}" for name, port in vars(ports).items()]
    flags += [f"--{name}-address=127.0.0.1" for name in vars(ports)]
    flags += [f"--backend-config=python,shm-region-prefix-name={prefix}", "--exit-timeout-secs=5"]
    kept = {name for name in os.environ if not name.startswith("EVERBATCH_")} | {compiled_once.VARIABLE}
    variables = {name: value for name, value in os.environ.items() if name in kept}
    variables |= {RUN_ID_VARIABLE: run_id, "PYTHONPATH": ""}
    with (directory / "log").open("w") as log:
        command = ["bash", "-c", documented_lines(directory / "backends", flags)]
        process = subprocess.Popen(command, cwd=ROOT, env=variables, stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{ports.http}"
        assert eventually(lambda: probe.is_ready(url) or process.poll() is not None, 180)
        assert process.poll() is None, (directory / "log").read_text()[-2000:]
        yield ports
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        assert not shared_memory_files(prefix) and not processes_of_run(run_id), "its own end leaves nothing behind"
    finally:
        kill_run(run_id)
        process.wait()
        remove_shared_memory(prefix)


def test_it_answers_from_ensemble_and_streams_and_knows_all_models(plain_server: Ports) -> None:
    url = f"http://127.0.0.1:{plain_server.http}"
    status, text = post(f"{url}/v2/models/ensemble/generate", {"text_input": "def main(", "max_tokens": 8})
    assert status == 200 and len(json.loads(text)["text_output"]) > len("def main(")
    body = {"text_input": "def main(", "max_tokens": 8, "stream": True}
    status, text = post(f"{url}/v2/models/tensorrt_llm_bls/generate_stream", body)
    assert status == 200 and text.count("data: ") >= 2
    status, text = post(f"{url}/v2/repository/index", {})
    served = {model["name"]: model["state"] for model in json.loads(text)}
    there = {path.parent.name for path in (ROOT / "model_repository").glob("*/config.pbtxt")}
    assert served == dict.fromkeys(there, "READY")
