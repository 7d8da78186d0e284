"""The bindings' Executor with its engine in a process of its own."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from compat import trtllm
from tests.trtllm.helpers import SOON, finish, make_config, make_executor, refused, run


def orchestrated(**options: Any) -> trtllm.ExecutorConfig:
    parallel = trtllm.ParallelConfig(
        communication_mode=trtllm.CommunicationMode.ORCHESTRATOR, orchestrator_config=trtllm.OrchestratorConfig()
    )
    return make_config(parallel_config=parallel, **options)


@pytest.mark.feature("000-01", "000-03", "000-08", "000-09")
def test_an_engine_process_serves_as_the_engine_in_this_process_does(
    executor: trtllm.Executor, model_path: Path
) -> None:
    prompt = list(range(40))
    expected = run(executor, prompt, 4).output_token_ids
    cache = trtllm.KvCacheConfig(max_tokens=512, event_buffer_max_size=8)
    with make_executor(model_path, orchestrated(kv_cache_config=cache, request_stats_max_iterations=9)) as other:
        assert other.can_enqueue_requests()
        assert run(other, prompt, 4).output_token_ids == expected
        streamed = other.enqueue_request(trtllm.Request(prompt, 4, streaming=True))
        assert len(finish(other, streamed)) == 4
        assert "encoder_output_length" in refused(other, prompt, 4, encoder_output_length=3)
        again = other.await_responses(streamed)[0]
        assert again.error_msg == f"ReqId {streamed} has already been processed and was terminated."
        created, *stored = other.get_kv_cache_event_manager().get_latest_events(SOON)
        assert isinstance(created.data, trtllm.kv_cache.KVCacheCreatedData) and stored
        assert [each.iter for each in other.get_latest_iteration_stats()] == list(range(8))
        assert len(other.get_latest_request_stats()) == 8
        process = other._core._process._process
    assert process.poll() is not None, "the engine process has ended"
    assert not other.can_enqueue_requests()
    with pytest.raises(RuntimeError, match="shut down"):
        other.await_responses(timedelta(milliseconds=1))


def test_debug_tensors_cross_from_an_engine_process_as_they_are_in_this_one(model_path: Path) -> None:
    asked: dict[str, Any] = {"debug_config": trtllm.DebugConfig(True, True, debug_tensors_max_iterations=2)}
    told = []
    for config in (make_config(**asked), orchestrated(**asked)):
        with make_executor(model_path, config) as executor:
            run(executor, list(range(40)), 4)
            told.append(executor.get_latest_debug_tensors())
            assert executor.get_latest_debug_tensors() == []
    here, there = told
    assert [each.iter for each in here] == [each.iter for each in there] == [2, 3]
    for one, other in zip(here, there):
        assert set(one.debug_tensors) == set(other.debug_tensors)
        for name, tensor in one.debug_tensors.items():
            torch.testing.assert_close(tensor, other.debug_tensors[name], atol=0, rtol=0)


def test_an_engine_process_takes_no_buffers_from_memory() -> None:
    with pytest.raises(RuntimeError, match="an engine process reads a directory"):
        trtllm.Executor(b"", "{}", trtllm.ModelType.DECODER_ONLY, orchestrated())


def test_an_engine_process_that_cannot_start_leaves_no_directory_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(RuntimeError, match="File does not exist"):
        make_executor("Bla", orchestrated())
    assert list(tmp_path.iterdir()) == []
