"""Two servers behind a router of another project: conversations find their KV again, and a dead server is a matter of a moment.

The variable EVERBATCH_ROUTERS names the folder of the programs: `python3 -m venv V && V/bin/pip install smg==1.13.0
vllm-router==0.1.17`, then EVERBATCH_ROUTERS=V/bin.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest

from deploy.triton_server import TritonServer
from tests.e2e.conftest import serve
from tests.e2e.starts import wait_ready
from tests.gateway.conftest import Served, serving

PROGRAMS = Path(os.environ.get("EVERBATCH_ROUTERS", "nowhere"))
ROUTERS: dict[str, Callable[[int, list[str]], list[str]]] = {
    "smg": lambda port, workers: ["smg", "launch", *_common(port, workers)],
    "vllm-router": lambda port, workers: ["vllm-router", *_common(port, workers)],
}
CONVERSATIONS, TURNS = 12, 4
pytestmark = pytest.mark.skipif(
    not (PROGRAMS / "smg").exists(), reason="no routers here: see the first lines of tests/e2e/test_routers.py"
)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as held:
        return int(held.getsockname()[1])


def _common(port: int, workers: list[str]) -> list[str]:
    own = ["--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware"]
    return [*own, "--worker-urls", *workers, "--prometheus-port", str(free_port())]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[tuple[TritonServer, Served]]]:
    servers = [serve(tmp_path_factory.mktemp(f"router-{i}")) for i in range(2)]
    try:
        for server in servers:
            server.start()
        for server in servers:
            wait_ready(server)
        with serving(f"127.0.0.1:{servers[0].ports.grpc}") as one, serving(f"127.0.0.1:{servers[1].ports.grpc}") as two:
            one.wait_healthy(), two.wait_healthy()
            yield list(zip(servers, (one, two), strict=True))
    finally:
        for server in servers:
            server.kill()


@contextmanager
def routed(name: str, workers: list[str], log: Path) -> Iterator[openai.OpenAI]:
    port = free_port()
    command = ROUTERS[name](port, workers)
    with log.open("wb") as file:
        router = subprocess.Popen(
            [PROGRAMS / command[0], *command[1:]], stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=8, timeout=60) as client:
            yield client
    finally:
        os.killpg(router.pid, signal.SIGKILL)
        router.wait()


def talk(client: openai.OpenAI, number: int) -> tuple[int, int]:
    """Prompt tokens of a conversation's later turns, and how many of them were in the cache."""
    turns: list[dict[str, str]] = []
    prompts = cached = 0
    for turn in range(TURNS):
        turns.append({"role": "user", "content": f"{number}: write function number {turn} of the module {number * 7}."})
        reply = client.chat.completions.create(
            model="everbatch",
            messages=turns,
            temperature=0,
            max_completion_tokens=24,  # type: ignore[arg-type]
        )
        turns.append({"role": "assistant", "content": reply.choices[0].message.content or ""})
        assert reply.usage is not None and reply.usage.prompt_tokens_details is not None
        if turn:
            prompts += reply.usage.prompt_tokens
            cached += reply.usage.prompt_tokens_details.cached_tokens or 0
    return prompts, cached


def hit_rate(client: openai.OpenAI, first: int) -> float:
    with ThreadPoolExecutor(4) as threads:
        told = list(threads.map(lambda number: talk(client, number), range(first, first + CONVERSATIONS)))
    return sum(cached for _, cached in told) / sum(prompts for prompts, _ in told)


def wait_for(client: openai.OpenAI) -> None:
    """Until the router passes requests on."""
    deadline = time.monotonic() + 60
    while True:
        try:
            client.completions.create(model="everbatch", prompt="a", max_tokens=1)
            return
        except openai.OpenAIError:
            assert time.monotonic() < deadline, "the router does not pass requests on"
            time.sleep(0.2)


@pytest.mark.parametrize("name", ROUTERS)
def test_conversations_find_their_kv_behind_a_router(
    name: str, pair: list[tuple[TritonServer, Served]], tmp_path: Path
) -> None:
    place = 100 * list(ROUTERS).index(name)
    with pair[0][1].client() as direct:
        alone = hit_rate(direct, place)
    with routed(name, [served.url for _, served in pair], tmp_path / "log") as client:
        wait_for(client)
        behind = hit_rate(client, place + 50)
    assert alone > 0.5 and behind >= 0.9 * alone, (tmp_path / "log").read_text()[-2000:]


@pytest.mark.parametrize("name", ROUTERS)
def test_requests_go_on_once_a_server_is_dead(
    name: str, pair: list[tuple[TritonServer, Served]], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The endpoint of one server is stopped, and its port is closed from then on."""
    with serving(f"127.0.0.1:{pair[1][0].ports.grpc}") as mortal:
        mortal.wait_healthy()
        with routed(name, [pair[0][1].url, mortal.url], tmp_path / "log") as client:
            wait_for(client)
            assert hit_rate(client, 1000 + 100 * list(ROUTERS).index(name)) > 0
            mortal.stop()
            for number in range(8):
                reply = client.completions.create(model="everbatch", prompt=f"def f{number}(", max_tokens=4)
                assert reply.usage is not None and reply.usage.completion_tokens > 0
