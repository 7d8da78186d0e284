"""BatchTuner: limits of the batch that follow the lengths of the latest requests.

    sequences at once   as many of the average length as the pool holds. MAX_UTILIZATION then pauses less: without it, it admits
                        whatever fits now, and has to take some of them out again when all of them have grown.
    tokens of a step    by how long prompts are beside their answers:

                            prompt / answer      share of max_num_tokens
                            2 and more           1      long prompts, and few streams that a large step would hold up
                            from 1/2 to 2        1/2
                            less                 1/4    mostly generation: short steps, so that streams flow evenly

Both only ever lower `max_batch_size` and `max_num_tokens`, and until a request has ended they leave them alone.

After TensorRT-LLM's DynamicBatchConfig, whose names these are. Its tables of sizes are made for the kernels of one GPU; the ones
above are relative to what the engine was configured for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from backend.api.config import SchedulerConfig

_CONTEXT_HEAVY = 2.0  # prompt tokens for each token of an answer
_BALANCED = 0.5


class BatchTuner:
    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._latest: deque[tuple[int, int]] = deque(maxlen=config.tuning_requests)
        self._num_prompt = 0  # tokens of all in `latest`
        self._num_output = 0

    def note_end(self, num_prompt: int, num_output: int) -> None:
        """A sequence has left the batch for good, with so many tokens."""
        if len(self._latest) == self._latest.maxlen:
            prompt, output = self._latest[0]
            self._num_prompt -= prompt
            self._num_output -= output
        self._latest.append((num_prompt, num_output))
        self._num_prompt += num_prompt
        self._num_output += num_output

    @property
    def average_tokens(self) -> int:
        """Tokens of an average sequence at its end, rounded up; 0 when none has ended yet."""
        return -(-(self._num_prompt + self._num_output) // len(self._latest)) if self._latest else 0

    def max_sequences(self, usable_blocks: int, blocks_needed: Callable[[int], int]) -> int:
        """Sequences that may run at once, at least 1; `blocks_needed`: what one of so many tokens needs of the pool."""
        limit = self._config.max_batch_size
        if not (self._config.enable_batch_size_tuning and self._latest):
            return limit
        return min(limit, max(1, usable_blocks // max(1, blocks_needed(self.average_tokens))))

    @property
    def max_num_tokens(self) -> int:
        """Tokens of one step over all rows. Never less than one for each row of the batch."""
        most = self._config.max_num_tokens
        if not (self._config.enable_max_num_tokens_tuning and self._latest):
            return most
        if self._num_prompt >= _CONTEXT_HEAVY * self._num_output:
            return most
        share = 2 if self._num_prompt >= _BALANCED * self._num_output else 4
        return max(self._config.max_batch_size, most // share)
