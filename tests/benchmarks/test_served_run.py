"""`bench served` as a whole: this server with the default model beside a fake peer, seconds long; and who takes no part."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import table
from benchmarks.harness.answers import DriverFailed
from benchmarks.harness.measure import Outcome, one
from benchmarks.harness.work import Cell
from benchmarks.peers import environments
from benchmarks.peers.errors import Skipped
from benchmarks.served import checkpoint, contestants, llamacpp, memory
from benchmarks.served.contestants import Setup
from benchmarks.served.measure import Drivers, ServerLane
from benchmarks.served.servers import Server, Start
from deploy.errors import UserError
from deploy.progress import SteppedProgress
from tests.benchmarks.fake_server import fake_server
from tests.benchmarks.test_served_options import plan

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = "--pairs 64:32 --scale 0.5 --users 1,2 --requests 2 --repeats 2 --seconds 20 --conversations 8 --turns 2"


def run(out: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command, to its end."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.served",
        *OPTIONS.split(),
        "--driver",
        "python",
        "--out",
        str(out),
        *words,
    ]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of results of one run."""
    out = tmp_path_factory.mktemp("served")
    with fake_server(pace_s=0.002) as fake:
        done = run(out, "--peers", f"fake={fake.url}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "32:16, 2 users, fake: " in done.stderr
    return out


def test_every_cell_has_every_server_and_wire_with_all_tokens(measured: Path) -> None:
    document = json.loads((measured / "served.json").read_text())
    lanes = ["everbatch", "fake", "everbatch-http", "everbatch-grpc"]
    cells = ["32:16, 1 user", "32:16, 2 users", "32:8, 1 user, 8 conversations of 2 turns"]
    cells.append("32:8, 2 users, 8 conversations of 2 turns")
    assert [(row["cell"], row["lane"]) for row in document["rows"]] == [
        (cell, lane) for cell in cells for lane in lanes
    ]
    for row in document["rows"]:
        assert (row["driver"], row["failures"], len(row["repeats"])) == ("python", [], 2), row
        requests = 16 if row["conversations"] else 2 * row["users"]
        for figures in row["repeats"]:
            assert (figures["requests"], figures["failed"]) == (requests, 0), row
            assert figures["output_tokens"] == requests * row["new"], row
        assert ("returning_first_token_ms_p50" in row["median"]) == bool(row["conversations"])


def test_the_ratios_to_the_best_peer_are_of_this_servers_own_lane(measured: Path) -> None:
    document = json.loads((measured / "served.json").read_text())
    assert [sentence.partition(":")[0] for sentence in document["ratios"]] == [
        "output",
        "first token, median",
        "inter-token latency, p99",
        "first token when returning, median",
    ]
    assert "in 4 cells" in document["ratios"][0] and "in 2 cells" in document["ratios"][3]
    assert (measured / "served.png").read_bytes().startswith(b"\x89PNG")


def test_a_ratio_above_one_means_that_this_server_is_better() -> None:
    medians = {"everbatch": (200.0, 10.0), "everbatch-grpc": (900.0, 1.0), "a": (100.0, 30.0), "b": (50.0, 20.0)}
    rows = [
        {"cell": "c", "lane": lane, "median": {"output_tokens_per_s": rate, "first_token_ms_p50": ms}}
        for lane, (rate, ms) in medians.items()
    ]
    assert table.ratios({"rows": rows}, "everbatch") == [
        "output: 2.00 times the best peer (2.00 to 2.00 in 1 cell)",
        "first token, median: 2.00 times the best peer (2.00 to 2.00 in 1 cell)",
    ]
    assert table.ratios({"rows": rows[:2]}, "everbatch") == []


def test_a_wrong_option_ends_with_one_sentence_before_anything_is_started(tmp_path: Path) -> None:
    done = run(tmp_path, "--seconds", "nan")
    assert done.returncode == 2
    assert done.stdout.strip() == "bench served: --seconds is nan, allowed is 1 to 3600"
    assert "starting" not in done.stderr


def test_ctrl_c_keeps_what_was_measured_and_leaves_no_server(tmp_path: Path) -> None:
    words = ("--driver", "python", "--peers", "", "--wires", "grpc,openai", "--repeats", "20", "--seconds", "60")
    command = [sys.executable, "-m", "benchmarks.served", *OPTIONS.split(), "--out", str(tmp_path), *words]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        assert process.stderr is not None
        seen = next((line for line in process.stderr if " tokens/s, " in line), "")
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(120) == 130, seen + rest
    document = json.loads((tmp_path / "served.json").read_text())
    assert 1 <= sum(len(row["repeats"]) for row in document["rows"]) < 160
    assert (tmp_path / "served.png").exists()
    assert servers_of_this_checkout() == []


def servers_of_this_checkout() -> list[str]:
    """The command lines of servers that `bench served` has started here."""
    marks = (b"serve", str(checkpoint.DEFAULT).encode(), contestants.MODEL_NAME.encode())
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        if all(mark in words for mark in marks):
            found.append(b" ".join(words).decode())
    return found


@pytest.mark.parametrize("name", ["vllm", "llamacpp", "openvino"])
def test_a_peer_that_is_not_installed_is_named_with_the_command(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environments, "BENCH", tmp_path)
    monkeypatch.setattr(llamacpp, "PROGRAM", tmp_path / "none")
    setup = Setup(checkpoint.directory_of(""), 1024, 1, 128, tmp_path, SteppedProgress())
    with pytest.raises(Skipped, match=f"it is not installed; ./everbatch bench served --install {name}"):
        contestants.STARTS[name](setup)
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_ends_is_skipped_with_its_last_words(tmp_path: Path) -> None:
    command = (sys.executable, "-c", "print('no such model'); raise SystemExit(3)")
    server = Server(Start("gone", "http://127.0.0.1:9", "any", command), tmp_path / "log")
    try:
        with pytest.raises(Skipped, match="its process ended; its last words: no such model"):
            server.wait_ready(lambda: None)
    finally:
        server.close()


def test_a_paused_server_is_ended_too(tmp_path: Path) -> None:
    command = (sys.executable, "-c", "import time; time.sleep(600)")
    server = Server(Start("slow", "http://127.0.0.1:9", "any", command), tmp_path / "log")
    process = server._process
    assert process is not None
    server.pause()
    server.close()
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def test_a_driver_that_fails_leaves_its_reason_in_the_row(tmp_path: Path) -> None:
    def failing(*_: Any) -> list[Any]:
        raise DriverFailed("AIPerf failed: no tokenizer")

    outcome, cell = Outcome(), Cell(4, 2, users=1)
    with fake_server() as fake:
        server = Server(Start("fake", fake.url, "any"), tmp_path / "log")
        lane = ServerLane(server, "openai", Drivers(failing, "aiperf"))
        one(cell, lane, 0, plan(tmp_path).effort, 512, outcome, SteppedProgress())
    (row,) = outcome.rows.values()
    assert (row.driver, row.repeats, row.failures) == ("aiperf", [], ["AIPerf failed: no tokenizer"])


def test_servers_that_do_not_fit_into_the_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = checkpoint.directory_of("")
    memory.check(plan(tmp_path, peers=""), model)
    monkeypatch.setattr(memory, "available", lambda: 1 << 20)
    with pytest.raises(UserError, match=r"1 servers take about .* GiB, 0\.0 are available; give fewer --peers"):
        memory.check(replace(plan(tmp_path, peers="")), model)


def test_a_borrowed_tokenizer_gets_a_text_for_every_token(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 5000}))
    (tmp_path / "tokenizer.json").write_text((checkpoint.DEFAULT / "tokenizer.json").read_text())
    checkpoint.give_every_token_a_text(tmp_path)
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 5000
    assert tokenizer.decode([4999]).strip() == "w4999"
