"""CopyStreams: CUDA streams for copies to the device, beside the stream that computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class CopyStreams:
    """On a CPU there are none, and copies are made as they come."""

    def __init__(self, device: torch.device, count: int) -> None:
        self._device = device
        self.streams = [torch.cuda.Stream(device) for _ in range(count)] if device.type == "cuda" else []

    def begin(self) -> None:
        """Copies that follow wait for what the computing stream has been given: it may still read what they overwrite."""
        for stream in self.streams:
            stream.wait_stream(torch.cuda.current_stream(self._device))

    @contextmanager
    def stream(self, number: int) -> Iterator[None]:
        """Copies of this thread go to the stream that `number` chooses."""
        if not self.streams:
            yield
            return
        with torch.cuda.stream(self.streams[number % len(self.streams)]):
            yield

    def end(self) -> None:
        """Make all later work of the computing stream wait for the copies."""
        for stream in self.streams:
            torch.cuda.current_stream(self._device).wait_stream(stream)
