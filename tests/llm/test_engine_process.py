"""GenerationExecutor.create with an engine in this process or in its own, and what its death is for callers."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from compat.llm import (
    LLM,
    GenerationExecutor,
    GenerationExecutorProxy,
    GenerationExecutorWorker,
    GuidedDecodingParams,
    NotHere,
    RequestError,
    SamplingParams,
)
from tests.llm.helpers import PATIENCE_S

FEW = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def proxy(model_dir: Path) -> Iterator[LLM]:
    with LLM(model_dir, orchestrator_type="rpc") as proxy:
        yield proxy


@pytest.mark.feature("002-33")
def test_the_engine_runs_where_the_world_size_says(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model_dir.parent)
    with GenerationExecutor.create(f"./{model_dir.name}") as here:
        assert type(here) is GenerationExecutorWorker and here.engine_executor._process is None
        tokens = here.generate([5, 6, 7], FEW).token_ids
    with GenerationExecutor.create(f"./{model_dir.name}", world_size=2) as there:
        assert type(there) is GenerationExecutorProxy
        pid = there.engine_executor._process.pid
        directory = Path(there.engine_executor._process._socket_path).parent
        assert pid != os.getpid() and directory.is_dir()
        assert there.generate([5, 6, 7], FEW).token_ids == tokens
    assert not directory.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.feature("002-33")
@pytest.mark.parametrize(
    "given",
    [
        {"model_world_size": 2},
        {"world_size": 3},
        {"mpi_session": object()},
        {"reuse_mpi_comm": True},
    ],
    ids=lambda given: next(iter(given)),
)
def test_what_create_does_not_have_is_refused_by_its_name(given: dict) -> None:
    with pytest.raises(NotHere, match=f"^{next(iter(given))} is "):
        GenerationExecutor.create("nowhere", **given)


def test_a_configuration_of_another_kind_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="the configuration is a dict, a backend.api.EngineConfig is needed"):
        GenerationExecutor.create("nowhere", {"max_batch_size": 3})


def test_one_name_of_the_engine_is_enough() -> None:
    with pytest.raises(ValueError, match="engine and engine_dir are both given"):
        GenerationExecutor.create("here", engine_dir="there")


def test_an_llm_over_an_engine_process_says_the_same(proxy: LLM, llm: LLM) -> None:
    texts = ["The quick", "brown fox"]
    assert [output.outputs for output in proxy.generate(texts, FEW)] == [
        output.outputs for output in llm.generate(texts, FEW)
    ]


def test_guides_cross_to_an_engine_process(proxy: LLM, llm: LLM) -> None:
    guided = SamplingParams(max_tokens=20, guided_decoding=GuidedDecodingParams(regex="[xyz]{3}-[0-9]"))
    assert re.fullmatch("[xyz]{3}-[0-9]", text := proxy.generate("The quick", guided).outputs[0].text)
    assert llm.generate("The quick", guided).outputs[0].text == text
    bad = SamplingParams(guided_decoding=GuidedDecodingParams(json={"not": {}}))
    with pytest.raises(RequestError, match="not"):
        proxy.generate("The quick", bad)


@pytest.mark.feature("002-34")
def test_the_death_of_the_engine_is_a_pause_for_who_waits(model_dir: Path) -> None:
    with LLM(model_dir, orchestrator_type="rpc") as mortal:
        asked = SamplingParams(max_tokens=100, ignore_eos=True, temperature=1.0, seed=5)
        expected = mortal.generate("The quick", asked).outputs[0].token_ids
        results = [mortal.generate_async("The quick", asked, streaming=True) for _ in range(30)]
        next(results[0])
        os.kill(mortal.executor.engine_executor._process.pid, signal.SIGKILL)
        for result in results:
            assert result.result(PATIENCE_S).outputs[0].token_ids == expected
        assert mortal.executor._results == {}
