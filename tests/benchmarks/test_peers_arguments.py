"""`./everbatch bench peers`: what is refused before anything is installed or measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.peers import __main__ as peers
from benchmarks.peers import environments, models
from benchmarks.peers.engines import PEERS, ours
from benchmarks.peers.measure import Work
from deploy.errors import UserError
from deploy.progress import Progress

CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 100,
    "max_position_embeddings": 256,
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "tiny"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


@pytest.fixture(autouse=True)
def bench_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(environments, "BENCH", tmp_path / "bench")
    monkeypatch.setattr(models, "BENCH", tmp_path / "bench")
    return tmp_path / "bench"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--concurrency", "1,x"], "--concurrency is '1,x'"),
        (["--concurrency", "0"], "--concurrency is '0'"),
        (["--prompt", "16,0"], "--prompt is '16,0'"),
        (["--peers", "openvino,ollama"], "--peers has 'ollama'; choose from openvino, llamacpp, vllm, transformers"),
        (["--shapes", "XL"], "--shapes has 'XL'; choose from S, M, L"),
        (["--model-dir", "nowhere"], "nowhere/config.json cannot be read"),
    ],
)
def test_a_bad_argument_is_refused_in_one_sentence(arguments: list[str], said: str) -> None:
    app = peers.typer.Typer()
    app.command()(peers.main)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == UserError.exit_code
    assert said in result.output.replace("\n", " ")


def test_more_tokens_than_the_model_takes_are_refused(checkpoint: Path) -> None:
    work = Work(models.of_directory(checkpoint), "bf16", (1,), prompts=(16, 200), new=57, repeats=1, threads=1)
    with pytest.raises(UserError, match="--prompt 200 and --new 57 are more than the 256 tokens of tiny"):
        peers.check(work)


def test_a_second_run_is_kept_out() -> None:
    with peers.alone(), pytest.raises(UserError, match="another `bench peers` runs"), peers.alone():
        pass


def test_lists_are_read_without_their_duplicates() -> None:
    assert peers.whole_numbers("1,8,32", "--concurrency") == [1, 8, 32]
    assert peers.choices(" L, M,L ", models.SHAPES, "--shapes") == ["L", "M"]


def test_an_engine_without_the_weights_takes_part_as_skipped_with_its_reason(checkpoint: Path) -> None:
    work = Work(models.of_directory(checkpoint), "int8", (1,), prompts=(8,), new=8, repeats=1, threads=1)
    (contestant,) = peers.prepare(PEERS["vllm"], work, Progress())
    assert contestant.skipped == PEERS["vllm"].lacks != ""


def test_our_engine_runs_in_this_environment_on_the_checkpoint_itself(checkpoint: Path) -> None:
    work = Work(models.of_directory(checkpoint), "int8", (1,), prompts=(8,), new=8, repeats=1, threads=1)
    (contestant,) = peers.prepare(ours("w8a8"), work, Progress())
    assert (contestant.setting, contestant.form, contestant.skipped) == ("w8a8", checkpoint, "")
