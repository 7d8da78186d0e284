"""What `--install` makes: an environment for each peer, and one for AIPerf, all under .run/bench."""

from __future__ import annotations

from benchmarks.peers import environments
from benchmarks.peers.engines import PEERS
from benchmarks.served import drive_aiperf, llamacpp
from benchmarks.served.options import INSTALLED, listed, one_of
from deploy.progress import SteppedProgress


def install(names: str, progress: SteppedProgress) -> None:
    """Install each name. Raises UserError, CommandFailed, Skipped."""
    for name in [one_of("--install", name, INSTALLED) for name in listed(names)]:
        if is_installed(name):
            progress.step(f"{name} is installed")
        elif name == "aiperf":
            drive_aiperf.install(progress)
        elif name == "llamacpp":
            llamacpp.install(progress)
        else:
            environments.python_of(PEERS[name], progress)


def is_installed(name: str) -> bool:
    """`name`: from INSTALLED."""
    if name == "aiperf":
        return drive_aiperf.is_installed()
    if name == "llamacpp":
        return llamacpp.program() is not None
    return environments.is_installed(PEERS[name])
