"""Work: what one row of a Triton request asks of the engine, and the output that answers the row.

The fronts make it, `intake` submits it, `delivery` answers it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from backend.api import FinishReason, Request, Result, SessionId
from backend.core.messages import Delivered

Arrays = list[tuple[str, NDArray[Any]]]  # the named tensors of one Triton response
MANY_LOG_PROBS = 4096  # log-probabilities of one response; building it takes some ten milliseconds


class RowOutput(Protocol):
    def feed(self, result: Result) -> int | None:
        """Take in one Result.

        A returned number says that the text of its sequence has ended by itself after that many output tokens, so that the
        engine is to stop that sequence there.
        """
        ...

    def render(self) -> list[Arrays]:
        """The responses that are due."""
        ...

    @property
    def num_output_tokens(self) -> int:
        """Number of generated tokens in the responses so far and the next one."""
        ...

    @property
    def finish(self) -> FinishReason | None:
        """The finish reason that the client receives; None while the row runs, and for rows without one."""
        ...


class StopSession(NamedTuple):
    """A STOP request. It interrupts the running turn of a session of this namespace, and with `end` erases the session."""

    session_id: SessionId
    end: bool
    namespace: str = ""


class NameAdapter(NamedTuple):
    """Register the LoRA adapter of a directory under a name; without a directory, unregister the name."""

    name: str
    directory: str | None = None


class Look(NamedTuple):
    """What does the engine do at this moment?"""


class Work(NamedTuple):
    """One row, ready to be handed to the executor. Without a request the row is answered at once.

    `delivered`: of a request that another server began, what its client has had of each sequence (serving/intake/submit.py).
    """

    request: Request | StopSession | NameAdapter | Look | None
    output: RowOutput
    delivered: Sequence[Delivered] = ()

    @property
    def takes_long(self) -> bool:
        """True if a response may take long to build, as one with many log-probabilities does: of the prompt, or of a whole
        output.
        """
        if not isinstance(self.request, Request):
            return False
        sampling, output = self.request.sampling_config, self.request.output_config
        of_prompt = 0 if output.prompt_log_probs is None else 1 + output.prompt_log_probs
        if len(self.request.input_token_ids) * of_prompt > MANY_LOG_PROBS:
            return True
        if self.request.streaming:
            return False
        per_token = 1 + output.top_log_probs if output.return_log_probs else 0
        return (sampling.num_return_sequences or 1) * self.request.max_tokens * per_token > MANY_LOG_PROBS
