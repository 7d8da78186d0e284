"""What a GGUF file's settings change: each value is read, or refused by its name."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch

from backend.api import ConfigError
from backend.api.checkpoint.gguf import read_header
from backend.architectures.description import ModelConfig, RopeConfig
from backend.models.gguf import read_config
from backend.models.loader import load_directory
from benchmarks.quality.perplexity import row_logits
from tests.model.gguf_files import write_gguf
from tools.make_random_model import make_random_model

ROWS = torch.randint(131, (2, 40), generator=torch.Generator().manual_seed(0))
# What llama.cpp would compute differently -> the values with which it computes what is computed here, and others.
NEUTRAL: dict[str, tuple[list[object], list[object]]] = {
    "expert_group_count": ([0, 1], [2, 8]),
    "logit_scale": ([0.0, 1.0], [0.5, 2.0]),
    "attention.scale": ([0.0], [1.0, 0.125]),
    "attention.causal": ([True], [False]),
    "attention.clamp_kqv": ([0.0], [1.0, 8.0]),
    "attention.temperature_scale": ([0.0, 1.0], [0.1]),
    "residual_scale": ([0.0, 1.0], [0.22]),
    "embedding_scale": ([0.0, 1.0], [12.0]),
    "final_logit_softcapping": ([0.0], [1.0, 30.0]),
    "attn_logit_softcapping": ([0.0], [1.0, 50.0]),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of 40 numbers, whose 160 bytes are no multiple of 64."""
    sizes = dict(hidden_size=40, num_attention_heads=4, num_key_value_heads=2, head_dim=10, intermediate_size=72)
    rope = dict(rope_type="default", rope_theta=77.0)
    return make_random_model(
        tmp_path_factory.mktemp("settings"),
        "llama",
        num_hidden_layers=1,
        rms_norm_eps=3e-3,
        rope_parameters=rope,
        **sizes,
    )


def config_with(directory: Path, file: Path, key: str, value: object) -> ModelConfig:
    def change(writer: gguf.GGUFWriter) -> None:
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_float32(key, value)

    return read_config(read_header(write_gguf(directory, file, change=change)))


@pytest.mark.parametrize("key, neutral", [(key, value) for key, (values, _) in NEUTRAL.items() for value in values])
def test_a_setting_that_changes_nothing_is_taken(directory: Path, tmp_path: Path, key: str, neutral: object) -> None:
    plain = read_config(read_header(write_gguf(directory, tmp_path / "plain.gguf")))
    assert config_with(directory, tmp_path / "model.gguf", f"llama.{key}", neutral) == plain


@pytest.mark.parametrize("key, other", [(key, value) for key, (_, values) in NEUTRAL.items() for value in values])
def test_a_setting_that_changes_what_a_model_computes_is_refused(
    directory: Path, tmp_path: Path, key: str, other: object
) -> None:
    with pytest.raises(ConfigError, match=rf"llama\.{key} is .*, which is not supported; use another model"):
        config_with(directory, tmp_path / "model.gguf", f"llama.{key}", other)


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_tensors_are_found_whatever_their_alignment(directory: Path, tmp_path: Path, alignment: int) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_custom_alignment(alignment)

    files = (
        write_gguf(directory, tmp_path / "plain.gguf"),
        write_gguf(directory, tmp_path / "other.gguf", change=change),
    )
    first, second = (read_header(file).tensors for file in files)
    assert [place.offset for place in first.values()] != [place.offset for place in second.values()]
    assert all(place.offset % alignment == 0 for place in second.values())
    plain, other = (load_directory(file, None, "float32", torch.device("cpu")) for file in files)
    assert torch.equal(row_logits(other, ROWS), row_logits(plain, ROWS))


def test_the_number_below_the_root_of_a_norm_is_the_file_s(directory: Path, tmp_path: Path) -> None:
    assert read_config(read_header(write_gguf(directory, tmp_path / "model.gguf"))).block.norm_eps == pytest.approx(
        3e-3
    )


def rope_of(directory: Path, file: Path, **settings: str | float) -> RopeConfig:
    def change(writer: gguf.GGUFWriter) -> None:
        for key, value in settings.items():
            (writer.add_string if isinstance(value, str) else writer.add_float32)(f"llama.rope.{key}", value)

    return read_config(read_header(write_gguf(directory, file, change=change))).ropes[0]


@pytest.mark.parametrize("key", ["scaling.factor", "scale_linear"])
def test_positions_are_scaled_by_either_name_of_the_factor(directory: Path, tmp_path: Path, key: str) -> None:
    expected = RopeConfig(77.0, "linear", 2.5)
    assert rope_of(directory, tmp_path / "model.gguf", **{key: 2.5}) == expected
    assert rope_of(directory, tmp_path / "named.gguf", **{key: 2.5, "scaling.type": "linear"}) == expected


def test_positions_are_not_scaled_where_the_file_says_none(directory: Path, tmp_path: Path) -> None:
    settings: dict[str, str | float] = {"scaling.type": "none", "scaling.factor": 2.5}
    assert rope_of(directory, tmp_path / "model.gguf", **settings) == RopeConfig(77.0)


def test_a_scaling_of_another_kind_is_refused(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rope.scaling.type is dynamic, which is not supported"):
        rope_of(directory, tmp_path / "model.gguf", **{"scaling.type": "dynamic"})
