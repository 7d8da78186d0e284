"""Ctrl-C at any moment of a stream over gRPC."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from client.client import EverbatchClient
from deploy import ROOT
from tests.client.servers import GrpcServer, grpc_answer, grpc_server

INTERRUPTS = 150  # Without the guard one of about 60 leaves a channel that never answers again.
PATIENCE_S = 60


def answers(server: GrpcServer) -> Iterator[Any]:
    context = server.context
    while context.is_active():
        yield grpc_answer("x")
        time.sleep(0.0005)


def test_after_ctrl_c_at_any_moment_the_same_client_goes_on() -> None:
    """In a process of its own, which a channel that hangs cannot keep."""
    script = "from tests.client.test_interrupts import main; main()"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=PATIENCE_S, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{INTERRUPTS}\n"), done.stderr


def main() -> None:
    moments = random.Random(5)
    interrupted = 0
    with grpc_server(answers, threads=16) as server, EverbatchClient(server.url) as client:
        while interrupted < INTERRUPTS:
            timer = threading.Timer(moments.uniform(0.002, 0.02), os.kill, (os.getpid(), signal.SIGINT))
            stream = client.stream("one")
            try:
                timer.start()
                for _ in stream:
                    pass
            except KeyboardInterrupt:
                interrupted += 1
            stream.close()
            assert next(client.stream("two")).text == "x"
    print(interrupted)
