"""`./everbatch quantize`: options, calibration texts, messages and exit statuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from backend.api.errors import ConfigError
from backend.models.loader import DEFAULT_MODEL
from backend.quant.__main__ import calibration_rows
from backend.quant.text import BUILT_IN, MIN_TOKENS, built_in_texts, read_text, rows_of
from benchmarks.quality.perplexity import HELD_OUT
from deploy.errors import UserError
from deploy.offline import QuantizeOptions, quantize_command
from tests.quant.models import WIDE
from tools.make_random_model import make_random_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "small"
    return make_random_model(directory, vocab_size=4096, tokenizer_from=DEFAULT_MODEL, **WIDE)


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deploy.cli", "quantize", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def test_a_checkpoint_is_made_and_the_command_says_how_to_serve_it(model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("def f(x):\n    return x + 1\n" * 60)
    output = tmp_path / "made"
    done = run(model, "--scheme", "w4a16", "--kv", "int4", "--calibration", text, "--output", output)
    assert done.returncode == 0, done.stderr
    assert "layer 3 of 3" in done.stdout and "gate, up" in done.stdout
    assert "w4a16, KV cache in int4:" in done.stdout
    assert f"./everbatch serve --model {output}" in done.stdout
    again = run(model, "--scheme", "w8a8", "--calibration", text, "--output", output)
    assert again.returncode == 2
    assert again.stderr.count("\n") == 1 and "is not empty; give a new one, or empty it" in again.stderr


def test_another_model_needs_a_text(model: Path, tmp_path: Path) -> None:
    done = run(model, "--scheme", "w8a8", "--output", tmp_path / "made")
    assert done.returncode == 2
    assert done.stderr.startswith("everbatch: there is no calibration text for small: name one with --calibration FILE")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(scheme="fp8"), "--scheme is fp8; use one of w8a8, w4a16, w4a8"),
        (dict(kv="fp8"), "--kv is fp8; use one of int8, int4"),
        (dict(group=100), "--group is 100; use one of 128, 64, 32, -1"),
    ],
)
def test_options_that_cannot_be_are_refused_at_once(change: dict[str, int | str], message: str) -> None:
    options = dict(model="", scheme="w8a8", output=Path("x"))
    with pytest.raises(UserError, match=message):
        quantize_command(QuantizeOptions(**options | change))


def test_paths_are_those_of_the_callers_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    command = quantize_command(QuantizeOptions("model", "w4a8", Path("out"), "int8", "text.txt", -1))
    assert command[3:] == [
        *(str(tmp_path / "model"), "--scheme", "w4a8", "--output", str(tmp_path / "out"), "--kv", "int8"),
        *("--calibration", str(tmp_path / "text.txt"), "--group", "-1"),
    ]
    assert quantize_command(QuantizeOptions("org/name", "w4a8", Path("out"), calibration="none"))[3] == "org/name"
    assert quantize_command(QuantizeOptions("org/name", "w4a8", Path("out"), calibration="none"))[-1] == "none"
    assert quantize_command(QuantizeOptions("", "w4a8", Path("out")))[3] == str(DEFAULT_MODEL)


def test_the_built_in_text_is_none_of_what_quality_is_measured_on() -> None:
    assert not set(BUILT_IN) & set(HELD_OUT)
    assert len(built_in_texts()) > 10


def test_rows_come_from_all_of_the_text() -> None:
    rows = rows_of(built_in_texts(), DEFAULT_MODEL, 2048)
    assert rows.shape == (16, 512) and len(rows.unique(dim=0)) == 16
    assert rows_of(built_in_texts(), DEFAULT_MODEL, 100).shape == (16, 100)
    assert rows_of(["a b c " * 300], DEFAULT_MODEL, 2048).shape[1] == 512


def test_only_the_default_model_has_a_text_of_its_own(model: Path) -> None:
    assert calibration_rows(DEFAULT_MODEL, "").shape == (16, 512)
    assert calibration_rows(model, "none") is None
    with pytest.raises(ConfigError, match="name one with --calibration FILE"):
        calibration_rows(model, "")


def test_texts_that_cannot_be_used_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_text(tmp_path / "missing.txt")
    (tmp_path / "binary").write_bytes(b"ab\xff")
    with pytest.raises(ConfigError, match=r"is not UTF-8 \(byte 2\)"):
        read_text(tmp_path / "binary")
    with pytest.raises(ConfigError, match=f"at least {MIN_TOKENS} are needed"):
        rows_of(["short"], model, 512)
