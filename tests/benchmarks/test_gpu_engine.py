"""`python -m benchmarks.gpu --part engine`: the roofline, weights made in place, the driver with a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.engine import drive, roofline, rows
from benchmarks.gpu.engine.waits import HostClock, host_clock
from benchmarks.gpu.engine.weights import FORMATS, LLAMA_3_8B, SMALL, Format, RandomTensors, config_json
from benchmarks.gpu.machine import NOMINAL
from benchmarks.gpu.results import Results
from benchmarks.gpu.runner import Budget

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "format, batch, milliseconds",
    [
        ("bf16", 1, 3.52),
        ("bf16", 64, 5.56),
        ("bf16", 256, 12.85),
        ("w8a8kv8", 1, 1.88),
        ("w8a8kv8", 64, 2.96),
        ("w8a8kv8", 256, 6.72),
        ("w4a8kv4", 1, 1.09),
        ("w4a8kv4", 64, 1.67),
        ("w4a8kv4", 256, 4.73),
        ("w4a16kv8", 1, 1.12),
        ("w4a16kv8", 64, 2.41),
        ("w4a16kv8", 256, 8.98),
    ],
)
def test_the_roofline_is_that_of_the_projects_notes(format: str, batch: int, milliseconds: float) -> None:
    assert roofline.step_ms(NOMINAL, LLAMA_3_8B, FORMATS[format], batch, 1024) == pytest.approx(milliseconds, rel=0.015)


def test_what_is_accepted() -> None:
    assert [roofline.judge("w4a8kv4", 256, share) for share in (0.59, 0.6, 0.8)] == ["miss", "pass", "stretch"]
    assert roofline.judge("bf16", 1, 0.76) == "pass" and roofline.judge("w4a16kv8", 1, 0.9) == "-"
    assert roofline.host_goal_ms(256) == pytest.approx(2.348)


@pytest.mark.parametrize("name", FORMATS)
def test_a_tensor_is_the_same_whenever_it_is_asked_for_and_unlike_the_others(name: str) -> None:
    tensors = RandomTensors(SMALL, FORMATS[name], CPU)
    assert len(tensors) == len(set(tensors))
    for each in tensors:
        assert torch.equal(tensors[each], tensors[each])
    marker = next(iter(FORMATS[name].tensors(tensors._maker("x"), 128, 128)))
    first, second = (tensors[f"model.layers.{layer}.self_attn.q_proj{marker}"] for layer in (0, 1))
    assert not torch.equal(first, second) and json.loads(config_json(SMALL, FORMATS[name]))


def test_qoq_tensors_are_weights_of_8_bits() -> None:
    """(q - zero) * s2, of every q from 0 to 15: what QServe's products make of them."""
    tensors = RandomTensors(SMALL, FORMATS["w4a8kv4"], CPU)
    scale = tensors["model.layers.0.mlp.up_proj.s2_scales"].int()
    scaled_zero = tensors["model.layers.0.mlp.up_proj.s2_zeros"].int()
    zero = -scaled_zero // scale
    assert torch.equal(-zero * scale, scaled_zero) and zero.min() >= 0 and zero.max() <= 15
    assert scaled_zero.min() >= -128 and (15 * scale + scaled_zero).max() <= 127


@pytest.mark.parametrize("name", FORMATS)
def test_the_engine_reads_and_serves_every_format(name: str) -> None:
    """With KV as floats: a CPU does not quantise it in every tier."""
    engine = drive.Engine(SMALL, FORMATS[name]._replace(kv_dtype="auto"), drive.SMALL, CPU, kernels="torch")
    try:
        decoded = engine.decode(3)
        assert not engine.core.has_work and engine.core.num_live == 0
        assert decoded.tokens_s == pytest.approx(3000 / decoded.step_ms)
        assert 0 < decoded.host_ms and drive.SMALL.context - 15 < decoded.context < drive.SMALL.context + 5
    finally:
        engine.close()


def test_prompts_keep_arriving_while_rows_generate() -> None:
    engine = drive.Engine(SMALL, FORMATS["bf16"], drive.SMALL, CPU, kernels="torch")
    try:
        mixed = engine.mixed()
        assert 0 < mixed.p50_ms <= mixed.p99_ms
        assert mixed.prefill_tokens_s > 0 and mixed.decode_tokens_s > 0
        assert engine.core.num_live == 0
    finally:
        engine.close()


def test_a_request_that_fails_is_no_figure() -> None:
    engine = drive.Engine(SMALL, FORMATS["bf16"], drive.SMALL._replace(context=1000), CPU, kernels="torch")
    try:
        with pytest.raises(RuntimeError, match="accepted"):
            engine.decode(2)
    finally:
        engine.close()


def test_a_format_that_cannot_be_served_is_a_result_and_the_others_are_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU in the place of the GPU."""
    made = rows._drive()

    def engine_of(shape: object, format: Format, load: object, device: object) -> drive.Engine:
        if format is FORMATS["w8a8kv8"]:
            raise ValueError("no such thing")
        return made.Engine(SMALL, format, made.SMALL, CPU, "torch")

    fake = type("Drive", (), {"Engine": staticmethod(engine_of), "FULL": None})
    monkeypatch.setattr(rows, "_drive", lambda: fake)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    results = Results(tmp_path)
    run = results.begin(NOMINAL, 0.0)
    todo = [rows.Row("w8a8kv8", 1), rows.Row("bf16", 2), rows.Row("bf16", 0)]
    rows.run_rows(todo, results, run, NOMINAL, Budget(time.time(), 5), lambda text: None)
    assert results.rows["engine w8a8kv8 B1"]["reason"] == "ValueError: no such thing"
    assert results.rows["engine bf16 B2"]["tokens_s"] > 0 and results.rows["engine bf16 mixed"]["p99_ms"] > 0
    rows.run_rows([rows.Row("w4a8kv4", 1)], results, run, NOMINAL, Budget(time.time(), 0), lambda text: None)
    assert results.rows["engine w4a8kv4 B1"]["status"] == "not run"
    assert "FAILED: ValueError" in rows.decode_table([rows.Row("w8a8kv8", 1)], results)
    assert rows.mixed_table([rows.Row("bf16", 0)], results).splitlines()[-1].count(".") >= 2


def test_waiting_for_a_device_is_not_the_hosts_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(seconds: float) -> None:
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: busy(0.2))
    before = torch.cuda.synchronize
    with host_clock() as clock:
        clock.restart()
        torch.cuda.synchronize()
        busy(0.02)
        assert torch.tensor(3).item() == 3 and torch.arange(2).tolist() == [0, 1]
        assert 15 < clock.elapsed_ms() < 100
    assert torch.cuda.synchronize is before and "item" not in vars(torch.Tensor)


def test_a_call_that_does_not_wait_is_the_hosts_time() -> None:
    clock = HostClock()
    clock.restart()
    call = clock.leave_out(lambda x: sum(range(x)), lambda x: False)
    call(1_000_000)
    assert clock.elapsed_ms() > 1


BARE = """
import runpy, sys
absent = {"msgspec", "typer", "rich", "pytest", "hypothesis", "matplotlib", "tritonclient", "grpc"}
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
sys.argv = ["benchmarks.gpu", "--small", "--part", "engine", "--formats", "bf16,w8a8kv8"]
runpy.run_module("benchmarks.gpu", run_name="__main__", alter_sys=True)
"""


@pytest.mark.timeout(180)
def test_nothing_is_needed_but_torch_triton_transformers_and_numpy() -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", BARE], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "engine bf16 B256: not measured; ran" in done.stdout
    assert "engine bf16 mixed: not measured; ran" in done.stdout
