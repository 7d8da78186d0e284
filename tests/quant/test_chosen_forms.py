"""Which layers get more bits where `model.quantization=auto:...` gives a budget."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from backend.api.config.file import load_config
from backend.api.config.quantization import FORMATS, budget_of
from backend.api.errors import ConfigError
from backend.architectures.description import WHOLE
from backend.architectures.shards import WholeLinear, linears
from backend.models.linears import LinearOptions
from backend.models.loader import CheckpointReader, open_directory
from backend.quant.chosen_forms import ERRORS, ChosenForms, bits_in, chosen, num_weights, sensitivities
from kernels.common.rounding import ROUNDED
from tools.make_random_model import make_random_model

ROWS = torch.randint(100, (1, 24), generator=torch.Generator().manual_seed(3))
SIZES = dict(hidden_size=64, intermediate_size=192, num_attention_heads=4, num_key_value_heads=2)


def layer(n: int, k: int) -> WholeLinear:
    return WholeLinear({"first": n // 2, "second": n - n // 2}, k, False, None)  # type: ignore[arg-type]


def spent(sizes: Mapping[str, WholeLinear], found: Mapping[str, str]) -> float:
    return sum(num_weights(each) * bits_in(found[name], each.columns) for name, each in sizes.items())  # type: ignore[arg-type]


@pytest.fixture
def checkpoint(tmp_path: Path) -> CheckpointReader:
    return open_directory(make_random_model(tmp_path / "llama", "llama", **SIZES))


def test_forms_have_rising_bits_and_falling_errors() -> None:
    assert set(ERRORS) == {*ROUNDED, "w8a8"} and set(ERRORS) < set(FORMATS)
    bits = [bits_in(format, 512) for format in ERRORS]
    assert bits == sorted(bits) == [4.5, 6.0, 8 + 16 / 512]
    assert list(ERRORS.values()) == sorted(ERRORS.values(), reverse=True)


def test_bits_go_where_one_takes_most_away() -> None:
    sizes = {"small": layer(64, 64), "large": layer(640, 64), "deaf": layer(64, 64)}
    sensitive = {"small": 1.0, "large": 2.0, "deaf": 1e-9}  # a bit of the small one takes five times as much away
    weights = sum(map(num_weights, sizes.values()))
    assert chosen(sizes, sensitive, 4.5 * weights) == dict.fromkeys(sizes, "w4a8")
    assert chosen(sizes, sensitive, 4.7 * weights) == {"small": "w6a8", "large": "w4a8", "deaf": "w4a8"}
    assert chosen(sizes, sensitive, 6.1 * weights) == {"small": "w8a8", "large": "w6a8", "deaf": "w4a8"}
    assert chosen(sizes, sensitive, 9.0 * weights) == dict.fromkeys(sizes, "w8a8")
    for bits in (4.5, 4.6, 5.0, 5.7, 6.3, 8.0):
        assert spent(sizes, chosen(sizes, sensitive, bits * weights)) <= bits * weights


def test_a_layer_s_sensitivity_is_how_far_its_rounding_moves_the_hidden_states(checkpoint: CheckpointReader) -> None:
    """Weights that are rounded without loss have none, and those of another layer are its own affair."""
    tensors: dict[str, Tensor] = {name: checkpoint.tensors[name] for name in checkpoint.tensors}
    before = sensitivities(checkpoint.config, tensors, ROWS, LinearOptions("auto:5"))
    assert list(before) == list(linears(checkpoint.config, WHOLE))
    assert all(0 < each < 0.1 for each in before.values())
    down = "model.layers.1.mlp.down_proj"
    tensors[down + ".weight"] = torch.full_like(tensors[down + ".weight"], 113 / 1024)
    after = sensitivities(checkpoint.config, tensors, ROWS, LinearOptions("auto:5"))
    assert after[down] < 1e-4 * before[down]
    earlier = [name for name in before if name < "model.layers.1"]
    assert earlier and all(before[name] == after[name] for name in earlier)


def test_the_choice_keeps_within_bits_and_bytes_and_is_told_once(
    checkpoint: CheckpointReader, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = linears(checkpoint.config, WHOLE)
    weights = sum(map(num_weights, sizes.values()))
    mebibytes = 5.2 * weights / 8 / (1 << 20)
    for quantization, bits in (("auto:5.2", 5.2), (f"auto:{mebibytes:.9f}MiB", 5.2), ("auto:9GiB", 8.25)):
        options = LinearOptions(quantization)
        choose = ChosenForms(quantization, tmp_path, checkpoint.config, checkpoint.tensors, options)
        caplog.clear()
        with caplog.at_level(logging.INFO):
            found = {name: choose(name) for name in sizes}
        assert bits - 0.3 < spent(sizes, found) / weights <= bits + 1e-6
        assert len(caplog.messages) == 1 and caplog.messages[0].startswith(f"{quantization}: w")
        assert caplog.messages[0].endswith(f"; {spent(sizes, found) / weights:.2f} bits a weight on average")


def test_too_few_bytes_are_refused_with_what_is_needed(checkpoint: CheckpointReader, tmp_path: Path) -> None:
    choose = ChosenForms("auto:0.01MiB", tmp_path, checkpoint.config, checkpoint.tensors, LinearOptions("auto:0.01MiB"))
    with pytest.raises(ConfigError, match=r"auto:0.01MiB, .* take at least \d+ MiB, in 4.5 bits a weight; give them"):
        choose("model.layers.0.mlp.down_proj")


@pytest.mark.parametrize(
    "wrong", ["auto:1", "auto:9", "auto:x", "auto", "auto:", "auto:5KB", "auto:1e1", "w5a8", "int4"]
)
def test_a_value_that_there_is_not_is_refused_in_one_sentence(wrong: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(None, [f"model.quantization={wrong}"])
    assert str(error.value).startswith(
        f"model.quantization is {wrong}; use one of none, int8, w8a8, w6a8, w4a8, auto:BITS with 4.5 to 8.5 bits a weight, "
        f"or auto:SIZE as in auto:2GiB"
    )


def test_budgets_are_read() -> None:
    assert budget_of("w6a8") is None
    assert (budget_of("auto:5"), budget_of("auto:4.75")) == ((5.0, None), (4.75, None))
    assert budget_of("auto:1.5GiB") == (None, 1.5 * 2**30)
    assert load_config(None, ["model.quantization=auto:5.5"]).model.quantization == "auto:5.5"
