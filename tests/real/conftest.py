"""The models of a run, each as the engine reads it and as the transformers library does."""

from __future__ import annotations

import contextlib
import io
from functools import cached_property
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tests.real import weights

READ_AS_DIRECTORY = {"gemma3"}  # this family is no GGUF file yet: transformers writes it as a Hugging Face checkpoint


class RealModel:
    """A model of weights.PUBLISHED. `path`: what `serve --model` gets."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.file = weights.fetch(name)
        self.path = self._directory() if name in READ_AS_DIRECTORY else self.file

    @cached_property
    def transformers(self) -> PreTrainedModel:
        """The file's weights, in float32."""
        torch.set_num_threads(1)
        with contextlib.redirect_stderr(io.StringIO()):  # progress bars
            model = AutoModelForCausalLM.from_pretrained(
                self.file.parent, gguf_file=self.file.name, dtype=torch.float32
            )
        return model.eval()

    def _directory(self) -> Path:
        directory = self.file.with_suffix("")
        if not (directory / "tokenizer.json").exists():
            model = self.transformers  # in float32, or its rounding would be taken for a fault of the engine
            model.hf_quantizer = (
                None  # its tensors are plain ones by now, and a model read of a GGUF file is not saved else
            )
            if hasattr(model.config, "quantization_config"):
                del model.config.quantization_config
            model.save_pretrained(directory)
            del self.transformers
            AutoTokenizer.from_pretrained(self.file.parent, gguf_file=self.file.name).save_pretrained(directory)
        return directory


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "model" in metafunc.fixturenames:
        metafunc.parametrize("model", weights.chosen(), indirect=True, scope="session")


@pytest.fixture(scope="session")
def model(request: pytest.FixtureRequest) -> RealModel:
    try:
        return RealModel(request.param)
    except weights.NoRegistry:
        pytest.skip(weights.NO_REGISTRY)
