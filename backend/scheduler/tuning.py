"""BatchTuner: adapts the limits of the batch to the lengths of the latest requests.

    sequences at once   as many sequences of the average length as fit into the pool. MAX_UTILIZATION then pauses fewer: by
                        itself it admits whatever fits now, and preempts some when all of them have grown
    tokens of a step    by the ratio of prompt length to answer length:

                            prompt / answer      share of max_num_tokens
                            2 and more           1      long prompts, and few streams that a large step delays
                            from 1/2 to 2        1/2
                            less                 1/4    mostly generation: short steps, so that streams flow evenly

Both only lower `max_batch_size` and `max_num_tokens`, and have no effect until the first request has ended.

The names are those of TensorRT-LLM's DynamicBatchConfig. Its tables of sizes are made for the kernels of one GPU; the table
above is relative to the configured limits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from backend.api.config.schema import SchedulerConfig

_CONTEXT_HEAVY = 2.0  # prompt tokens per token of the answer
_BALANCED = 0.5


class BatchTuner:
    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._latest: deque[tuple[int, int]] = deque(maxlen=config.tuning_requests)
        self._num_prompt = 0  # prompt tokens of all requests in `latest`
        self._num_output = 0

    def note_end(self, num_prompt: int, num_output: int) -> None:
        """Note the tokens of a sequence that has ended."""
        if len(self._latest) == self._latest.maxlen:
            prompt, output = self._latest[0]
            self._num_prompt -= prompt
            self._num_output -= output
        self._latest.append((num_prompt, num_output))
        self._num_prompt += num_prompt
        self._num_output += num_output

    @property
    def average_tokens(self) -> int:
        """Mean tokens of a sequence at its end, rounded up; 0 if none has ended yet."""
        return -(-(self._num_prompt + self._num_output) // len(self._latest)) if self._latest else 0

    def max_sequences(self, usable_blocks: int, blocks_needed: Callable[[int], int]) -> int:
        """Sequences that may run at once, at least 1. `blocks_needed`: maps tokens of a sequence to blocks."""
        limit = self._config.max_batch_size
        if not (self._config.enable_batch_size_tuning and self._latest):
            return limit
        return min(limit, max(1, usable_blocks // max(1, blocks_needed(self.average_tokens))))

    @property
    def max_num_tokens(self) -> int:
        """Tokens of one step over all rows; at least one for each row of the batch."""
        most = self._config.max_num_tokens
        if not (self._config.enable_max_num_tokens_tuning and self._latest):
            return most
        if self._num_prompt >= _CONTEXT_HEAVY * self._num_output:
            return most
        share = 2 if self._num_prompt >= _BALANCED * self._num_output else 4
        return max(self._config.max_batch_size, most // share)
