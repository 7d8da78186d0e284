"""Checkpoints from end to end: written, and read as the engine reads them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Never

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from backend.api.errors import ConfigError
from backend.models.config import read_model_config
from backend.quant import checkpoint
from backend.quant.run import QuantSettings, quantize_checkpoint
from tests.quant.models import FAMILIES, WIDE, logits_of, random_rows, with_outliers
from tools.make_random_model import make_random_model

SCHEMES = {
    "w8a8": QuantSettings("w8a8"),
    "w4a16": QuantSettings("w4a16"),
    "w4a16 g32": QuantSettings("w4a16", 32),
    "w4a8": QuantSettings("w4a8"),
    "w4a8 rows": QuantSettings("w4a8", -1),
}


def error_of(directory: Path, floats: Path, rows: Tensor) -> float:
    expected = logits_of(floats, rows)
    return float((logits_of(directory, rows) - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_scheme_of_every_family_is_read_back_near_the_float_model(family: str, name: str, tmp_path: Path) -> None:
    floats = make_random_model(tmp_path / "float", family, **WIDE | FAMILIES[family])
    wanted = SCHEMES[name]._replace(kv="int4")
    made = quantize_checkpoint(floats, tmp_path / "made", wanted, random_rows(shape=(4, 64)))
    assert error_of(tmp_path / "made", floats, random_rows()) < (0.1 if wanted.scheme == "w8a8" else 0.5)
    assert all(e.written < 0.03 if wanted.scheme == "w8a8" else 0.2 for e in made.errors.values())


@pytest.mark.parametrize("name", ["w8a8", "w4a16", "w4a8", "w4a8 rows"])
def test_calibration_pays_where_channels_stand_out(name: str, tmp_path: Path) -> None:
    floats = with_outliers(tmp_path / "float", "llama", **WIDE)
    made = quantize_checkpoint(floats, tmp_path / "made", SCHEMES[name], random_rows(shape=(8, 128)))
    assert all(errors.written < 0.6 * errors.plain for errors in made.errors.values())
    quantize_checkpoint(floats, tmp_path / "plain", SCHEMES[name], None)
    rows = random_rows(shape=(3, 50))
    assert error_of(tmp_path / "made", floats, rows) < 0.8 * error_of(tmp_path / "plain", floats, rows)


def test_what_stays_float_stays_as_it_is(tmp_path: Path) -> None:
    floats = make_random_model(tmp_path / "float", **WIDE, dtype="bfloat16")
    (floats / "tokenizer.json").write_text("{}")
    (floats / "chat_template.jinja").write_text("x")
    (floats / "model.bin").write_text("not for copying")
    quantize_checkpoint(floats, tmp_path / "made", QuantSettings("w8a8", kv="int8"), None)
    before, after = (load_file(path / "model.safetensors") for path in (floats, tmp_path / "made"))
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
        assert torch.equal(before[name], after[name])
    names = {path.name for path in (tmp_path / "made").iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
    }
    raw = json.loads((tmp_path / "made" / "config.json").read_text())
    assert raw.items() > json.loads((floats / "config.json").read_text()).items()
    assert raw["quantization_config"]["kv_cache_scheme"]["num_bits"] == 8
    assert read_model_config(tmp_path / "made").kv_cache_dtype == "int8"


def test_smoothed_norms_keep_the_type_of_the_checkpoint(tmp_path: Path) -> None:
    floats = make_random_model(tmp_path / "float", **WIDE, dtype="bfloat16")
    quantize_checkpoint(floats, tmp_path / "made", QuantSettings("w8a8"), random_rows())
    before, after = (load_file(path / "model.safetensors") for path in (floats, tmp_path / "made"))
    norms = [name for name in before if name.endswith("layernorm.weight")]
    assert all(after[name].dtype == torch.bfloat16 for name in norms)
    assert any(not torch.equal(after[name], before[name]) for name in norms)


def test_several_shards_are_read_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    floats = make_random_model(tmp_path / "float", num_shards=3, **WIDE)
    quantize_checkpoint(floats, tmp_path / "one", QuantSettings("w4a16"), random_rows())
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 200_000)
    made = quantize_checkpoint(floats, tmp_path / "many", QuantSettings("w4a16"), random_rows())
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    files = {path.name for path in (tmp_path / "many").glob("*.safetensors")}
    assert files == set(index["weight_map"].values()) and len(files) > 1
    assert index["metadata"]["total_size"] == made.bytes_after
    assert torch.equal(logits_of(tmp_path / "many", random_rows()), logits_of(tmp_path / "one", random_rows()))


def test_the_sizes_told_are_those_of_the_files(tmp_path: Path) -> None:
    floats = make_random_model(tmp_path / "float", **WIDE)
    made = quantize_checkpoint(floats, tmp_path / "made", QuantSettings("w4a8"), None)
    size = (tmp_path / "made" / "model.safetensors").stat().st_size
    assert made.bytes_before == (floats / "model.safetensors").stat().st_size
    assert size - 20_000 < made.bytes_after <= size  # without the header
    assert made.errors == {}


def test_a_checkpoint_that_is_quantised_is_refused(tmp_path: Path) -> None:
    floats = make_random_model(tmp_path / "float", **WIDE)
    quantize_checkpoint(floats, tmp_path / "made", QuantSettings("w8a8"), None)
    with pytest.raises(ConfigError, match="model made is quantised already"):
        quantize_checkpoint(tmp_path / "made", tmp_path / "twice", QuantSettings("w4a16"), None)


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    floats = make_random_model(tmp_path / "float", **WIDE)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty; give a new one"):
        quantize_checkpoint(floats, tmp_path / "full", QuantSettings("w8a8"), None)
    with pytest.raises(ConfigError, match="is a file"):
        quantize_checkpoint(floats, tmp_path / "full" / "mine", QuantSettings("w8a8"), None)
    (tmp_path / "empty").mkdir()
    quantize_checkpoint(floats, tmp_path / "empty", QuantSettings("w8a8"), None)
    assert (tmp_path / "empty" / "model.safetensors").exists()
    assert (tmp_path / "full" / "mine").read_text() == "mine"


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    floats = make_random_model(tmp_path / "float", **WIDE)

    def fail(*arguments: object) -> Never:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", fail)
    with pytest.raises(OSError):
        quantize_checkpoint(floats, tmp_path / "made", QuantSettings("w8a8"), None)
    assert [path.name for path in tmp_path.iterdir()] == ["float"]


def test_tokens_that_the_model_does_not_have_are_refused(tmp_path: Path) -> None:
    floats = make_random_model(tmp_path / "float", **WIDE)
    with pytest.raises(ConfigError, match="the tokenizer makes token 131, the model has 131"):
        quantize_checkpoint(floats, tmp_path / "made", QuantSettings("w8a8"), torch.tensor([[0, 131]]))


def test_int4_keys_are_smoothed(tmp_path: Path) -> None:
    """Perplexity of a KV4 cache is not asked here: that k's rows, and nothing else of it, depend on --kv."""
    floats = with_outliers(tmp_path / "float", "qwen3", **WIDE)
    made = {}
    for kv in (None, "int4"):
        quantize_checkpoint(floats, tmp_path / str(kv), QuantSettings("w8a8", kv=kv), random_rows())
        made[kv] = load_file(tmp_path / str(kv) / "model.safetensors")
    changed = {name.split(".", 3)[3] for name in made[None] if not torch.equal(made[None][name], made["int4"][name])}
    assert changed == {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}
    assert not math.isnan(error_of(tmp_path / "int4", floats, random_rows()))
