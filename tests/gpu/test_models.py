"""Whole models on the GPU: the tokens are the CPU's, and nobody can tell an eviction, except by latency."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from backend.api.config.kv_bits import KV_TYPES, named
from tests.gpu.harness import (
    DEVICE,
    IS_GPU,
    each,
    pytestmark,  # noqa: F401
)

DEFAULT_MODEL = Path(__file__).parents[2] / "models" / "default"
# name -> what makes a random model of it
MODELS: dict[str, dict[str, Any]] = {
    "llama3": dict(family="llama3", head_dim=32),
    "mistral": dict(family="mistral", head_dim=32),
    "qwen3": dict(family="qwen3", head_dim=64),
    "qwen3_moe": dict(family="qwen3_moe", head_dim=64),
    "default": {},
    "qwen3.5": dict(tiny="qwen3.5"),
    "lfm2": dict(tiny="lfm2"),
}
NEW_TOKENS = 40 if IS_GPU else 3
LENGTHS = (3, 17, 60, 33, 90, 1, 48, 75) if IS_GPU else (3, 17)
BLOCK_SIZE = 16


def directory_of(name: str, scratch: str) -> Path:
    if not MODELS[name]:
        return DEFAULT_MODEL
    if "tiny" in MODELS[name]:
        from tests.families.tiny import make

        return make(Path(scratch), MODELS[name]["tiny"])
    from tools.make_random_model import make_random_model

    return make_random_model(Path(scratch), **MODELS[name])


class Generated(NamedTuple):
    tokens: list[list[int]]  # the generated tokens of each prompt
    num_recomputed: int
    num_graphs: int


def generate(
    directory: Path, device: str, kernels: str, pool_tokens: int = 4096, kv: str = "auto", graphs: bool = True
) -> Generated:
    """Generates greedily, in float32."""
    from backend.api.config.file import load_config
    from backend.api.request import Request
    from backend.engine.core import EngineCore
    from backend.worker.group import InProcessWorkerGroup

    settings = [f"model.path={directory}", f"model.device={device}", "model.dtype=float32", f"model.kernels={kernels}"]
    settings += [f"model.cuda_graphs={str(graphs).lower()}"]
    settings += [f"kv_cache.block_size={BLOCK_SIZE}", f"kv_cache.max_tokens={pool_tokens}"]
    settings += [f"kv_cache.{key}={value}" for key, value in named(kv).items() if value]
    settings += ["kv_cache.watermark=0.0", "scheduler.policy=max_utilization", "scheduler.max_num_tokens=64"]
    settings += ["kv_cache.enable_block_reuse=false", "scheduler.max_batch_size=8", "model.max_seq_len=256"]
    config = load_config(None, settings)
    workers = InProcessWorkerGroup(config.model, config.scheduler, config.kv_cache)
    core = EngineCore(config, workers)
    vocab = core.model.vocab_size
    for number, length in enumerate(LENGTHS, 1):
        prompt = [(7 * i + 13 * number) % (vocab - 5) + 3 for i in range(length)]
        core.enqueue(number, Request(prompt, NEW_TOKENS, streaming=True))
    tokens: list[list[int]] = [[] for _ in LENGTHS]
    while core.has_work:
        for response in core.step():
            assert not response.has_error(), response.error_msg
            tokens[response.request_id - 1] += response.result.output_token_ids[0]
    num_graphs = len(workers.runner.graphs) if kernels == "triton" else 0
    workers.shutdown()
    return Generated(tokens, core.counters.recomputed_tokens_total, num_graphs)


@each("name", tuple(MODELS))
def test_greedy_tokens_in_float32_are_the_cpus(name: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        directory = directory_of(name, scratch)
        expected = generate(directory, "cpu", "torch").tokens
        measured = generate(directory, str(DEVICE), "triton").tokens
    assert measured == expected and all(len(tokens) == NEW_TOKENS for tokens in measured)


def test_tokens_are_the_same_with_and_without_graphs() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        directory = directory_of("llama3", scratch)
        eager = generate(directory, str(DEVICE), "triton", graphs=False)
        replayed = generate(directory, str(DEVICE), "triton", graphs=True)
    assert replayed.tokens == eager.tokens
    assert eager.num_graphs == 0 and (replayed.num_graphs > 0 or not IS_GPU)


@each("kv", KV_TYPES)
@each("name", ("llama3", "mistral", "qwen3.5"))
def test_a_small_pool_gives_the_tokens_of_a_large_one(name: str, kv: str) -> None:
    small = 256 if IS_GPU else 32
    with tempfile.TemporaryDirectory() as scratch:
        directory = directory_of(name, scratch)
        roomy = generate(directory, str(DEVICE), "triton", 4096, kv)
        cramped = generate(directory, str(DEVICE), "triton", small, kv)
    assert cramped.tokens == roomy.tokens
    assert roomy.num_recomputed == 0 and (cramped.num_recomputed > 0 or not IS_GPU)
