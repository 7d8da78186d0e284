"""The models of a run, each as the engine reads it and as the transformers library does."""

from __future__ import annotations

import contextlib
import io
from functools import cached_property

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.real import weights


class RealModel:
    """A model of weights.PUBLISHED. `path`: what `serve --model` gets."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.file = self.path = weights.fetch(name)

    @cached_property
    def transformers(self) -> PreTrainedModel:
        """The file's weights, in float32."""
        torch.set_num_threads(1)
        with contextlib.redirect_stderr(io.StringIO()):  # progress bars
            model = AutoModelForCausalLM.from_pretrained(
                self.file.parent, gguf_file=self.file.name, dtype=torch.float32
            )
        return model.eval()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "model" in metafunc.fixturenames:
        metafunc.parametrize("model", weights.chosen(), indirect=True, scope="session")


@pytest.fixture(scope="session")
def model(request: pytest.FixtureRequest) -> RealModel:
    try:
        return RealModel(request.param)
    except weights.NoRegistry:
        pytest.skip(weights.NO_REGISTRY)
