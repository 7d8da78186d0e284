"""What clients ask for, what came back, and whether that is what they must get.

An Order is one Triton request of one row. Its answer must be what the naive model of tests/simulation/model.py computes for it
alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from backend.api import FinishReason, Request, SamplingConfig
from tests.serving.fake_triton import TRITONSERVER_RESPONSE_COMPLETE_FINAL as FINAL
from tests.serving.fake_triton import InferenceResponse, Tensor
from tests.serving.helpers import bools, ints, strings, uint64
from tests.simulation.model import Turn, reference_output
from tests.simulation.server.threads import here
from tests.simulation.server.tokens import END_ID, text_of, tokenizer
from tests.simulation.server.world import Violation
from tests.simulation.setups import MAX_SEQ_LEN, Setup

CODES = ("INVALID_ARGUMENT", "NOT_FOUND", "UNAVAILABLE", "UNSUPPORTED", "CANCELLED", "INTERNAL")


class TritonsRefusal(Exception):
    """Raised by a response sender."""


class Sender:
    """Triton's response sender: each call is a round trip, during which others run, and which may fail or take long."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self.has_begun_final = False
        self.is_sending = False
        self.delays_s: list[float] = []
        self.num_failures = 0
        self.round_trip_s = 0.0

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        world, order = here(), self._order
        if self.is_sending:
            world.fail(f"two threads send at once to {order}")
        if order.ended_ns is not None:
            world.fail(f"something is sent after the last response of {order}")
        self.is_sending = True
        self.has_begun_final |= bool(flags & FINAL)
        world.sleep(self.round_trip_s)
        world.pause()
        if self.delays_s:
            world.reached["sender that takes long"] += 1
            world.sleep(self.delays_s.pop())
        self.is_sending = False
        if self.num_failures:
            self.num_failures -= 1
            world.reached["sender that fails"] += 1
            order.had_failures = True
            raise TritonsRefusal("planted")
        if response is not None:
            order.responses.append(response)
        if flags & FINAL:
            order.ended_ns = world.now_ns
            world.wake(order.waiters)
        world.pause()

    def is_cancelled(self) -> bool:
        world = here()
        if self.has_begun_final:
            world.fail(f"is_cancelled during or after the last response of {self._order}: Triton would crash")
        world.sleep(self.round_trip_s)
        world.pause()
        if self.has_begun_final:
            world.fail(f"is_cancelled while the last response of {self._order} is sent: Triton would crash")
        return self._order.has_left


@dataclass
class Order:
    """A request to a stub. `model`: tensorrt_llm or ensemble."""

    number: int
    model: str
    prompt: list[int]
    max_tokens: int
    streaming: bool
    seed: int = 0
    namespace: str = ""
    end_ids: tuple[int, ...] = ()
    stop: str = ""  # a stop string of a text
    timeout_s: float | None = None
    is_garbage: bool = False  # must be refused
    hangs_tokenizer: bool = False
    stops: Order | None = None  # this one only stops that one
    is_poison: bool = False  # ends each engine process that runs it
    session_id: int | None = None  # of tensorrt_llm
    before: Order | None = None  # the turn ahead of this one, which has ended as a whole
    # what happened
    received_ns: int = 0
    ended_ns: int | None = None
    has_left: bool = False  # its client is gone
    was_stopped: bool = False
    given_up_ns: int = 0  # when its client left, or sent a stop
    had_failures: bool = False  # the sender has failed
    incarnation: int = 0  # of the stub that got it
    responses: list[InferenceResponse] = field(default_factory=list)
    waiters: list[Any] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # what is due when nobody interferes
    reason: FinishReason = FinishReason.NOT_FINISHED

    def __post_init__(self) -> None:
        self.sender = Sender(self)

    def __str__(self) -> str:
        shown = {
            name: getattr(self, name)
            for name in (
                "prompt",
                "max_tokens",
                "streaming",
                "seed",
                "namespace",
                "end_ids",
                "stop",
                "timeout_s",
                "session_id",
            )
            if getattr(self, name)
        }
        flags = [
            name
            for name in ("is_poison", "is_garbage", "hangs_tokenizer", "has_left", "was_stopped")
            if getattr(self, name)
        ]
        return f"request {self.number} of {self.model} {shown} {' '.join(flags)}".rstrip()

    # ---- Triton's InferenceRequest

    def request_id(self) -> str:
        return str((self.stops or self).number)

    def timeout(self) -> int:
        return 0 if self.timeout_s is None else int(self.timeout_s * 1e6)

    def parameters(self) -> str:
        return json.dumps({"cache_salt": self.namespace} if self.namespace else {})

    def get_response_sender(self) -> Sender:
        return self.sender

    def inputs(self) -> Sequence[Tensor]:
        arrays = self._token_arrays() if self.model == "tensorrt_llm" else self._text_arrays()
        if self.stops is not None:
            arrays["stop"] = bools(True)
        return [Tensor(name, array) for name, array in arrays.items()]

    def _token_arrays(self) -> dict[str, np.ndarray]:
        ids = [1 << 20, *self.prompt] if self.is_garbage else self.prompt
        arrays = {
            "input_ids": np.array([ids], np.int32),
            "input_lengths": ints(len(ids)),
            "request_output_len": ints(self.max_tokens),
            "streaming": bools(self.streaming),
            "random_seed": uint64(self.seed),
            "exclude_input_in_output": bools(True),
        }
        if self.session_id is not None:
            is_first = self.before is None
            arrays |= {"CORRID": uint64(self.session_id), "START": ints(is_first), "END": ints(not is_first)}
        return arrays | ({"end_id": ints(self.end_ids[0])} if self.end_ids else {})

    def _text_arrays(self) -> dict[str, np.ndarray]:
        arrays = {
            "text_input": strings("" if self.is_garbage else tokenizer().decode(self.prompt)),
            "max_tokens": ints(self.max_tokens),
            "stream": bools(self.streaming),
            "random_seed": uint64(self.seed),
            "exclude_input_in_output": bools(True),
        }
        return arrays | ({"stop_words": strings(self.stop)} if self.stop else {})

    # ---- what must come back

    def work_out(self, setup: Setup) -> None:
        """Compute what is due."""
        ends = self.end_ids if self.model == "tensorrt_llm" else (END_ID,)
        request = Request(self.prompt, self.max_tokens, sampling_config=SamplingConfig(seed=self.seed), end_ids=ends)
        history = [] if self.before is None else [*self.before.prompt, *self.before.tokens]
        max_output = min(self.max_tokens, MAX_SEQ_LEN - len(history) - len(self.prompt))
        turn = Turn(request, history, self.prompt, max_output, self.seed, 0, self.namespace, 0)
        self.tokens, self.reason = reference_output(turn, setup)

    @property
    def error(self) -> str:
        last = self.responses[-1] if self.responses else None
        return "" if last is None or not last.has_error() else last.error().message()

    @property
    def code(self) -> str:
        return self.error.partition("]")[0].lstrip("[")

    def came(self, name: str) -> list[Any]:
        """All values of an output, in order."""
        answers = [response.outputs() for response in self.responses if not response.has_error()]
        return [value for outputs in answers if name in outputs for value in outputs[name].reshape(-1).tolist()]

    def check(self) -> str:
        """Judge the content. Returns how it ended: whole, part or an error's code. Raises Violation."""
        if any(response.has_error() for response in self.responses[:-1]):
            raise Violation(f"{self} goes on behind an error")
        if self.stops is not None:
            if self.error or len(self.responses) != 1:
                raise Violation(f"the answer of a stop is {self.error or self.responses}")
            return "stop"
        return self._check_tokens() if self.model == "tensorrt_llm" else self._check_text()

    def _check_tokens(self) -> str:
        came = self.came("output_ids")
        if self.has_left:  # Nobody reads it, so what came before its end may have been dropped.
            return self.code or "part"
        if came != self.tokens[: len(came)]:
            raise Violation(f"{self}: {self.tokens} was expected, {came} came")
        if self.error or self.had_failures:
            return self.code or "INTERNAL"
        if not self.streaming and len(self.responses) != 1:
            raise Violation(f"{self} does not stream, and has {len(self.responses)} responses")
        return "whole" if came == self.tokens else "part"

    def _check_text(self) -> str:
        came = b"".join(self.came("text_output")).decode()
        due, is_stopped = text_of(self.tokens, self.stop)
        reasons = [value.decode() for value in self.came("finish_reason")]
        is_whole = came == due
        if self.has_left:
            return self.code or "part"
        if not is_whole and not due.startswith(came):
            raise Violation(f"{self}: {due!r} was expected, {came!r} came")
        if self.error or self.had_failures:
            return self.code or "INTERNAL"
        if len(reasons) != 1:
            raise Violation(f"{self} has the reasons {reasons}")
        reason = "stop" if is_stopped or self.reason is FinishReason.END_ID else "length"
        if reasons[0] in ("cancelled", "timeout"):
            return "part"
        if reasons[0] != reason or not is_whole:
            raise Violation(f"{self}: {due!r} and {reason} were expected, {came!r} and {reasons[0]} came")
        return "whole"
