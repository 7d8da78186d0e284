"""What requests have that do not say how to sample: as the checkpoint recommends, or as the operator says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from backend.api.checkpoint.recommended import default_sampling
from backend.api.config.file import load_config
from backend.api.errors import ConfigError
from backend.serving.wires.named_sampling import NamedSampling

# As Qwen3's repository has it.
QWEN3 = {"do_sample": True, "eos_token_id": [1], "temperature": 0.6, "top_k": 20, "top_p": 0.95}
OF_QWEN3 = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}


def checkpoint(directory: Path, content: dict[str, Any]) -> Path:
    (directory / "generation_config.json").write_text(json.dumps(content))
    return directory


def gguf_model(file: Path, **sampling: float) -> Path:
    writer = gguf.GGUFWriter(file, "llama")
    for name, value in sampling.items():
        add = writer.add_int32 if isinstance(value, int) else writer.add_float32
        add(f"general.sampling.{name}", value)
    writer.add_tensor("output_norm.weight", np.zeros(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_a_directory_recommends_what_its_generation_config_says(tmp_path: Path) -> None:
    assert default_sampling(tmp_path, ()) == {}
    assert default_sampling(checkpoint(tmp_path, QWEN3), ()) == OF_QWEN3


def test_a_gguf_file_recommends_what_the_converter_has_made_of_it(tmp_path: Path) -> None:
    file = gguf_model(tmp_path / "a.gguf", temp=0.5, top_k=20, penalty_repeat=1.5, mirostat=2)
    assert default_sampling(file, ()) == {"temperature": 0.5, "top_k": 20, "repetition_penalty": 1.5}
    assert gguf.Keys.General.SAMPLING_TEMP == "general.sampling.temp"


def test_the_operator_comes_before_the_checkpoint(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path, QWEN3)
    assert default_sampling(directory, ("top_k=5", "min_p=0.1")) == OF_QWEN3 | {"top_k": 5, "min_p": 0.1}
    assert default_sampling(directory, ("none",)) == {}
    assert default_sampling(directory, ("none", "temperature=0")) == {"temperature": 0.0}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"top_p": 3}, "top_p is 3, allowed is 0 to 1"),
        ({"temperature": "hot"}, "temperature is hot"),
        ({"top_k": 1.5}, "top_k is 1.5"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"repetition_penalty": True}, "repetition_penalty is true"),
    ],
)
def test_a_number_that_cannot_be_is_refused_with_the_way_around(
    tmp_path: Path, content: dict[str, Any], said: str
) -> None:
    directory = checkpoint(tmp_path, content)
    with pytest.raises(ConfigError, match=f"generation_config.json: {said}.*default_sampling=none"):
        default_sampling(directory, ())
    assert default_sampling(directory, ("none",)) == {}


@pytest.mark.parametrize("setting", ["hot", "temperature", "temperature=x", "seed=1", "top_p=2", "temperature=inf"])
def test_a_setting_that_cannot_be_is_refused_at_the_start(setting: str) -> None:
    with pytest.raises(ConfigError, match="model.default_sampling"):
        load_config(overrides=[f"model.default_sampling={setting}"])


def test_a_request_has_the_defaults_of_what_it_leaves_out() -> None:
    assert NamedSampling().sampling_config().temperature == 1.0
    made = NamedSampling(seed=1).sampling_config(OF_QWEN3)
    assert (made.temperature, made.top_k, made.top_p) == (0.6, 20, 0.95)
    given = NamedSampling(seed=1, temperature=0.0, top_k=-1).sampling_config(OF_QWEN3)
    assert (given.temperature, given.top_k, given.top_p) == (0.0, None, 0.95)


def test_greedy_defaults_draw_no_seed_and_beams_have_no_defaults() -> None:
    assert NamedSampling().sampling_config({"temperature": 0.0}).seed is None
    beams = NamedSampling(use_beam_search=True, best_of=3).sampling_config(OF_QWEN3)
    assert (beams.temperature, beams.top_k, beams.top_p) == (None, None, None)
