"""The Executor's two constructors over a real checkpoint: a directory, or tensors in memory and config.json's text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace
from safetensors.torch import load_file

from backend.api import ConfigError, EngineConfig, ErrorCode, OutputConfig, Request, SamplingConfig
from backend.api.config.schema import KvCacheConfig, ModelConfigSection, RecordsConfig, SchedulerConfig
from backend.api.stats import BlocksStored
from backend.executor import Executor
from backend.wire.client import wait_until
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


@pytest.mark.feature("001-32")
def test_everything_that_tells_the_size_of_a_block_tells_the_one_in_force(
    checkpoint: Callable[[str], Path], native_kernels: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Over an engine process, whose clients learn it from the socket; the launcher learns it from the log."""
    wanted = config(TierCase("native", 16))
    wanted = replace(
        wanted, model=replace(wanted.model, path=str(checkpoint("llama2"))), records=RecordsConfig(max_kv_events=100)
    )
    with Executor.launch(wanted, str(tmp_path / "s" / "engine.sock")) as executor:
        request_id = executor.enqueue_request(Request(list(range(2, 72)), 2, sampling_config=SamplingConfig()))
        drain(executor, [request_id])
        assert executor.hello is not None
        assert executor.hello.config.kv_cache.block_size == 32
        assert executor.hello.max_kv_tokens == 512
        assert wait_until(lambda: executor.latest_stats() is not None, 10)
        assert executor.latest_stats().latest.kv_cache.tokens_per_block == 32
        events = executor.take_kv_events(10.0)
        stored = [block for event in events if isinstance(event.data, BlocksStored) for block in event.data.blocks]
        assert [len(block.token_ids) for block in stored[:2]] == [32, 32]
    told = [record.getMessage() for record in caplog.records if record.name == "everbatch.supervisor"]
    assert [line for line in told if line.startswith("remark: ")] == [
        "remark: kv_cache.block_size is 16, and the native kernels hold KV in blocks of at least 32 tokens: "
        "it is 32 in this server"
    ]


def test_a_pool_that_is_too_small_is_not_told_to_take_blocks_that_the_kernels_do_not_have(
    checkpoint: Callable[[str], Path], native_kernels: None
) -> None:
    for block_size, remedy in ((16, "raise it"), (32, "raise it"), (64, "use --set kv_cache.block_size=32")):
        asked = config(TierCase("native", block_size))
        asked = replace(asked, kv_cache=replace(asked.kv_cache, max_tokens=20))
        with pytest.raises(ConfigError) as caught:
            Executor.from_directory(checkpoint("llama2"), asked)
        assert f"leaves room for 0 KV blocks of {max(32, block_size)} tokens" in str(caught.value)
        assert str(caught.value).endswith(remedy)
