"""Each kind of rotary scaling: the frequencies and the factor are those of transformers.modeling_rope_utils."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from backend.api.errors import ConfigError
from backend.architectures.description import RopeConfig
from backend.architectures.rope import RopeDefaults, read_rope
from backend.architectures.settings import Settings
from backend.layers.rotary import inverse_frequencies, rotary_tables

HEAD_DIM, POSITIONS = 64, 4096
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=8.0, original_max_position_embeddings=512)
LONG = dict(
    rope_type="longrope",
    rope_theta=10000.0,
    original_max_position_embeddings=512,
    short_factor=[1.0 + 0.01 * pair for pair in range(HEAD_DIM // 2)],
    long_factor=[1.0 + 0.5 * pair for pair in range(HEAD_DIM // 2)],
)
SECTIONS: dict[str, dict[str, Any]] = {
    "linear": dict(rope_type="linear", rope_theta=777.0, factor=3.0),
    "dynamic": dict(rope_type="dynamic", rope_theta=777.0, factor=3.0),
    "llama3": dict(
        rope_type="llama3",
        rope_theta=5e5,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=512,
    ),
    "yarn": YARN,
    "yarn with borders": YARN | dict(beta_fast=16, beta_slow=2.5),
    "yarn between pairs": YARN | dict(truncate=False),
    "yarn with a factor": YARN | dict(attention_factor=0.7),
    "yarn with mscale": YARN | dict(mscale=0.8, mscale_all_dim=0.3),
    "yarn with one mscale": YARN | dict(mscale=0.8),
    "yarn of nothing": YARN | dict(factor=1.0),
    "yarn whose factor follows from the positions": YARN | dict(factor=None),
    "longrope": LONG,
    "longrope with a factor": LONG | dict(attention_factor=1.3),
    "longrope with its own ratio": LONG | dict(factor=2.0),
}


def ours(section: dict[str, Any]) -> RopeConfig:
    content = dict(max_position_embeddings=POSITIONS, rope_parameters=section)
    return read_rope(Settings(content), HEAD_DIM, RopeDefaults(partial=1.0))


@pytest.mark.parametrize("num_positions", [512, POSITIONS])
@pytest.mark.parametrize("name", SECTIONS)
def test_the_tables_are_those_of_transformers(name: str, num_positions: int) -> None:
    section = SECTIONS[name]
    config = LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        max_position_embeddings=POSITIONS,
        rope_parameters=dict(section),
    )
    expected, factor = ROPE_INIT_FUNCTIONS[section["rope_type"]](config, None, seq_len=num_positions)
    rope = ours(section)
    torch.testing.assert_close(inverse_frequencies(rope, HEAD_DIM, num_positions), expected, rtol=1e-6, atol=0)
    angles = torch.outer(torch.arange(num_positions).float(), expected)
    for table, wanted in zip(
        rotary_tables(rope, HEAD_DIM, num_positions, torch.device("cpu")), (angles.cos(), angles.sin())
    ):
        torch.testing.assert_close(table, wanted * factor, rtol=0, atol=1e-6)


@pytest.mark.parametrize("num_positions", [512, POSITIONS])
def test_a_share_of_a_head_has_frequencies_of_its_own(num_positions: int) -> None:
    """Phi-4-mini's: transformers takes the shares of heads from the section."""
    pairs = HEAD_DIM * 3 // 4 // 2
    section = LONG | dict(partial_rotary_factor=0.75)
    section |= {key: LONG[key][:pairs] for key in ("short_factor", "long_factor")}
    config = Phi3Config(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        max_position_embeddings=POSITIONS,
        original_max_position_embeddings=512,
        rope_parameters=dict(section),
    )
    expected, factor = ROPE_INIT_FUNCTIONS["longrope"](config, None, seq_len=num_positions)
    rope = ours(section)
    assert (rope.rotary_dim, rope.attention_factor) == (2 * pairs, pytest.approx(factor))
    torch.testing.assert_close(inverse_frequencies(rope, HEAD_DIM, num_positions), expected, rtol=1e-6, atol=0)


def test_the_longest_sequence_of_the_server_chooses_longrope_s_factors_for_all_positions() -> None:
    rope = ours(LONG)
    short, _ = rotary_tables(rope, HEAD_DIM, 512, torch.device("cpu"))
    long, _ = rotary_tables(rope, HEAD_DIM, 513, torch.device("cpu"))
    assert not torch.equal(short[1:], long[1:512])
    longest, _ = rotary_tables(rope, HEAD_DIM, POSITIONS, torch.device("cpu"))
    assert torch.equal(longest[:513], long)


def test_dynamic_scaling_is_none_up_to_the_model_s_own_limit() -> None:
    assert ours(SECTIONS["dynamic"]) == RopeConfig(theta=777.0)


@pytest.mark.parametrize(
    "section, sentence",
    [
        (dict(rope_type="xpos"), "rope_parameters.rope_type xpos is not supported here; supported are default, linear"),
        (dict(type="su"), "rope_parameters.type su is not supported here"),
        (YARN | dict(rope_theta=1.0), "rope_parameters.rope_theta 1.0 is not supported here"),
        (YARN | dict(mscale=-100.0, mscale_all_dim=1.0), "rope_parameters.mscale -100.0 is not supported here"),
        (YARN | dict(beta_fast=0), "rope_parameters.beta_fast is 0"),
        (YARN | dict(truncate="no"), "rope_parameters.truncate is 'no', bool is needed"),
        (YARN | dict(spiral=2), "rope_parameters.spiral is 2, which is not known of rope_type yarn"),
        (LONG | dict(short_factor=[1.0]), "rope_parameters.short_factor .* it has 1 numbers, 32 are needed"),
        (LONG | dict(long_factor=[[1.0]] * 32), "rope_parameters.long_factor"),
        (LONG | dict(long_factor=[0.0] * 32), "rope_parameters.long_factor"),
        (dict(rope_type="default", partial_rotary_factor=1.5), "partial_rotary_factor is 1.5"),
        (dict(rope_type="default", partial_rotary_factor=0.02), "partial_rotary_factor is 0.02"),
        (dict(rope_type="default", partial_rotary_factor=True), "partial_rotary_factor is true, float is needed"),
        ({"rope_type": "yarn", "factor": 2.0}, "lacks the key rope_parameters.original_max_position_embeddings"),
    ],
)
def test_settings_of_another_rope_are_told(section: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        ours(section)
