"""Runs that add to earlier ones; what is changed in ik_llama.cpp's source; what weights are said to be held as."""

from __future__ import annotations

import collections
import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.peers import __main__ as peers
from benchmarks.peers import collected, llamacpp_source
from benchmarks.peers.engines import PEERS, ours
from benchmarks.peers.errors import Skipped
from benchmarks.peers.measure import Contestant, Outcome, Sample, Work
from benchmarks.peers.models import Model
from benchmarks.peers.quantize_gguf import shares
from deploy.errors import UserError
from deploy.progress import SteppedProgress

CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "vocab_size": 100,
    "max_position_embeddings": 2048,
}
L = Model("L", Path("L"), CONFIG)
WORK = Work(L, "int4", (1,), prompts=(128,), new=128, repeats=2, threads=2)


def measured(engine: str, setting: str, rates: dict[int, list[float]]) -> Contestant:
    spec = PEERS[engine] if engine in PEERS else ours()
    contestant = Contestant(spec, setting, load_s=2.0, versions={"package": "1.0"}, note="a note")
    contestant.samples = {at: [Sample(rate, 10.0, 5.0, 30e9) for rate in some] for at, some in rates.items()}
    contestant.peak_rss_gib = dict.fromkeys(rates, 0.5)
    return contestant


def rates_of(contestants: list[Contestant]) -> dict[tuple[str, str], dict[int, list[float]]]:
    return {
        (contestant.engine.name, contestant.setting): {
            at: [sample.decode for sample in some] for at, some in contestant.samples.items()
        }
        for contestant in contestants
    }


def test_what_is_written_is_read_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "peers.json"
    assert collected.earlier(file, WORK) == []
    skipped = Contestant(PEERS["vllm"], "", skipped=PEERS["vllm"].lacks)
    some = [measured("everbatch", "w4a8", {1: [40.0, 41.0]}), measured("llamacpp", "q4_0", {1: [36.0]}), skipped]
    file.write_text(json.dumps({"rows": [], "measured": collected.to_json(WORK, some)}))
    assert collected.earlier(file, WORK) == some


@pytest.mark.parametrize("other", [{"new": 64}, {"prompts": (16,)}, {"weights": "int8"}, {"threads": 1}, {"busy": 1}])
def test_figures_that_cannot_be_compared_are_not_added(tmp_path: Path, other: dict[str, object]) -> None:
    file = tmp_path / "peers.json"
    file.write_text(json.dumps({"measured": collected.to_json(WORK, [])}))
    with pytest.raises(UserError, match="peers.json is of .* without --add it is written anew"):
        collected.earlier(file, replace(WORK, **other))


def test_results_of_before_samples_were_kept_are_refused(tmp_path: Path) -> None:
    (tmp_path / "peers.json").write_text(json.dumps({"rows": []}))
    with pytest.raises(UserError, match="keeps no samples"):
        collected.earlier(tmp_path / "peers.json", WORK)


def test_a_run_adds_concurrencies_repeats_and_peers_to_an_earlier_one() -> None:
    old = [measured("everbatch", "w4a8", {1: [40.0]}), measured("llamacpp", "q4_0", {1: [36.0]})]
    new = [measured("everbatch", "w4a8", {1: [42.0], 8: [160.0]}), measured("ik_llamacpp", "q4_0", {8: [120.0]})]
    both = collected.merged(old, new)
    assert rates_of(both) == {
        ("everbatch", "w4a8"): {1: [40.0, 42.0], 8: [160.0]},
        ("ik_llamacpp", "q4_0"): {8: [120.0]},
        ("llamacpp", "q4_0"): {1: [36.0]},
    }
    assert collected.concurrencies_of(both) == (1, 8)
    assert both[0].peak_rss_gib == {1: 0.5, 8: 0.5}


def test_who_fails_this_time_keeps_what_was_measured_before_and_who_failed_before_is_replaced() -> None:
    failed = Contestant(PEERS["llamacpp"], "q4_0", skipped="it cannot be installed")
    good = measured("llamacpp", "q4_0", {1: [36.0]})
    assert rates_of(collected.merged([good], [failed])) == {("llamacpp", "q4_0"): {1: [36.0]}}
    assert collected.merged([failed], [measured("llamacpp", "q4_k_m", {1: [42.0]})])[0].skipped == ""
    assert len(collected.merged([failed], [measured("llamacpp", "q4_k_m", {1: [42.0]})])) == 1
    assert collected.merged([failed], [measured("openvino", "asym:bf16", {1: [28.0]})])[1] is failed


def test_the_types_of_weights_are_told_by_their_share() -> None:
    """96 weights of 4.5 bits and 32 of 8.5: 54 and 34 bytes, 5.5 bits each."""
    assert (
        shares(collections.Counter(Q8_0=32, Q4_0=96), 54 + 34) == "Q4_0 75 %, Q8_0 25 % of the weights, 5.50 bits each"
    )


def test_what_an_interrupted_run_has_measured_is_kept_with_add_and_only_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine was measured at 8 before; this run is ended after one of two repeats at 1."""
    file = tmp_path / "peers-L-int4.json"
    before = {"measured": collected.to_json(WORK, [measured("everbatch", "w4a8", {8: [160.0]})])}
    contestant = measured("everbatch", "w4a8", {})

    def interrupted(*_: object) -> Outcome:
        contestant.samples[1], contestant.peak_rss_gib[1] = [Sample(40.0, 10.0, 5.0, 30e9)], 0.5
        raise KeyboardInterrupt

    monkeypatch.setattr(peers, "RESULTS", tmp_path)
    monkeypatch.setattr(peers, "measure", interrupted)
    monkeypatch.setattr(peers, "prepare", lambda *_: [contestant])
    for add, kept in ((False, {8: [160.0]}), (True, {1: [40.0], 8: [160.0]})):
        file.write_text(json.dumps(before))
        with pytest.raises(KeyboardInterrupt):
            peers.compare(WORK, [ours()], SteppedProgress(), add)
        assert rates_of(collected.earlier(file, WORK)) == {("everbatch", "w4a8"): kept}
    assert [row["concurrency"] for row in json.loads(file.read_text())["rows"]] == [1, 8]


@pytest.fixture
def ik_source(tmp_path: Path) -> Path:
    attention = tmp_path / llamacpp_source.IQK / "fa"
    attention.mkdir(parents=True)
    for sizes in ("64_64", "96_96", "128_128", "576_512"):
        (attention / f"iqk_fa_{sizes}.cpp").write_text("as it was")
    for name in (*llamacpp_source.UNUSED_PRODUCTS, "kquants"):
        (tmp_path / llamacpp_source.IQK / f"iqk_gemm_{name}.cpp").write_text("as it was")
    return tmp_path


def test_of_ik_llamacpp_only_what_is_not_measured_is_left_out(ik_source: Path) -> None:
    llamacpp_source.SOURCES["ik_llamacpp"].change(ik_source)
    iqk = ik_source / llamacpp_source.IQK
    kept = {file.name for file in iqk.rglob("*.cpp") if file.read_text() == "as it was"}
    assert kept == {"iqk_fa_64_64.cpp", "iqk_fa_128_128.cpp", "iqk_gemm_kquants.cpp"}
    assert "IQK_FA_CASE(iqk_fa_96_96) { return false; }" in (iqk / "fa" / "iqk_fa_96_96.cpp").read_text()
    assert "bool iqk_dequantize_ktquants(" in (iqk / "iqk_gemm_ktquants.cpp").read_text()
    assert (ik_source / "CMakeLists.txt").read_text() == llamacpp_source.LIBRARIES


@pytest.mark.parametrize("missing", ["fa/iqk_fa_128_128.cpp", "iqk_gemm_1bit.cpp"])
def test_another_source_of_ik_llamacpp_is_refused(ik_source: Path, missing: str) -> None:
    (ik_source / llamacpp_source.IQK / missing).unlink()
    with pytest.raises(Skipped, match="other files than those that are left out"):
        llamacpp_source.leave_out(ik_source)
