"""Real tritonservers, one per configuration and test session; each is left with nothing in use."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import openai
import pytest

from backend.api import EngineConfig, load_config
from deploy.health import Report
from deploy.triton_server import TritonServer
from tests.e2e.profile_repository import compose
from tests.e2e.starts import wait_ready
from tests.e2e.wire import TokenClient, eventually, scrape
from tests.gateway.conftest import Served, serving

EXACT = ("model.dtype=float32", "model.num_threads=1")  # float32: evicted and recomputed KV gives the same tokens


def health(server: TritonServer) -> dict[str, Report]:
    """The last sign of life of each model, as of the launcher's last look."""
    assert server._signs is not None
    return {report.model: report for report in server._signs.latest}


def serve(run_dir: Path, *overrides: str) -> TritonServer:
    return TritonServer(load_config(overrides=[*EXACT, *overrides]), run_dir=run_dir, exit_timeout_s=5)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """The default configuration."""
    with serve(tmp_path_factory.mktemp("server")) as server:
        wait_ready(server)
        yield server


@pytest.fixture(scope="module")
def served(server: TritonServer) -> Iterator[Served]:
    """The OpenAI-compatible endpoint in front of it."""
    with serving(server.grpc_url, metrics_url=server.metrics_url) as served:
        yield served


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with served.client() as client:
        yield client


@pytest.fixture(scope="session")
def small_pool_config() -> EngineConfig:
    """A pool that holds the KV of four sessions of 96 tokens."""
    overrides = [
        "kv_cache.block_size=16",
        "kv_cache.max_tokens=384",
        "scheduler.max_batch_size=4",
        "kv_cache.watermark=0",
    ]
    return load_config(overrides=[*EXACT, *overrides])


@pytest.fixture(scope="session")
def small_pool_server(
    small_pool_config: EngineConfig, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    with TritonServer(small_pool_config, run_dir=tmp_path_factory.mktemp("small"), exit_timeout_s=5) as server:
        wait_ready(server)
        yield server


@pytest.fixture(scope="session")
def lmdeploy_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """The profiles turbomind and lmdeploy, over a pool of 1,024 tokens."""
    directory = tmp_path_factory.mktemp("lmdeploy")
    overrides = [*EXACT, "kv_cache.block_size=16", "kv_cache.max_tokens=1024", "kv_cache.watermark=0"]
    with TritonServer(
        load_config(overrides=overrides),
        run_dir=directory / "run",
        model_repository=compose(directory / "models", "turbomind", "lmdeploy"),
        probe_model=None,
        exit_timeout_s=5,
    ) as server:
        wait_ready(server)
        yield server


@pytest.fixture
def tokens(server: TritonServer) -> Iterator[TokenClient]:
    with TokenClient(server.grpc_url) as client:
        yield client


@pytest.fixture(autouse=True)
def nothing_stays_in_use(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test no request is live and no KV block in use, on every server the test has used."""
    yield
    for name in ("server", "small_pool_server", "lmdeploy_server"):
        if name in request.fixturenames:
            server = request.getfixturevalue(name)
            if server.running():
                everything_is_answered(server)


def everything_is_answered(server: TritonServer) -> None:
    """Within a minute no stub has a request that it has not answered in full, and the engine holds none and no KV block."""
    assert eventually(partial(_nothing_in_use, server), 60), (
        f"(blocks, requests) in use {_in_use(server)}; {health(server)}"
    )


def _nothing_in_use(server: TritonServer) -> bool:
    return _in_use(server) == (0, 0) and not any(report.live for report in health(server).values())


def _in_use(server: TritonServer) -> tuple[float, float]:
    metrics = scrape(server.metrics_url)
    return metrics["everbatch_kv_blocks{state=used}"], metrics["everbatch_requests{state=active}"]
