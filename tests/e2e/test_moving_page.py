"""docs/moving-from-tensorrt-llm.md and docs/start.md: their requests, programs and shell lines do what the pages say."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from backend.api import load_config
from deploy import ROOT
from deploy.triton_server import TritonServer
from tests.docs.pages import examples, text_of
from tests.e2e.conftest import EXACT
from tests.e2e.starts import wait_ready
from tests.e2e.test_page_examples import answers, requests_of
from tests.e2e.wire import post
from tests.gateway.conftest import Served

MOVING, START = "moving-from-tensorrt-llm.md", "start.md"
PARAMETER = """
parameters: {
  key: "%s"
  value: {
    string_value: "%s"
  }
}
"""
# As upstream's template script leaves them: `${...}` where nothing was filled in.
OLD = {
    "tensorrt_llm": {
        "gpt_model_type": "inflight_fused_batching",
        "gpt_model_path": "/engines/1-gpu",
        "max_tokens_in_paged_kv_cache": "8192",
        "batch_scheduler_policy": "max_utilization",
        "kv_cache_free_gpu_mem_fraction": "${kv_cache_free_gpu_mem_fraction}",
        "executor_worker_path": "/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker",
    },
    "tensorrt_llm_bls": {"accumulate_tokens": "true"},
}


def printed_at(server: TritonServer, program: str, openai_url: str = "") -> str:
    """What a program of a page prints, asking this server."""
    program = program.replace("127.0.0.1:8001", server.grpc_url).replace("http://127.0.0.1:9000", openai_url)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(program, "page", "exec"), {"__name__": "example"})
    return printed.getvalue()


def test_the_requests_of_the_page_on_moving_are_answered(server: TritonServer) -> None:
    (ensemble,), bls, (tokens,) = answers(server, MOVING)
    assert ensemble["text_output"].startswith("def main(") and len(bls) == 3 and tokens["sequence_length"] == 7


def test_the_tritonclient_program_prints_a_text(server: TritonServer) -> None:
    (program,) = examples(MOVING)
    assert printed_at(server, program).startswith("self")


def test_the_programs_and_requests_of_the_first_ten_minutes(server: TritonServer, served: Served) -> None:
    with_openai, with_own_client = examples(START)
    assert printed_at(server, with_openai, served.url).strip() and printed_at(server, with_own_client).strip()
    ((answer,),) = answers(server, START)  # tests/real/test_pages.py compares it with the page
    assert answer["text_output"].startswith(requests_of(START)[0][1]["text_input"])


def taking_over_lines(old: Path, new: Path) -> str:
    """The shell lines of the page's third step up to `serve`, with these directories."""
    (block,) = re.findall(
        r"^```sh\n(cp -r model_repository NEW\n.*?)^\./everbatch serve", text_of(MOVING), re.DOTALL | re.MULTILINE
    )
    return block.replace("NEW", str(new)).replace("OLD", str(old))


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A server of model directories that took an old repository's parameters over as the page says."""
    directory = tmp_path_factory.mktemp("moved")
    old, new = directory / "old", directory / "new"
    for model, parameters in OLD.items():
        (old / model).mkdir(parents=True)
        lines = [f'name: "{model}"\nbackend: "tensorrtllm"\n', *(PARAMETER % item for item in parameters.items())]
        (old / model / "config.pbtxt").write_text("".join(lines))
    subprocess.run(["bash", "-ec", taking_over_lines(old, new)], cwd=ROOT, check=True)
    config = load_config(overrides=[*EXACT, f"model.path={ROOT / 'models' / 'default'}"])
    with TritonServer(config, run_dir=directory / "run", model_repository=new, exit_timeout_s=5) as server:
        wait_ready(server)
        yield server


def test_old_parameters_are_taken_over_and_the_log_says_so_in_the_pages_words(moved: TritonServer) -> None:
    log = moved.log_path.read_text()
    (shown,) = re.findall(r"^```text\n(kv_cache\.max_tokens is .*?)^```", text_of(MOVING), re.DOTALL | re.MULTILINE)
    lines = shown.replace("/models/mine", str(ROOT / "models" / "default")).splitlines()
    assert [line for line in lines if line not in log] == []
    status, _ = post(moved.http_url + "/v2/models/ensemble/generate", {"text_input": "def main(", "max_tokens": 2})
    assert status == 200
