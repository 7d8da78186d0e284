"""MicroBatchScheduler: divides the token budget of a step (`max_num_tokens`) among its sequences.

Generation rows come first, one token each, so that running streams go on while long prompts are computed in chunks of what is
left of the budget.

    budget   |1|1|1|...|1|   chunk of A      |  chunk of B  |      FIRST_COME_FIRST_SERVED: first A, then B
             |1|1|1|...|1|   chunk of A |  chunk of B       |      EQUAL_PROGRESS: the same share for both

On a CPU a context token costs nearly the same in any step, so a large chunk gains little and delays every stream that generates.
Therefore prompts are computed in small chunks beside generation rows. When many prompts wait, more clients wait for a first token
than for a next one, so chunks grow with the number of waiting prompts, up to a limit on the delay:

    context tokens of a step  =  max_context_tokens, while no row generates; otherwise the least of
                                 max_context_tokens, max_mixed_context_tokens, mixed_context_tokens * waiting prompts

Without matrix units (AMX) a model of 135 M parameters takes about 0.7 ms for each context token, and max_mixed_context_tokens is
96. With 512 the longest gaps in a stream are three times as long at the same throughput (docs/lab/cpu-speed.md). With AMX a
context token costs a quarter of that and a small step mostly waits for weights, so 512 tokens may run: a model of 1.1 B takes
78 ms + 0.7 ms for each, so 32 prompts of 128 tokens lose 1 % of their tokens/s, where 128 tokens in every step would lose 10 %.
"""

from __future__ import annotations

from backend.api.config.schema import SchedulerConfig

CPU_CONTEXT_TOKENS = 512  # more would not make the products faster, and new requests would wait longer
CPU_MIXED_TOKENS = 128
CPU_MAX_MIXED_TOKENS = 96  # without AMX


class MicroBatchScheduler:
    def __init__(self, config: SchedulerConfig, on_cpu: bool, has_matrix_units: bool = False) -> None:
        """`has_matrix_units`: True on a CPU with AMX."""
        default, mixed = (CPU_CONTEXT_TOKENS, CPU_MIXED_TOKENS) if on_cpu else (config.max_num_tokens,) * 2
        self.max_num_tokens = config.max_num_tokens
        self.max_context_tokens = min(config.max_num_tokens, config.max_context_tokens or default)
        self.mixed_context_tokens = config.mixed_context_tokens or mixed
        little = on_cpu and not has_matrix_units
        most = max(CPU_MAX_MIXED_TOKENS, config.mixed_context_tokens or 0) if little else self.max_context_tokens
        self.max_mixed_context_tokens = config.max_mixed_context_tokens or most
        self.max_chunk_tokens = min(config.max_num_tokens, config.max_chunk_tokens or config.max_num_tokens)
        self.is_chunked = config.enable_chunked_context
        self._equal = config.chunking_policy == "equal_progress"

    @property
    def max_prompt_tokens(self) -> int | None:
        """The longest prompt that requests may have: the tokens of one step, or None if prompts are chunked.

        A sequence that is recomputed after a pause or an eviction may be longer; it is chunked in any case.
        """
        return None if self.is_chunked else self.max_num_tokens

    def context_budget(self, num_generation: int, num_waiting: int, max_num_tokens: int) -> int:
        """Context tokens of a step with `num_generation` generation rows, while `num_waiting` prompts wait. 0 only if it is full.

        `max_num_tokens`: tokens of the step over all rows, as tuned; at most the configured number.

        Without chunking the limits on context tokens do not hold: a longer prompt would never run.
        """
        budget = max_num_tokens - num_generation
        if not self.is_chunked:
            return budget
        if num_generation:
            budget = min(budget, self.max_mixed_context_tokens, self.mixed_context_tokens * max(1, num_waiting))
        return min(budget, self.max_context_tokens)

    def has_room(self, wants: list[int], budget: int, next_want: int) -> bool:
        """True if a further context row of `next_want` tokens fits beside rows of `wants` tokens."""
        if not wants:
            return budget > 0 and (self.is_chunked or min(next_want, self.max_num_tokens) <= budget)
        if self.is_chunked and self._equal:
            return len(wants) < budget
        left = budget - sum(min(want, self.max_chunk_tokens) for want in wants)
        return left > 0 and (self.is_chunked or next_want <= left)

    def cut(self, wants: list[int], budget: int) -> list[int]:
        """Divide `budget` tokens among context rows of `wants` tokens. A row gets at most its tokens, perhaps 0."""
        if self.is_chunked and self._equal:
            return self._share_equally(wants, budget)
        shares = []
        limit = self.max_chunk_tokens if self.is_chunked else self.max_num_tokens
        for want in wants:
            share = min(want, limit, budget)
            if not self.is_chunked and share < want <= self.max_num_tokens:
                share = 0  # without chunking: the whole prompt, or nothing in this step
            shares.append(share)
            budget -= share
        return shares

    def _share_equally(self, wants: list[int], budget: int) -> list[int]:
        shares = [0] * len(wants)
        open_rows = [i for i, want in enumerate(wants) if want]
        while open_rows and budget:
            each = max(1, budget // len(open_rows))
            for i in list(open_rows):
                share = min(each, min(wants[i], self.max_chunk_tokens) - shares[i], budget)
                shares[i] += share
                budget -= share
                if shares[i] == min(wants[i], self.max_chunk_tokens):
                    open_rows.remove(i)
        return shares
