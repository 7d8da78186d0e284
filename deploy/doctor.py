"""`everbatch doctor`: what this machine has and lacks. Each finding is data (name, state, what was seen, what to
do).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from backend.api.config.schema import EngineConfig, ModelConfigSection
from backend.api.errors import ConfigError
from backend.api.processes.launched import KEY_VARIABLE, key_of, launched
from deploy import IS_CHECKOUT, ROOT, capacity, default_model, invocation, libpython, text_check
from deploy.environment import hashes, is_complete
from deploy.errors import UserError
from deploy.kv_directory import look_at
from deploy.memory import available_bytes, total_bytes
from deploy.model_source import resolve_model
from deploy.packages import SERVING
from deploy.ports import Ports, check_port
from deploy.processes import descends_from, listener_on
from deploy.running import RunningServer, running

State = Literal["ok", "warn", "fail"]
SHM_WANTED = 64 << 20  # A region of a stub has 1 MB, and prompts of many MB make it grow.
MEMORY_WANTED = 2 << 30
DISK_WANTED = 1 << 30
GLIBC_WANTED = (2, 35)  # the least version that the binaries of the wheel run with


@dataclass(frozen=True)
class Finding:
    """One row of the table. `remedy` is empty when nothing needs to be done."""

    name: str
    state: State
    seen: str
    remedy: str = ""


def examine(
    host: str, ports: Ports, openai_port: int = 9000, model_name: str = "", kv_directory: str = ""
) -> list[Finding]:
    """Look at everything. Changes nothing and raises nothing that a machine could cause. A hub id is fetched as `serve` does."""
    findings = [python(), environment(), libc(), stub_library(), server(), torch_and_cuda(), gpu(), compiler()]
    findings += [cpu_kernels(), shared_memory(), memory(), disk(), model(model_name), *ranks(os.environ)]
    findings += [Finding("second level of KV", *look_at(kv_directory))] if kv_directory else []
    options = {"--http-port": ports.http, "--grpc-port": ports.grpc, "--metrics-port": ports.metrics}
    options["--openai-port"] = openai_port
    return findings + [port(host, number, option) for option, number in options.items()]


def show(findings: list[Finding], console: Console) -> int:
    """Print the table, to a terminal with its lines broken to fit. Returns 1 if something fails, else 0."""
    if console.is_terminal:
        console.print(_table(findings))
    else:
        for line in _lines(findings):
            console.print(line, soft_wrap=True, markup=False, highlight=False)
    failed = [finding.name for finding in findings if finding.state == "fail"]
    console.print(f"\n{len(failed)} problem(s): {', '.join(failed)}" if failed else "\nready to serve", highlight=False)
    return 1 if failed else 0


def _table(findings: list[Finding]) -> Table:
    colours = {"ok": "green", "warn": "yellow", "fail": "red"}
    table = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(3):
        table.add_column(overflow="fold")
    for finding in findings:
        text = escape(finding.seen) + (f"\n[dim]{escape(finding.remedy)}[/dim]" if finding.remedy else "")
        table.add_row(f"[{colours[finding.state]}]{finding.state}[/]", finding.name, text)
    return table


def _lines(findings: list[Finding]) -> Iterator[str]:
    """A line for what was seen and one for its remedy, as long as they are: for programs and files."""
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        yield f"{finding.state:4}  {finding.name:{width}}  {finding.seen}"
        if finding.remedy:
            yield f"{'':{width + 8}}{finding.remedy}"


# ---- findings --------------------------------------------------------------------------------------------------------


def python() -> Finding:
    seen = f"{platform.python_implementation()} {platform.python_version()} ({sys.prefix})"
    if sys.implementation.name == "cpython" and sys.version_info[:2] in ((3, 11), (3, 12)):
        return Finding("Python", "ok", seen)
    return Finding(
        "Python", "fail", seen, "the stub and numpy < 2 need CPython 3.11 or 3.12: apt-get install -y python3.11-venv"
    )


def environment() -> Finding:
    if not IS_CHECKOUT:
        return installed()
    venv = ROOT / ".venv"
    if Path(sys.prefix) != venv:
        return Finding(
            "environment",
            "warn",
            f"{sys.prefix}, not the launcher's own",
            "its packages are not checked; unset EVERBATCH_PYTHON",
        )
    if is_complete(venv, hashes(ROOT, SERVING)):
        return Finding("environment", "ok", str(venv))
    return Finding(
        "environment",
        "warn",
        f"{venv} does not match requirements/",
        "the next ./everbatch command brings it up to date",
    )


def installed() -> Finding:
    """The packages beside a copy that pip installed: are they the ones it asks for?"""
    try:
        asked = importlib.metadata.requires("everbatch") or []
    except importlib.metadata.PackageNotFoundError:
        return Finding("environment", "warn", f"{sys.prefix}, not pip's work", "its packages are not checked")
    wrong = [line for line in asked if ";" not in line and not _is_held(line)]
    if wrong:
        return Finding("environment", "warn", f"{sys.prefix} lacks {', '.join(wrong)}", "run pip install with these")
    return Finding("environment", "ok", f"{sys.prefix}, installed by pip")


def _is_held(requirement: str) -> bool:
    """True if `NAME[EXTRAS]==VERSION` is installed in this version; a local suffix like +cpu is fine."""
    name, _, version = requirement.partition("==")
    try:
        return importlib.metadata.version(name.split("[")[0].strip()).split("+")[0] == version
    except importlib.metadata.PackageNotFoundError:
        return False


def libc() -> Finding:
    name, version = platform.libc_ver()
    numbers = tuple(int(part) for part in version.split(".")[:2]) if version else (0, 0)
    seen = f"{name or 'unknown'} {version} on {platform.machine()}"
    if name == "glibc" and numbers >= GLIBC_WANTED and platform.machine() == "x86_64":
        return Finding("C library", "ok", seen)
    return Finding(
        "C library",
        "fail",
        seen,
        "the wheel needs x86_64 and glibc 2.35 (Debian 12, Ubuntu 22.04); use docker compose up",
    )


def stub_library() -> Finding:
    name = "libpython for the stub"
    path = libpython.find()
    if path is not None:
        return Finding(name, "ok", path)
    version = "{}.{}".format(*sys.version_info[:2])
    return Finding(
        name, "fail", f"{libpython.library_name()} not found", f"run as root: apt-get install -y libpython{version}"
    )


def server() -> Finding:
    try:
        installation = invocation.find_installation()
    except UserError as error:
        return Finding("tritonserver", "fail", "not found", str(error))
    if installation.wheel is None:
        return Finding("tritonserver", "ok", str(installation.binary))
    version = importlib.metadata.version("nvidia-pytriton")
    return Finding("tritonserver", "ok", f"{installation.binary} (nvidia-pytriton {version}, Triton 24.10)")


def torch_and_cuda() -> Finding:
    """torch is asked in a process of its own: importing it takes a second, and a broken build may take the process
    down.
    """
    if importlib.util.find_spec("torch") is None:
        return Finding(
            "torch", "fail", "not installed", "remove .venv/everbatch.json and start again: the environment is repaired"
        )
    code = (
        "import torch;c=torch.cuda;print(torch.__version__, c.get_device_name(0) if c.is_available() else '', sep='|')"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    if result.returncode != 0:
        reason = (result.stderr.strip().splitlines() or ["no reason given"])[-1]
        return Finding("torch", "fail", reason, "remove .venv and start again: the environment is made anew")
    version, _, device = result.stdout.strip().splitlines()[-1].partition("|")
    if not device and shutil.which("nvidia-smi"):
        return Finding(
            "torch", "warn", f"{version} does not see the GPU", "install a CUDA build of this torch version into .venv"
        )
    return Finding("torch", "ok", f"{version}, CUDA on {device}" if device else f"{version}, on the CPU")


def gpu() -> Finding:
    """The GPUs that the driver sees, whether or not torch can use them."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return Finding("CUDA", "ok", "no NVIDIA driver: the engine runs on the CPU")
    query = [tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    result = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    if result.returncode != 0:
        return Finding(
            "CUDA", "warn", f"nvidia-smi failed with status {result.returncode}", "look at the driver: nvidia-smi"
        )
    return Finding("CUDA", "ok", "; ".join(result.stdout.strip().splitlines()) or "no GPU visible")


def compiler() -> Finding:
    for name in ("g++", "c++", "clang++"):
        if path := shutil.which(name):
            return Finding("compiler", "ok", path)
    return Finding(
        "compiler", "warn", "no C++ compiler", "native CPU kernels are not built without one: apt-get install -y g++"
    )


def cpu_kernels() -> Finding:
    """The choices of the native kernels for this machine, asked in a process of their own, for nothing here imports them."""
    command = [sys.executable, "-m", "kernels.cpu.choices"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    lines = (result.stderr if result.returncode else result.stdout).strip().splitlines() or ["no reason given"]
    if result.returncode:
        return Finding(
            "CPU kernels", "fail", lines[-1], "unset EVERBATCH_ISA and EVERBATCH_CHOICES, or name what there is"
        )
    return Finding("CPU kernels", "ok", lines[-1])


def shared_memory() -> Finding:
    if not Path("/dev/shm").is_dir():
        return Finding("/dev/shm", "fail", "there is none", "mount a tmpfs there; in a container use --shm-size=1g")
    usage = shutil.disk_usage("/dev/shm")
    seen = f"{_size(usage.free)} free of {_size(usage.total)}"
    if usage.free >= SHM_WANTED:
        return Finding("/dev/shm", "ok", seen)
    remedy = (
        f"{_size(SHM_WANTED)} are wanted; in a container use --shm-size=1g, else: mount -o remount,size=1g /dev/shm"
    )
    return Finding("/dev/shm", "warn" if usage.free >= 4 << 20 else "fail", seen, remedy)


def memory() -> Finding:
    available = available_bytes()
    seen = f"{_size(available)} available of {_size(total_bytes())}, {os.cpu_count()} processors"
    if available >= MEMORY_WANTED:
        return Finding("memory", "ok", seen)
    return Finding(
        "memory",
        "warn",
        seen,
        f"{_size(MEMORY_WANTED)} are wanted; make the pool smaller with --set kv_cache.max_tokens=N",
    )


def disk() -> Finding:
    free = shutil.disk_usage(ROOT).free
    if free >= DISK_WANTED:
        return Finding("disk", "ok", f"{_size(free)} free under {ROOT}")
    return Finding(
        "disk", "warn", f"{_size(free)} free under {ROOT}", f"logs and run files need up to {_size(DISK_WANTED)}"
    )


def model(name: str = "") -> Finding:
    """Findings about a model: if it is supported, its size, how much of its KV fits into memory, its tokenizer and template."""
    title, remedy = (f"model {name}", "") if name else ("default model", "give one with --model PATH_OR_HUB_ID")
    try:
        path = resolve_model(name or default_model.at_hand())
        config = EngineConfig(model=ModelConfigSection(path=str(path)))
        described = capacity.described(capacity.examined(config), config)
        if wrong := text_check.wrong_with(path):
            return Finding(title, "fail" if name else "warn", f"model {path}: {wrong}", remedy)
        return Finding(title, "ok", f"{path}: {described}")
    except UserError as error:
        return Finding(title, "fail" if name else "warn", str(error), remedy)


def port(host: str, number: int, option: str) -> Finding:
    try:
        check_port(host, number, option)
    except UserError as error:
        if (server := _server_on(number)) is not None:
            seen = f"used by the server that was started from here: {server.model} at {server.http_url}"
            return Finding(f"port {number}", "warn", seen, f"a second server needs another one: {option} PORT")
        return Finding(f"port {number}", "fail", "taken", str(error))
    return Finding(f"port {number}", "ok", "free")


def _server_on(port: int) -> RunningServer | None:
    """The server of this checkout that listens on the port."""
    holder = listener_on(port)
    return None if holder is None else next((each for each in running() if descends_from(holder, each.pid)), None)


def _size(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.0f} MiB"


def ranks(environment: Mapping[str, str]) -> list[Finding]:
    """Look at the variables for ranks on several machines. Without any of them there are no findings."""
    findings = []
    name = "ranks on several machines"
    try:
        found = launched(environment)
    except ConfigError as error:
        return [Finding(name, "fail", *error.message.split("; ", 1))]
    if found is not None:
        seen = f"this process is rank {found.rank} of {found.num_ranks}; rank 0 is at {found.address}"
        findings.append(Finding(name, "ok", seen))
    if found is None and KEY_VARIABLE not in environment:
        return []
    try:
        key_of(environment)
    except ConfigError as error:
        return [*findings, Finding("their key", "fail", *error.message.split("; ", 1))]
    return [*findings, Finding("their key", "ok", f"{KEY_VARIABLE} is set; it must be the same on every machine")]
