"""The shadow-KV workers of an engine process, whose steps take simulated time, fail, and hang."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from backend.core.step import MemoryUse, StepInput, StepOutput
from tests.fakes.hash_worker import HashWorkerGroup
from tests.simulation.server.threads import here, sleep
from tests.simulation.server.tokens import END_ID
from tests.simulation.server.world import Process
from tests.simulation.setups import MAX_SEQ_LEN, VOCAB

POISON = 5  # a token that no other prompt begins with


class Device:
    """What goes wrong on the device of all engine processes of a world, one after the other."""

    def __init__(self, step_s: float, looks_ahead: bool, block_size: int) -> None:
        self.step_s, self.block_size = step_s, block_size
        self.looks_ahead = looks_ahead
        self.fail_next = False
        self.is_failing = False  # a step that fails has been submitted, and not been collected yet
        self.on_poison: Callable[[], None] = lambda: None
        self.hang_next_s = 0.0
        self.num_more = 0  # how many steps of later engines are to hang as well
        self.is_busy = False  # a step that hangs uses a processor
        self.num_steps = 0
        self.hanging: Process | None = None  # the process that is in a step that hangs


class ServerWorkers(HashWorkerGroup):
    model_path = "model"

    def __init__(self, device: Device) -> None:
        super().__init__(
            *(VOCAB, MAX_SEQ_LEN),
            keep_trace=False,
            looks_ahead=device.looks_ahead,
            eos_ids=(END_ID,),
            takes_drafts=False,
            kv_block_size=device.block_size,
        )
        self.info = replace(self.info, kv_layers=0)  # the simulated machine has no mapped memory for a pool to lie in
        self._device = device
        device.is_failing = False

    def submit(self, step: StepInput) -> None:
        device = self._device
        is_lost = bool(self._in_flight) and isinstance(self._in_flight[0], Exception)  # with the step ahead of it
        if device.fail_next and not is_lost:
            device.fail_next = False
            here().reached["failed step"] += 1
            self.fail_next, device.is_failing = RuntimeError("planted"), True
        if any(row.token_ids[0] == POISON for row in step.new_rows):
            here().reached["poison"] += 1
            self._device.on_poison()
            here().exit_process(-11)
        super().submit(step)

    def collect(self) -> StepOutput:
        device = self._device
        device.num_steps += 1
        if device.hang_next_s:
            seconds = device.hang_next_s
            device.num_more -= 1
            if device.num_more < 0:
                device.hang_next_s, device.num_more = 0.0, 0
            device.hanging = here().current.process
            device.hanging.is_busy = device.is_busy
            sleep(seconds)
            device.hanging.is_busy = False
            device.hanging = None
        elif device.step_s:
            sleep(device.step_s)
        try:
            return super().collect()
        except RuntimeError:
            device.is_failing = False
            raise

    def memory_use(self) -> MemoryUse:
        return MemoryUse()
