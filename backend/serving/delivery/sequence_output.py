"""SequenceOutput: an OutputAccumulator that knows when the next response of its sequence is due.

Only the row's sender thread uses it. Everything that came since the last `take` shares one response:

    append(t1)  take -> t1      append(t2)  append(t3)  take -> t2 t3      append(end)  take -> the rest

The end of a sequence is always due, exactly once, even if it adds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from backend.api.tensor import TensorData
from backend.text.accumulator import OutputAccumulator, OutputDelta
from backend.text.stream import TextStream


class SequenceOutput(OutputAccumulator):
    """`accumulate`: each `take` returns the whole text so far. `every_token`: a token is due even while its text is held back (an
    incomplete character, the possible start of a stop string). See OutputAccumulator for the rest.
    """

    def __init__(
        self,
        stream: TextStream | None = None,
        *,
        streaming: bool,
        prefix: str = "",
        accumulate: bool = False,
        every_token: bool = False,
        hidden_ends: Sequence[int] = (),
    ) -> None:
        # If each token has a response, so has the token that completes a stop string.
        super().__init__(stream, prefix=prefix, hidden_ends=hidden_ends, least_kept=1 if every_token else 0)
        self._streaming = streaming
        self._every_token = every_token or stream is None
        self._accumulate = accumulate
        self._text_so_far = ""

    @property
    def is_due(self) -> bool:
        """True if a response is to be sent now. After a stop string the last text waits for the engine's end."""
        if self.has_ended:
            return not self.end_is_taken
        if not self._streaming or self.finish is not None:
            return False
        return self.has_new_text or self.prompt_log_probs is not None or (self._every_token and bool(self.ids))

    def take(self) -> OutputDelta:
        delta = super().take()
        if not self._accumulate:
            return delta
        self._text_so_far += delta.text
        return delta._replace(text=self._text_so_far)


def context_logits(delta: OutputDelta) -> NDArray[np.float32] | None:
    """[positions of the prompt, vocabulary]; None if the delta has none."""
    if not delta.with_tensors:
        return None
    return _joined([_array(result.context_logits) for result, _ in delta.with_tensors if result.context_logits])


def generation_logits(delta: OutputDelta, beam: int = 0) -> NDArray[np.float32] | None:
    """[as many as `ids`, vocabulary]; None if the delta has none. `beam`: index of the delta's beam in its Results."""
    if not delta.with_tensors:
        return None
    kept = [(result.generation_logits, num_kept) for result, num_kept in delta.with_tensors]
    return _joined([_array(logits)[beam, :num_kept] for logits, num_kept in kept if logits is not None])


def kv_state(delta: OutputDelta) -> NDArray[np.uint8] | None:
    """The bytes of the state of a prompt that was computed for another server; None if the delta has none."""
    states = [result.kv_state for result, _ in delta.with_tensors if result.kv_state is not None]
    return np.frombuffer(states[0], np.uint8) if states else None


def _array(tensor: TensorData) -> NDArray[np.float32]:
    return np.frombuffer(tensor.data, np.float32).reshape(tensor.shape)


def _joined(parts: list[NDArray[np.float32]]) -> NDArray[np.float32] | None:
    if len(parts) < 2:
        return parts[0] if parts else None
    return np.concatenate(parts)
