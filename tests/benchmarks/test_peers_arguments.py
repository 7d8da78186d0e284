"""`./everbatch bench peers`: what is refused before anything is installed or measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.peers import __main__ as peers
from benchmarks.peers import environments, models, quantize_gguf
from benchmarks.peers.commands import CommandFailed
from benchmarks.peers.engines import PEERS, chosen, ours
from benchmarks.peers.errors import Skipped
from benchmarks.peers.measure import Work
from benchmarks.quality import peers as quality_peers
from deploy.errors import UserError
from deploy.progress import SteppedProgress

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
        (["--peers", "openvino,ollama"], "--peers has 'ollama'; choose from openvino, llamacpp, ik_llamacpp, vllm"),
        (
            ["--peers", "llamacpp:q4_1", "--weights", "int4"],
            "--peers has 'llamacpp:q4_1'; with --weights int4 llamacpp has q4_0, q4_k_m",
        ),
        (["--peers", "vllm:bf16", "--weights", "int4"], "with --weights int4 vllm has no setting"),
        (["--shapes", "XL"], "--shapes has 'XL'; choose from S, M, M-long, L, E"),
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


def test_a_second_run_is_kept_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "BENCH", tmp_path)  # a test of `bench served` may hold the checkout's own lock
    with peers.alone(), pytest.raises(UserError, match="another `bench peers` or `bench served` runs"), peers.alone():
        pass


def test_lists_are_read_without_their_duplicates() -> None:
    assert peers.whole_numbers("1,8,32", "--concurrency") == [1, 8, 32]
    assert peers.choices(" L, M,L ", models.SHAPES, "--shapes") == ["L", "M"]


def test_a_peer_is_chosen_with_all_its_settings_or_with_those_that_are_named() -> None:
    some = chosen(["llamacpp:q4_k_m", "ik_llamacpp", "vllm", "llamacpp:q4_0"], "int4")
    assert [(engine.name, engine.settings.get("int4")) for engine in some] == [
        ("llamacpp", ("q4_k_m", "q4_0")),
        ("ik_llamacpp", PEERS["ik_llamacpp"].settings["int4"]),
        ("vllm", ()),
    ]
    assert some[0].settings["int8"] == PEERS["llamacpp"].settings["int8"]


def test_every_setting_of_four_bits_has_a_form_of_its_weights() -> None:
    exported = {models.openvino_form("int4", setting) for setting in PEERS["openvino"].settings["int4"]}
    assert exported == {"int4-asym", "int4-sym"} <= models.OPENVINO_FORMS.keys()
    assert [models.openvino_form(weights, "bf16") for weights in ("bf16", "int8")] == ["bf16", "int8"]
    files = {setting for name in ("llamacpp", "ik_llamacpp") for setting in PEERS[name].settings["int4"]}
    assert files | set(quality_peers.TYPES) == quantize_gguf.TYPES.keys()


def test_llamacpp_and_ik_llamacpp_read_the_same_files_and_openvino_one_for_each_kind_of_weights(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp's quantiser starts from bfloat16, whose file is made once; neither properties nor engine change a form."""
    ran: list[list[str]] = []

    def pretend(command: list[str], *rest: object, **options: object) -> None:
        ran.append(command)
        is_ours = "backend.convert" in command
        out = command[command.index("--output") + 1] if is_ours else command[-1 if "optimum-cli" in command[0] else -2]
        Path(out).write_text("")

    monkeypatch.setattr(models.commands, "run", pretend)
    model = models.of_directory(checkpoint)
    form = lambda engine, setting: models.form_for(
        PEERS[engine], Path("env/bin/python"), model, "int4", setting, SteppedProgress()
    )
    assert form("llamacpp", "q4_0") == form("ik_llamacpp", "q4_0") != form("llamacpp", "q4_k_m")
    assert form("openvino", "asym:bf16") == form("openvino", "asym:f32+dq32") != form("openvino", "sym:f32+dq32")
    assert ran[0][-4:] == ["--type", "BF16", "--tokenizer", "none"]
    assert [command[-1] for command in ran[1:3]] == ["q4_0", "q4_k_m"]
    assert ["--sym" in command for command in ran[3:]] == [False, True]
    assert form("vllm", "bf16") == checkpoint


def test_a_form_that_cannot_be_made_skips_the_engine_with_the_last_words(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise CommandFailed(1, ["llama_model_quantize answered 1"])

    monkeypatch.setattr(models.commands, "run", fail)
    with pytest.raises(Skipped, match="tiny cannot be converted to gguf, bf16: llama_model_quantize answered 1"):
        models.form_for(
            PEERS["ik_llamacpp"], Path("python"), models.of_directory(checkpoint), "int4", "q4_0", SteppedProgress()
        )


def test_an_engine_without_the_weights_takes_part_as_skipped_with_its_reason(checkpoint: Path) -> None:
    work = Work(models.of_directory(checkpoint), "int8", (1,), prompts=(8,), new=8, repeats=1, threads=1)
    (contestant,) = peers.prepare(PEERS["vllm"], work, SteppedProgress())
    assert contestant.skipped == PEERS["vllm"].lacks != ""


def test_our_engine_runs_in_this_environment_on_the_checkpoint_itself(checkpoint: Path) -> None:
    work = Work(models.of_directory(checkpoint), "int8", (1,), prompts=(8,), new=8, repeats=1, threads=1)
    (contestant,) = peers.prepare(ours("w8a8"), work, SteppedProgress())
    assert (contestant.setting, contestant.form, contestant.skipped) == ("w8a8", checkpoint, "")
