"""Settings that users of other servers bring with them keep the native kernels, and with them the promise: what a request gets is
the same, bit for bit, alone and in a small pool that evicts it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from backend.api import AdditionalOutput, EngineConfig, OutputConfig, Request, Response, SamplingConfig
from backend.api.config.schema import KvCacheConfig, ModelConfigSection, SchedulerConfig
from backend.engine.core import EngineCore
from backend.worker.group import InProcessWorkerGroup
from tests.model.gguf_files import write_gguf
from tools.make_random_model import make_random_model

NUM_REQUESTS, NUM_TOKENS, VOCAB = 7, 60, 131
ROOMY, SMALL = 4096, 256  # KV cells: for all requests, and for about two of them
HIDDEN = {"additional_outputs": ("hidden_states",)}


class Setting(NamedTuple):
    checkpoint: str  # a fixture's name for it
    model: dict[str, Any] = {}
    kv_cache: dict[str, Any] = {}
    computed_in: str = "bfloat16"


SETTINGS = {
    "blocks of 1": Setting("bfloat16", kv_cache={"block_size": 1}),
    "blocks of 8": Setting("bfloat16", kv_cache={"block_size": 8}),
    "blocks of 16": Setting("bfloat16", kv_cache={"block_size": 16}),
    "blocks of 16, int8 KV": Setting("bfloat16", kv_cache={"block_size": 16, "dtype": "int8"}),
    "float16": Setting("float16", computed_in="float32"),
    "float16 asked for": Setting("bfloat16", {"dtype": "float16"}, computed_in="float32"),
    "float16 rounded": Setting("float16", {"dtype": "bfloat16"}),
    "float16, w8a8": Setting("float16", {"quantization": "w8a8"}, computed_in="float32"),
    "GGUF F16": Setting("gguf", computed_in="float32"),
    "hidden states": Setting("bfloat16", HIDDEN),
    "hidden states, float16": Setting("float16", HIDDEN, computed_in="float32"),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    def make(name: str) -> Path:
        dtype = "float16" if name == "gguf" else name
        directory = make_random_model(tmp_path_factory.mktemp(name), "llama3", seed=3, vocab_size=VOCAB, dtype=dtype)
        return write_gguf(directory, directory / "model.gguf", "F16") if name == "gguf" else directory

    made: dict[str, Path] = {}
    return lambda name: made.get(name) or made.setdefault(name, make(name))


class Engine:
    """`alone`: in a pool for everybody, one request after the other; else all at once in a pool for two or three."""

    def __init__(self, path: Path, setting: Setting, alone: bool) -> None:
        config = EngineConfig(
            ModelConfigSection(path=str(path), num_threads=1, device="cpu", **setting.model),
            KvCacheConfig(max_tokens=ROOMY if alone else SMALL, watermark=0.0, **setting.kv_cache),
            SchedulerConfig(max_batch_size=4, max_num_tokens=64, policy="max_utilization"),
        )
        self.alone = alone
        self.core = EngineCore(config, InProcessWorkerGroup(config.model, config.scheduler, config.kv_cache))

    def answers(self, has_hidden: bool) -> dict[int, Response]:
        final: dict[int, Response] = {}
        for number in range(NUM_REQUESTS):
            self.core.enqueue(number, request(number, has_hidden))
            while self.core.has_work and self.alone:
                final |= finals(self.core.step())
        for _ in range(5000):
            final |= finals(self.core.step())
            if not self.core.has_work:
                return final
        raise AssertionError("the engine does not come to an end")


def finals(responses: list[Response]) -> dict[int, Response]:
    return {each.request_id: each for each in responses if each.result is None or each.result.is_final}


def request(number: int, has_hidden: bool) -> Request:
    rng = random.Random(number)
    prompt = [rng.randrange(2, VOCAB) for _ in range(20 + 9 * number)]
    asks = has_hidden and number % 2 == 0  # who does not ask runs beside those who do
    output = OutputConfig(
        exclude_input_from_output=True,
        return_log_probs=True,
        additional_outputs=(AdditionalOutput("hidden_states", gather_context=number == 0),) if asks else (),
    )
    sampling = SamplingConfig(temperature=1.0, seed=number) if number % 3 else SamplingConfig()
    return Request(prompt, NUM_TOKENS, output_config=output, sampling_config=sampling)


@pytest.mark.feature("001-30", "004-14")
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_replies_are_the_same_bits_alone_and_in_a_pool_that_evicts(
    checkpoint: Callable[[str], Path], native_kernels: None, setting: Setting
) -> None:
    path, has_hidden = checkpoint(setting.checkpoint), "additional_outputs" in setting.model
    alone, together = (Engine(path, setting, is_alone) for is_alone in (True, False))
    expected, replies = alone.answers(has_hidden), together.answers(has_hidden)
    model = together.core.model
    assert (model.kernels, model.dtype) == ("native", setting.computed_in)
    assert together.core.counters.recomputed_tokens_total > 0 == alone.core.counters.recomputed_tokens_total
    assert sorted(replies) == sorted(expected) == list(range(NUM_REQUESTS))
    for number, reply in replies.items():
        own, other = reply.result, expected[number].result
        assert own is not None and other is not None, reply.error_or_none
        assert own.output_token_ids == other.output_token_ids and own.log_probs == other.log_probs
        assert own.log_probs and own.additional_outputs == other.additional_outputs
        assert own.additional_context_outputs == other.additional_context_outputs
        assert bool(own.additional_outputs) == (has_hidden and number % 2 == 0)
