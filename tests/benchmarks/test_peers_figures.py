"""From measurements to rows, table and picture; sizes of models and the roof."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.peers import __main__ as peers
from benchmarks.peers import models, roof
from benchmarks.peers.commands import CommandFailed
from benchmarks.peers.engines import GIB, PEERS, EngineSpec, ours
from benchmarks.peers.measure import MEMORY_SHARE, Contestant, Outcome, Sample, Work, bytes_together, fit_together
from benchmarks.peers.models import Model
from benchmarks.peers.plot import plot
from benchmarks.peers.rows import Row, add_ratios, make_rows
from benchmarks.peers.table import make_table, reasons
from tools.make_random_model import make_config

M = Model(
    "M",
    Path("M"),
    {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "num_hidden_layers": 30,
        "vocab_size": 49152,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
)
GB_PER_S = 20.0
WORK = Work(M, "int8", (1, 8), prompts=(128,), new=128, repeats=2, threads=2)


def measured(engine: EngineSpec, setting: str, rates: dict[int, list[float]]) -> Contestant:
    contestant = Contestant(engine, setting, load_s=1.0, versions={"package": "1.0"})
    contestant.samples = {
        at: [Sample(rate, 10 * rate, rate / 2, GB_PER_S * 1e9) for rate in some] for at, some in rates.items()
    }
    contestant.peak_rss_gib = dict.fromkeys(rates, 0.5)
    return contestant


@pytest.fixture
def outcome() -> Outcome:
    default, quantised = PEERS["openvino"].settings["int8"]
    contestants = [
        measured(ours("w8a8"), "w8a8", {1: [90.0, 120.0], 8: [500.0, 400.0]}),
        measured(PEERS["openvino"], default, {1: [50.0, 60.0], 8: [250.0, 200.0]}),
        measured(PEERS["openvino"], quantised, {1: [80.0, 70.0], 8: [100.0, 150.0]}),
        Contestant(PEERS["vllm"], "", skipped=PEERS["vllm"].lacks),
    ]
    return Outcome(contestants, alternated=True)


def rows_by_engine(outcome: Outcome, concurrency: int) -> dict[str, Row]:
    return {row["engine"]: row for row in make_rows(WORK, outcome) if row["concurrency"] == concurrency}


def test_rows_have_the_best_the_median_and_the_ratios_of_both(outcome: Outcome) -> None:
    row = rows_by_engine(outcome, 1)["everbatch"]
    assert (row["decode_tokens_per_s"], row["median_decode_tokens_per_s"]) == (120.0, 105.0)
    assert row["ratio_to_best_peer"] == 120 / 80
    assert row["median_ratio_to_best_peer"] == 105 / 75
    assert (row["prefill_tokens_per_s"], row["prefill_ratio_to_best_peer"]) == (1200.0, 1.5)
    assert (row["output_tokens_per_s"], row["median_output_tokens_per_s"], row["output_ratio_to_best_peer"]) == (
        60,
        52.5,
        1.5,
    )


def test_an_engine_in_two_settings_counts_with_the_better_at_each_concurrency(outcome: Outcome) -> None:
    default, quantised = PEERS["openvino"].settings["int8"]
    alone, crowded = rows_by_engine(outcome, 1)["openvino"], rows_by_engine(outcome, 8)["openvino"]
    assert (alone["setting"], alone["decode_tokens_per_s"]) == (quantised, 80.0)
    assert (crowded["setting"], crowded["decode_tokens_per_s"]) == (default, 250.0)
    assert set(alone["settings"]) == {default, quantised}
    assert alone["ratio_to_best_peer"] == crowded["ratio_to_best_peer"] == 1.0


def test_a_ratio_is_to_the_best_peer_in_whatever_setting_is_best_for_that_rate(outcome: Outcome) -> None:
    """At 1 the second setting decodes fastest (80), and the first, which decodes at 60, is given a faster prefill: 5,000."""
    first = next(contestant for contestant in outcome.contestants if contestant.engine.name == "openvino")
    first.samples[1] = [Sample(60.0, 5000.0, 30.0, GB_PER_S * 1e9)]
    row = rows_by_engine(outcome, 1)["everbatch"]
    assert (row["ratio_to_best_peer"], row["prefill_ratio_to_best_peer"]) == (120 / 80, 1200 / 5000)


def test_a_skipped_engine_has_rows_with_its_reason_and_no_figures(outcome: Outcome) -> None:
    row = rows_by_engine(outcome, 8)["vllm"]
    assert row["skipped"] == PEERS["vllm"].lacks
    assert {row[key] for key in ("decode_tokens_per_s", "prefill_tokens_per_s", "ratio_to_best_peer")} == {None}
    assert row["roof_fraction"] is None


def test_without_a_measured_peer_there_is_no_ratio() -> None:
    rates = {
        "decode_tokens_per_s": 10.0,
        "median_decode_tokens_per_s": 9.0,
        "prefill_tokens_per_s": 5.0,
        "median_prefill_tokens_per_s": 5.0,
        "output_tokens_per_s": 5.0,
    }
    rows = [
        {"engine": "everbatch", **rates, "settings": {"w8a8": rates}},
        {"engine": "vllm", **dict.fromkeys(rates), "settings": {}},
    ]
    add_ratios(rows)
    assert [row["ratio_to_best_peer"] for row in rows] == [None, None]


def test_rows_can_be_written_as_json(outcome: Outcome) -> None:
    rows = make_rows(WORK, outcome)
    assert [json.loads(json.dumps(row)) for row in rows] == rows
    assert len(rows) == 2 * 3


def test_the_weights_of_a_step_are_those_of_all_linears_and_the_head() -> None:
    assert M.linear_weights * models.BYTES["bf16"] == pytest.approx(269e6, rel=0.01)
    assert M.kv_bytes_per_token == 30 * 2 * 3 * 64 * 2
    assert M.step_bytes("int8", 8, 192) == M.linear_weights + 8 * 192 * M.kv_bytes_per_token


def test_a_step_reads_the_experts_of_its_tokens() -> None:
    """Shape E: 1.0 B weights, of which one token reads 0.32 B, and many tokens all."""
    config = make_config("qwen3_moe", "E", {}).to_dict() | dict(architectures=["Qwen3MoeForCausalLM"])
    model = models.Model("E", Path("E"), config)
    router, expert = 1024 * 32, 3 * 1024 * 384
    of_others = 24 * (1024 * 64 * (2 * 16 + 2 * 4) + router) + 32_000 * 1024
    assert model.linear_weights == of_others + 24 * 32 * expert
    assert model.read_weights(1) == of_others + 24 * 8 * expert
    assert model.read_weights(2) == of_others + 24 * (8 + 8 * 24 / 32) * expert
    assert model.read_weights(1000) == pytest.approx(model.linear_weights)


def test_four_bits_are_half_a_byte() -> None:
    assert M.step_bytes("int4", 1, 0) == M.linear_weights / 2
    assert M.resident_bytes("int4") == M.linear_weights // 2


def test_an_embedding_of_its_own_is_resident_but_not_read() -> None:
    untied = Model("untied", Path(), M.config | {"tie_word_embeddings": False})
    assert untied.linear_weights == M.linear_weights
    assert untied.resident_bytes("bf16") - M.resident_bytes("bf16") == 49152 * 576 * 2


def test_the_roof_share_is_decoding_over_what_the_bandwidth_allows(outcome: Outcome) -> None:
    row = rows_by_engine(outcome, 8)["everbatch"]
    roof_rate = roof.tokens_per_s(8, M.step_bytes("int8", 8, 192), 20e9)
    assert row["roof_tokens_per_s"] == roof_rate == pytest.approx(8 * 20e9 / (134.5e6 + 8 * 192 * 23040), rel=0.01)
    assert row["roof_fraction"] == 450 / roof_rate


def test_several_lengths_are_taken_in_turn_and_the_roof_counts_their_mean(outcome: Outcome) -> None:
    work = Work(M, "int8", (1, 8), prompts=(16, 16, 976), new=128, repeats=2, threads=2)
    assert work.lengths(4) == [16, 16, 976, 16] and work.max_length == 1104
    row = make_rows(work, outcome)[3]
    assert (row["concurrency"], row["engine"], row["prompt"]) == (8, "everbatch", [16, 16, 976])
    roof_rate = roof.tokens_per_s(8, M.step_bytes("int8", 8, (6 * 16 + 2 * 976) / 8 + 64), 20e9)
    assert row["roof_tokens_per_s"] == pytest.approx(roof_rate)


def test_each_measurement_counts_against_the_bandwidth_of_its_moment() -> None:
    contestant = measured(ours("w8a8"), "w8a8", {8: []})
    contestant.samples = {
        8: [Sample(100.0, 1.0, 1.0, 20e9), Sample(300.0, 1.0, 1.0, 60e9), Sample(220.0, 1.0, 1.0, 40e9)]
    }
    row = rows_by_engine(Outcome([contestant], alternated=True), 8)["everbatch"]
    assert row["bandwidth_gb_per_s"] == 40.0
    assert row["roof_fraction"] == pytest.approx(100 / roof.tokens_per_s(8, M.step_bytes("int8", 8, 192), 20e9))
    assert peers.read_bandwidth([20e9, 60e9, 40e9]) == "20.0 - 60.0 GB/s"


def test_the_meter_reads_the_bandwidth_whenever_it_is_asked_and_tells_when_it_has_died() -> None:
    meter = roof.Meter(threads=1)
    try:
        assert all(1e8 < meter.read() < 1e13 for _ in range(2))
        meter._process.kill()
        with pytest.raises(CommandFailed, match="the read bandwidth cannot be measured"):
            meter.read()
            meter.read()
    finally:
        meter.close()


def test_engines_are_loaded_together_only_where_memory_suffices() -> None:
    engines = [ours("w8a8"), PEERS["openvino"]]
    needed = bytes_together(engines, WORK)
    assert needed > GIB + M.resident_bytes("int8")
    assert fit_together(engines, WORK, int(needed / MEMORY_SHARE) + 1)
    assert not fit_together(engines, WORK, needed)


def test_the_table_has_a_line_for_each_row_and_the_reasons_follow(outcome: Outcome) -> None:
    rows = make_rows(WORK, outcome)
    console = Console(width=120, file=io.StringIO())
    console.print(make_table(rows, "M int8"))
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    assert ["1", "everbatch", "120.0", "105.0", "1.50", "1.40"] in [line[:6] for line in lines]
    assert ["8", "vllm", *"-" * 11] in lines
    assert ["1", "openvino", "(f32+dq32)", "80.0", "75.0"] in [line[:5] for line in lines]
    assert ["(bf16)", "60.0", "55.0", "-", "-", "-", "600"] in [line[:7] for line in lines]
    assert reasons(rows) == [f"vllm is skipped: {PEERS['vllm'].lacks}"]


def test_the_picture_is_drawn_also_where_an_engine_is_missing(outcome: Outcome, tmp_path: Path) -> None:
    plot(make_rows(WORK, outcome), tmp_path / "peers.png", "M int8")
    assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG")
