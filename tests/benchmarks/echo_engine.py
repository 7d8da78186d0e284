"""A runner whose engine delivers the prompt's tokens over again: for tests of the protocol and of the controller."""

from __future__ import annotations

import os
import signal
import sys

from benchmarks.peers.protocol import Load, Stopwatch, Timing, serve


class Echo:
    note = ""

    def __init__(self, load: Load) -> None:
        print("noise on standard output")

    def measure(self, prompts: list[list[int]], new: int) -> Timing:
        if new == 13:
            raise RuntimeError("13 tokens are unlucky")
        if new == signal.SIGSEGV:
            print("going down", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGSEGV)
        watch = Stopwatch(len(prompts))
        for _ in range(new):
            for request in range(len(prompts)):
                watch.add(request, 1)
        return watch.timing(new)


if __name__ == "__main__":
    serve(Echo, ["pytest"])
