"""The Executor's two constructors over a real checkpoint: a directory, or tensors in memory and config.json's text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from backend.api import ConfigError, EngineConfig, ErrorCode, OutputConfig, Request
from backend.api.config import KvCacheConfig, ModelConfigSection, SchedulerConfig
from backend.executor import Executor
from tests.executor.helpers import drain, tokens_of
from tests.model.tiers import TORCH, TierCase

PROMPTS = ([5, 6, 7, 8], list(range(20, 60)))


def config(tier: TierCase) -> EngineConfig:
    return EngineConfig(
        ModelConfigSection(dtype="float32", kernels=tier.kernels, device="cpu", num_threads=1),
        KvCacheConfig(block_size=tier.block, max_tokens=512),
        SchedulerConfig(max_batch_size=2, max_num_tokens=64),
    )


def greedy(executor: Executor) -> list[list[int]]:
    output = OutputConfig(exclude_input_from_output=True)
    ids = executor.enqueue_requests([Request(list(prompt), 12, output_config=output) for prompt in PROMPTS])
    got = drain(executor, ids)
    return [tokens_of(got[request_id]) for request_id in ids]


@pytest.mark.feature("000-01", "000-02")
@pytest.mark.parametrize("name", ["llama2", "qwen3"])
def test_a_directory_and_buffers_give_the_same_greedy_tokens(
    checkpoint: Callable[[str], Path], tier: TierCase, name: str
) -> None:
    directory = checkpoint(name)
    with Executor.from_directory(directory, config(tier)) as executor:
        assert executor.hello.model_path == str(directory)
        of_directory = greedy(executor)
    tensors = {key: value for file in directory.glob("*.safetensors") for key, value in load_file(file).items()}
    with Executor.from_buffers(tensors, (directory / "config.json").read_text(), config(tier)) as executor:
        of_buffers = greedy(executor)
    assert of_buffers == of_directory
    assert [len(tokens) for tokens in of_directory] == [12, 12]


@pytest.mark.feature("000-01")
@pytest.mark.parametrize("path", ["Bla", "/no/such/model"])
def test_a_directory_that_is_missing_raises(path: str) -> None:
    with pytest.raises(ConfigError, match="File does not exist"):
        Executor.from_directory(path)


@pytest.mark.feature("003-12")
def test_no_model_of_this_version_takes_more_than_tokens(checkpoint: Callable[[str], Path]) -> None:
    with Executor.from_directory(checkpoint("llama2"), config(TORCH)) as executor:
        request_id = executor.enqueue_request(Request([5, 6], 2, extra_inputs={"image": b"a cat"}))
        (response,) = drain(executor, [request_id])[request_id]
    assert response.error_code is ErrorCode.UNSUPPORTED
    assert response.error_msg == "the model takes tokens only, the request holds image; leave it out"
