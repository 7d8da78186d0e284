"""Brings the fake triton_python_backend_utils, and a ModelServer over a scripted executor."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.serving import fake_triton

sys.modules["triton_python_backend_utils"] = fake_triton

from backend.api import EngineConfig  # noqa: E402
from backend.api.config.schema import TritonConfig  # noqa: E402
from backend.serving.served_model import Parse, ServedModel  # noqa: E402
from backend.serving.server import ModelServer  # noqa: E402
from backend.serving.tensors import ModelTensors  # noqa: E402
from backend.serving.wires.front import TextTools  # noqa: E402
from backend.serving.wires.trtllm_tensors import TOKEN_MODEL  # noqa: E402
from backend.serving.wires.trtllm_tokens import parse_token_requests  # noqa: E402
from tests.serving.helpers import MODEL_DIRECTORY  # noqa: E402
from tests.serving.scripted import ScriptedExecutor  # noqa: E402

QUICK = EngineConfig(triton=TritonConfig(cancellation_check_period_ms=1, stats_period_ms=5))


@pytest.fixture(scope="session")
def tools() -> TextTools:
    """The default model's tokenizer and chat template."""
    return TextTools.from_directory(str(MODEL_DIRECTORY))


@pytest.fixture
def executor() -> ScriptedExecutor:
    return ScriptedExecutor()


@pytest.fixture
def make_server(executor: ScriptedExecutor) -> Iterator[Callable[..., ModelServer]]:
    """Token models by default; everything that was made is finalized, and must have no live stream then."""
    made: list[ModelServer] = []

    def make(
        tensors: ModelTensors = TOKEN_MODEL,
        parse: Parse = parse_token_requests,
        config: EngineConfig = QUICK,
        **options: Any,
    ) -> ModelServer:
        made.append(ModelServer(ServedModel(tensors, parse, **options), executor, config))
        return made[-1]

    switch_interval = sys.getswitchinterval()
    yield make
    sys.setswitchinterval(switch_interval)
    executor.settle()  # as Triton, which ends a model only when its requests have been answered
    for server in made:
        server.finalize()
        assert server.num_live_streams == 0, "every accepted request has ended"


@pytest.fixture
def server(make_server: Callable[..., ModelServer]) -> ModelServer:
    return make_server()
