"""A real tritonserver over a null engine or a real one, for this benchmark, and the CPU time of its processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from backend.api import EngineConfig
from backend.serving.lifecycle.environment import RunDirectory
from deploy import ROOT
from deploy.triton_server import TritonServer

START_TIMEOUT_S = 120
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
LOADED = "        self._server = load_model(args)\n"  # in the adapter of our models
PROBED = """        from benchmarks.overhead import probe

        probe.start("stub")
"""


@dataclass
class Service:
    url: str
    processes: dict[str, list[int]]  # what they are called in the table -> process ids
    probe_dir: Path

    def cpu_s(self) -> dict[str, float]:
        """User and system time of each so far."""
        return {name: sum(cpu_of(pid) for pid in pids) for name, pids in self.processes.items()}

    def parts(self) -> dict[str, dict[str, list[int]]]:
        """By process: part -> [calls, CPU ns] so far; empty where nothing is counted."""
        time.sleep(0.6)  # The counters are written several times a second.
        return {file.stem: json.loads(file.read_text()) for file in sorted(self.probe_dir.glob("*.json"))}


def cpu_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


@contextmanager
def serve(
    config: EngineConfig, scratch: Path, model: str, *, null: bool, step_ms: float, probed: bool
) -> Iterator[Service]:
    """`null`: a null engine whose steps last `step_ms`; else the model of the configuration."""
    probe_dir = scratch / "probe"
    probe_dir.mkdir(parents=True, exist_ok=True)
    repository = _repository(scratch / "repository", [model] if null else sorted({model, "tensorrt_llm"}), probed)
    server = TritonServer(
        config,
        run_dir=scratch / "run",
        model_repository=repository,
        exit_timeout_s=5,
        probe_model=None,
        extra_environment={"EVERBATCH_WAY_PROBE": str(probe_dir)} if probed else {},
    )
    server.start()
    engine = None
    try:
        if null:
            engine = _null_engine(server, config, step_ms, probe_dir if probed else None)
        server.wait_ready(START_TIMEOUT_S)
        stubs = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().decode() for pid in server.stub_pids()}
        ours = [pid for pid, line in stubs.items() if f"/{model}/" in line]
        processes = {
            "engine": [engine.pid] if engine else _engines(list(stubs)),
            "stub": ours,
            "other stubs": [pid for pid in stubs if pid not in ours],
            "tritonserver": [server.pid],
        }
        yield Service(server.grpc_url, processes, probe_dir)
    finally:
        server.stop()
        if engine is not None:
            engine.kill()
            engine.wait()


def _repository(directory: Path, models: list[str], probed: bool) -> Path:
    for name in models:
        source, target = ROOT / "model_repository" / name, directory / name
        (target / "1").mkdir(parents=True)
        (target / "config.pbtxt").symlink_to(source / "config.pbtxt")
        adapter = (source / "1" / "model.py").read_text()
        (target / "1" / "model.py").write_text(adapter.replace(LOADED, PROBED + LOADED) if probed else adapter)
    return directory


def _null_engine(
    server: TritonServer, config: EngineConfig, step_ms: float, probe_dir: Path | None
) -> subprocess.Popen[bytes]:
    """Started in place of the one that a stub would start: the stubs find that this process has claimed the engine."""
    directory = RunDirectory(server.run_dir)
    if not directory.claim("benchmarks.overhead"):
        raise SystemExit("a stub has started an engine before the benchmark could; run it again")
    command = [sys.executable, "-m", "benchmarks.overhead.null_engine", "--config", str(server.run_dir / "config.json")]
    command += ["--socket", directory.socket_path, "--step-ms", str(step_ms)]
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    if probe_dir is not None:
        variables["EVERBATCH_WAY_PROBE"] = str(probe_dir)
    return subprocess.Popen(command, stdin=subprocess.PIPE, env=variables)


def _engines(stubs: list[int]) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            is_engine = b"engine_process" in (entry / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue  # It has ended since the directory was listed.
        if parent in stubs and is_engine:
            found.append(int(entry.name))
    return found
