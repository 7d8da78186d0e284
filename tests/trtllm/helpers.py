"""Executors over a tiny checkpoint, and what a program does with them."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

from backend.api import EngineConfig
from backend.api.config.schema import KvCacheConfig, ModelConfigSection
from compat import trtllm

ENGINE = EngineConfig(
    model=ModelConfigSection(kernels="torch", num_threads=1, dtype="float32", device="cpu"),
    kv_cache=KvCacheConfig(block_size=32),
)
SOON = timedelta(seconds=30)


def make_config(**options: Any) -> trtllm.ExecutorConfig:
    options.setdefault("kv_cache_config", trtllm.KvCacheConfig(max_tokens=2048))
    config = trtllm.ExecutorConfig(**options)
    config.engine_config = ENGINE
    return config


def make_executor(model_path: Path | str, config: trtllm.ExecutorConfig) -> trtllm.Executor:
    return trtllm.Executor(model_path, trtllm.ModelType.DECODER_ONLY, config)


def finish(executor: trtllm.Executor, request_id: int) -> list[trtllm.Response]:
    """All responses of a request, up to the final one."""
    responses: list[trtllm.Response] = []
    while not (responses and (responses[-1].has_error() or responses[-1].result.is_final)):
        new = executor.await_responses(request_id, SOON)
        assert new, f"nothing came for {SOON}; so far {responses}"
        responses += new
    return responses


def run(executor: trtllm.Executor, *args: Any, **kwargs: Any) -> trtllm.Result:
    """The result of a request that is not streamed."""
    (response,) = finish(executor, executor.enqueue_request(trtllm.Request(*args, **kwargs)))
    assert not response.has_error(), response.error_msg
    return response.result


def refused(executor: trtllm.Executor, *args: Any, **kwargs: Any) -> str:
    """The error of a request."""
    (response,) = finish(executor, executor.enqueue_request(trtllm.Request(*args, **kwargs)))
    return response.error_msg


def tokens_of(responses: list[trtllm.Response]) -> list[int]:
    return [token for response in responses for token in response.result.output_token_ids[0]]
