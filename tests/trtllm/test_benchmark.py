"""The benchmark driver over GptManager."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner

from benchmarks import gpt_manager

app = Typer()
app.command()(gpt_manager.main)
SAMPLES = [{"input_ids": [1 + i, 2, 3], "output_len": 2 + i} for i in range(4)]


def printed(model_path: Path, dataset: Path, *options: str) -> str:
    done = CliRunner().invoke(app, ["--engine-dir", str(model_path), "--dataset", str(dataset), *options])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.feature("001-66")
@pytest.mark.parametrize("kind", ["V1", "IFB", "UIFB"])
def test_every_sample_is_served_and_counted(model_path: Path, tmp_path: Path, kind: str) -> None:
    (dataset := tmp_path / "set.json").write_text(json.dumps({"samples": SAMPLES}))
    text = printed(model_path, dataset, "--type", kind, "--max-tokens-in-kvcache", "512", "--request-rate", "200")
    assert "num_samples 4.00" in text and "num_error_samples 0.00" in text
    figures = dict(re.findall(r"\[BENCHMARK\] (\S+) ([\d.]+)", text))
    tokens = float(figures["token_throughput(token/sec)"]) * float(figures["total_latency(ms)"]) / 1e3
    assert tokens == pytest.approx(2 + 3 + 4 + 5, rel=0.05), "the output's tokens, and not the prompts'"
    assert json.loads(text[text.index("{") : text.rindex("}") + 1])["Active Request Count"] == 0
    assert "num_logits" not in text


@pytest.mark.feature("001-66")
def test_logits_come_where_they_are_asked_for(model_path: Path, tmp_path: Path) -> None:
    (dataset := tmp_path / "set.json").write_text(json.dumps({"samples": SAMPLES}))
    flags = ("--return-context-logits", "--return-generation-logits", "--max-tokens-in-kvcache", "512")
    assert f"num_logits {96 * (4 * 3 + 2 + 3 + 4 + 5)}\n" in printed(model_path, dataset, *flags)


def test_a_file_of_another_form_is_refused(model_path: Path, tmp_path: Path) -> None:
    (dataset := tmp_path / "set.json").write_text("[]")
    done = CliRunner().invoke(app, ["--engine-dir", str(model_path), "--dataset", str(dataset)])
    assert done.exit_code == 2 and "is no data set" in done.output
