"""genai-perf 0.0.8 in its modes: it runs clean, and what it counts is what was asked for and what the server counts.

EVERBATCH_GENAI_PERF names the `bin` directory of an environment that has it, EVERBATCH_PERF_ANALYZER that of
test_perf_analyzer; without both the tests are skipped. docs/genai-perf.md says how to install it (0.9 GB, so `.ci/run`
does not).

It counts tokens of texts that it tokenises again, which need not be the tokens that the model said: two tokens that stand
side by side may be one. So all replies but those of the mode `vllm as it is` are made to consist of the digit 7, which is a
token of its own wherever it stands.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from backend.api import load_config
from deploy import ROOT
from deploy.triton_server import TritonServer
from tests.e2e import test_perf_analyzer
from tests.e2e.conftest import EXACT
from tests.e2e.starts import wait_ready
from tests.e2e.test_metrics import PERIOD_S, VLLM, settled
from tests.gateway.conftest import Served, serving

BIN = Path(os.environ.get("EVERBATCH_GENAI_PERF", "/nonexistent"))
ANALYZER = test_perf_analyzer.TOOL
pytestmark = [
    pytest.mark.skipif(not (BIN / "genai-perf").is_file(), reason="EVERBATCH_GENAI_PERF names no genai-perf 0.0.8"),
    pytest.mark.skipif(not ANALYZER.is_file(), reason="EVERBATCH_PERF_ANALYZER names no perf_analyzer 2.50"),
]
MODEL = ROOT / "models" / "default"
SEVEN = json.loads((MODEL / "tokenizer.json").read_text())["model"]["vocab"]["7"]
BIAS = {"logit_bias": {str(SEVEN): 100}}
REQUESTS, TOKENS = 20, 6
DETERMINISTIC = "--output-tokens-mean-deterministic"
SAMPLING = json.dumps({"max_tokens": str(TOKENS), "min_tokens": str(TOKENS), **BIAS})
TRTLLM = ["--service-kind", "triton", "--backend", "tensorrtllm", DETERMINISTIC]
VLLM_BACKEND = ["--service-kind", "triton", "--backend", "vllm", DETERMINISTIC]
OPENAI = ["--service-kind", "openai", "--endpoint-type"]


class Mode(NamedTuple):
    model: str
    options: list[str]
    inputs: dict[str, Any] = {}  # of every request, beside what genai-perf sends by itself
    analyzer: tuple[str, ...] = ()


SEVENS = {"embedding_bias_words": "7", "embedding_bias_weights": 100.0}
SHAPES = ("--shape", "embedding_bias_words:1", "--shape", "embedding_bias_weights:1")
MODES = {
    "ensemble": Mode("ensemble", TRTLLM, SEVENS, SHAPES),
    "tensorrt_llm_bls": Mode("tensorrt_llm_bls", TRTLLM, SEVENS, SHAPES),
    "vllm": Mode("vllm_model", VLLM_BACKEND, {"sampling_parameters": SAMPLING}),
    "vllm as it is": Mode("vllm_model", VLLM_BACKEND),
    "chat": Mode("everbatch", [*OPENAI, "chat"], BIAS),
    "completions": Mode("everbatch", [*OPENAI, "completions"], BIAS),
}


@pytest.fixture(scope="module")
def models_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """The default models and vllm_model, which publishes vLLM's metrics too; statistics are quick."""
    directory = tmp_path_factory.mktemp("genai")
    repository = directory / "models"
    repository.mkdir()
    for source in (ROOT / "model_repository").iterdir():
        (repository / source.name).symlink_to(source)
    source, copy = ROOT / "deploy" / "profiles" / "vllm" / "vllm_model", repository / "vllm_model"
    copy.mkdir()
    (copy / "1").symlink_to(source / "1")
    (copy / "config.pbtxt").write_text((source / "config.pbtxt").read_text() + VLLM)
    config = load_config(overrides=[*EXACT, f"triton.stats_period_ms={int(PERIOD_S * 1000)}"])
    with TritonServer(config, run_dir=directory / "run", model_repository=repository, exit_timeout_s=5) as server:
        wait_ready(server)
        yield server


@pytest.fixture(scope="module")
def endpoint(models_server: TritonServer) -> Iterator[Served]:
    with serving(models_server.grpc_url, metrics_url=models_server.metrics_url) as served:
        served.wait_healthy()
        yield served


@pytest.mark.parametrize("name", MODES)
def test_what_genai_perf_counts_is_what_was_asked_for_and_what_the_server_counts(
    name: str, models_server: TritonServer, endpoint: Served, tmp_path: Path
) -> None:
    mode = MODES[name]
    url = endpoint.url if mode.model == "everbatch" else models_server.grpc_url
    for _ in range(3):  # on a busy machine perf_analyzer may find no stable window, and then leaves an empty file
        before = settled(models_server)
        status, printed = profile(mode, url, tmp_path)
        if (tmp_path / "profile_export.json").stat().st_size:
            break
    assert status == 0 and "Traceback" not in printed and "ERROR" not in printed, printed
    after = settled(models_server)
    report = json.loads((tmp_path / "profile_export_genai_perf.json").read_text())

    def growth(name: str, **labels: str) -> int:
        return round(after.sum(name, **labels) - before.sum(name, **labels))

    assert num_requests(tmp_path) == growth("everbatch_requests_finished_total", reason="length") == REQUESTS
    if name != "vllm as it is":
        output = report["output_sequence_length"]
        assert (output["min"], output["avg"], output["max"]) == (TOKENS, TOKENS, TOKENS), printed
    prompt_tokens = round(report["input_sequence_length"]["avg"] * REQUESTS)
    if name == "chat":
        prompt_tokens += REQUESTS * template_tokens(endpoint)
    for kind, family, vllm, tokens in (
        ("output", "nv_llm_output_token_len_sum", "vllm:generation_tokens_total", REQUESTS * TOKENS),
        ("prompt", "nv_llm_input_token_len_sum", "vllm:prompt_tokens_total", prompt_tokens),
    ):
        assert growth("everbatch_client_tokens_total", model=mode.model, kind=kind) == tokens, printed
        assert growth(family, model=mode.model) == tokens
        assert growth(vllm) == (tokens if mode.model == "vllm_model" else 0)
        assert growth("everbatch_tokens_total", kind={"output": "generated"}.get(kind, kind)) == tokens


def profile(mode: Mode, url: str, directory: Path) -> tuple[int, str]:
    """Runs genai-perf, which leaves its files in the directory. Returns its exit status and the end of what it prints."""
    command = [str(BIN / "genai-perf"), "profile", "-m", mode.model, *mode.options, "--streaming", "-u", url]
    command += ["--tokenizer", str(MODEL), "--artifact-dir", str(directory), "--isl", "20", "--osl", str(TOKENS)]
    command += ["--concurrency", "4", "--num-prompts", "10"]
    if mode.inputs:
        command += ["--extra-inputs", json.dumps(mode.inputs)]
    command += ["--", *mode.analyzer, "--request-count", str(REQUESTS)]
    variables = os.environ | {"HF_HUB_OFFLINE": "1", "LD_LIBRARY_PATH": str(ANALYZER.parent)}
    variables["PATH"] = f"{ANALYZER.parent}:{os.environ['PATH']}"
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, (done.stdout + done.stderr)[-3000:]


def num_requests(directory: Path) -> int:
    export = json.loads((directory / "profile_export.json").read_text())
    return len(export["experiments"][0]["requests"])


def template_tokens(endpoint: Served) -> int:
    """How many tokens the chat template adds to a message of one token."""
    messages = [{"role": "user", "content": "7"}]
    body = {"model": "everbatch", "messages": messages, "max_tokens": 1}
    status, reply, _ = endpoint.request("POST", "/v1/chat/completions", body)
    assert status == 200, reply
    return int(reply["usage"]["prompt_tokens"]) - 1
