"""The judge of forms serves what it is asked for; its picture and what it reads of llama.cpp's files."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from backend.api.config.kv_bits import KV_TYPES
from benchmarks.quality import judge
from benchmarks.quality.judge import Judged, Served
from benchmarks.quality.peers import layer_bits
from benchmarks.quality.plot import plot
from tests.model.gguf_files import write_gguf
from tools.make_random_model import make_random_model


@pytest.mark.parametrize(
    "form, quantization, kv", [("w4a8", "w4a8", "auto"), ("auto:5.2", "auto:5.2", "auto"), ("kv:k8v4", "none", "k8v4")]
)
def test_a_form_of_weights_or_of_kv_is_served(form: str, quantization: str, kv: str, tmp_path: Path) -> None:
    model = make_random_model(tmp_path / "model", max_position_embeddings=1024)
    served = Served(model, form, kernels="torch")
    config = served._core.config
    keys, values = config.kv_cache.key_dtype, config.kv_cache.value_dtype
    assert (config.model.quantization, (keys, values)) == (quantization, KV_TYPES[kv])
    assert served.bits > (8 if kv == "auto" else 16)  # torch's kernels hold int8 in place of fewer bits


def test_forms_that_there_are_not_are_refused() -> None:
    with pytest.raises(typer.BadParameter, match="'w5a8' is none of none,"):
        judge.run("models/default", "", None, "w5a8", 512, None)
    with pytest.raises(typer.BadParameter, match="'vllm' is not llamacpp"):
        judge.run("models/default", "", None, "w4a8", 512, None, "vllm")


def test_a_picture_has_forms_without_any_loss_too(tmp_path: Path) -> None:
    forms = [
        Judged("m", form, rise, 0.001, 0.01, 0.001, 0.9, "", bits)
        for form, rise, bits in (
            ("w4a8", 0.1, 4.5),
            ("llama.cpp Q6_K", -0.01, 8),
            ("llama.cpp Q4_0, imatrix", 0.2, 4.5),
        )
    ]
    plot(forms, tmp_path / "frontier.png", "title")
    assert (tmp_path / "frontier.png").stat().st_size > 1000


def test_bits_of_a_file_are_those_of_its_decoder_layers(tmp_path: Path) -> None:
    directory = make_random_model(tmp_path / "model", hidden_size=64, intermediate_size=128, num_attention_heads=4)
    assert layer_bits(write_gguf(directory, tmp_path / "model.gguf", "Q5_1")) == 6
