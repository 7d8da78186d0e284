"""The `everbatch` command of an installed package: Ctrl-C waits until the command line is loaded and can answer it."""

from __future__ import annotations

import signal


def main() -> None:
    """Load the command line and run it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    from deploy import cli

    cli.main()
