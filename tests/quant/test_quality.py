"""What quantised checkpoints of the default model cost, within the project's bounds; and the benchmark that measures it."""

from __future__ import annotations

import pytest
import torch
from rich.console import Console

from backend.models.loader import DEFAULT_MODEL, load_directory
from benchmarks.quality import checkpoints
from benchmarks.quality.checkpoints import CHECKPOINTS, Texts, document_of, measure_checkpoints, table_of
from benchmarks.quality.perplexity import held_out_rows
from kernels.common.kv_format import KV_FORMATS


def test_the_bounds_are_those_of_the_project() -> None:
    bounds = {name: bound for name, (_, bound) in CHECKPOINTS.items() if bound is not None}
    assert bounds == {"W8A8, KV8": 0.01, "W4A16 g128": 0.05, "W4A8 g128, KV4": 0.10}


@pytest.mark.parametrize("name", ["W8A8, KV8", "W4A8 g128, KV4"])
def test_checkpoints_of_the_default_model_stay_within_their_bounds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "CHECKPOINTS", {name: CHECKPOINTS[name]})
    text = held_out_rows(1024)
    results, perplexities = measure_checkpoints(text, text[:1], Console(quiet=True))
    calibrated, plain = results
    assert (calibrated.is_calibrated, plain.is_calibrated) == (True, False)
    assert calibrated.is_within
    assert calibrated.rise == pytest.approx(calibrated.held_out.perplexity / perplexities[0] - 1)
    assert 0 < calibrated.held_out.divergence < plain.held_out.divergence
    assert document_of(results, perplexities)["made"][0]["held_out"]["perplexity"] == calibrated.held_out.perplexity
    assert table_of(results, perplexities).row_count == 3


def test_kv_is_quantised_as_the_pool_holds_it() -> None:
    model = load_directory(DEFAULT_MODEL, None, "float32", torch.device("cpu"))
    texts = Texts(model, held_out_rows(512))
    errors = [texts.measure(model, KV_FORMATS[kv])[0].error for kv in ("auto", "int8", "k8v4", "int4")]
    assert errors[0] == 0
    assert 0 < 5 * errors[1] < errors[2] < 0.2


def test_a_checkpoint_above_its_bound_is_told() -> None:
    measured = checkpoints.Measured(0.1, 0.1, 20.0)
    result = checkpoints.Result("x", True, 1, measured, measured, 0.06, 0.0, 0.05)
    assert not result.is_within
    assert result._replace(bound=None).is_within and result._replace(rise=0.05).is_within
