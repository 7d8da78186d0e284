"""Models of the user's own beside a profile, flags of tritonserver's, JSON log lines, and what asks for the admin key."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from backend.api import load_config
from deploy import ROOT, passed_flags
from deploy.processes import processes_of_run
from deploy.report import examples
from deploy.triton_server import TritonServer
from tests.e2e.conftest import EXACT
from tests.e2e.starts import wait_ready
from tests.e2e.wire import TokenClient, events, eventually, post


@pytest.fixture(scope="module")
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """The default profile, and copies of two of its models as somebody makes them: cp -r, and nothing else."""
    own = tmp_path_factory.mktemp("own")
    shutil.copytree(ROOT / "model_repository" / "ensemble", own / "my_llm")
    shutil.copytree(ROOT / "model_repository" / "tensorrt_llm", own / "a_copy")
    with TritonServer(
        load_config(overrides=EXACT),
        run_dir=tmp_path_factory.mktemp("run"),
        exit_timeout_s=5,
        profiles=("trtllm",),
        model_repository=[own],
        probe_model="my_llm",
        log_format="json",
        extra_flags=passed_flags.check(["--metrics-config=summary_latencies=true"]),
    ) as server:
        wait_ready(server)
        yield server


def read(url: str, **headers: str) -> str:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as answer:
        return answer.read().decode()


def test_a_copy_under_another_name_answers_as_the_model_that_it_copies(own_server: TritonServer) -> None:
    ask = {"text_input": "def main(", "max_tokens": 8}
    answers = [post(f"{own_server.http_url}/v2/models/{name}/generate", ask) for name in ("ensemble", "my_llm")]
    assert [status for status, _ in answers] == [200, 200]
    first, second = (json.loads(text)["text_output"] for _, text in answers)
    assert first == second and first.startswith("def main(")


def test_a_copy_of_the_engines_owner_is_one_more_client_of_the_one_engine(own_server: TritonServer) -> None:
    with TokenClient(own_server.grpc_url) as client, grpcclient.InferenceServerClient(own_server.grpc_url) as plain:
        assert plain.is_model_ready("a_copy") and plain.is_model_ready("tensorrt_llm")
        assert len(client.generate([1, 2, 3], 4)) == 4
    engines = [
        process
        for process in processes_of_run(own_server.run_id)
        if b"engine_process" in Path(f"/proc/{process.pid}/cmdline").read_bytes()
    ]
    assert len(engines) == 1
    body = {"input_ids": [1, 2, 3], "input_lengths": 3, "request_output_len": 4}
    status, text = post(f"{own_server.http_url}/v2/models/a_copy/generate", body)
    assert status == 200 and len(json.loads(text)["output_ids"]) == 7


def test_the_curl_line_of_the_console_streams_tokens(own_server: TritonServer) -> None:
    (line,) = [line for line in examples(own_server, None) if line.startswith("curl ")]
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120, check=True)
    answers = events(done.stdout)
    assert len(answers) > 1 and {answer["model_name"] for answer in answers} == {"ensemble"}
    assert all("text_output" in answer for answer in answers)


def test_a_flag_reaches_tritonserver(own_server: TritonServer) -> None:
    post(f"{own_server.http_url}/v2/models/ensemble/generate", {"text_input": "a", "max_tokens": 1})
    # Triton counts a request when it lets go of it, which may be after its answer.
    assert eventually(lambda: "nv_inference_request_summary_us" in read(own_server.metrics_url), 30)


def test_the_lines_of_models_and_engine_are_json_objects(own_server: TritonServer) -> None:
    lines = [line for line in own_server.log_path.read_text().splitlines() if line.startswith("{")]
    processes = {json.loads(line)["process"] for line in lines}
    assert {"engine"} < processes and processes & {"tensorrt_llm", "a_copy"}


def test_the_index_asks_for_the_admin_key_and_the_statistics_name_every_model_without_one(
    own_server: TritonServer,
) -> None:
    """As docs/triton.md says it, for Triton 24.10."""
    assert post(f"{own_server.http_url}/v2/repository/index", {})[0] == 403
    key = (own_server.run_dir / "admin.key").read_text().strip()
    named = urllib.request.Request(
        f"{own_server.http_url}/v2/repository/index", data=b"{}", headers={"x-everbatch-admin": key}
    )
    with urllib.request.urlopen(named, timeout=30) as answer:
        index = {model["name"] for model in json.load(answer)}
    statistics = json.loads(read(f"{own_server.http_url}/v2/models/stats"))["model_stats"]
    assert index == {model["name"] for model in statistics} == {model.name for model in own_server.models}


def test_over_grpc_the_key_is_metadata(own_server: TritonServer) -> None:
    with grpcclient.InferenceServerClient(own_server.grpc_url) as client:
        with pytest.raises(InferenceServerException, match="restricted"):
            client.get_model_repository_index()
        headers = {"triton-grpc-protocol-x-everbatch-admin": own_server.admin_key}
        index = client.get_model_repository_index(headers=headers)
    assert {model.name for model in index.models} == {model.name for model in own_server.models}
