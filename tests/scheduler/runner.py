"""An EngineCore over shadow KV whose schedule is looked at: every step, its rows, and who ran in it."""

from __future__ import annotations

from dataclasses import dataclass

from pytest import MonkeyPatch

from backend.api import EngineConfig, OutputConfig, Request, Response
from backend.api.config.schema import KvCacheConfig, SchedulerConfig
from backend.core.clock import ManualClock
from backend.core.step import StepInput
from backend.engine.core import EngineCore
from backend.engine.intake import Intake
from backend.scheduler.plan import StepPlan
from tests.fakes.hash_worker import HashWorkerGroup, oracle

VOCAB = 1000


@dataclass
class Seen:
    """What one iteration did, by request id."""

    running: list[int]  # before the step's results were applied: those with rows in it
    num_tokens: dict[int, int]
    num_context: int
    num_generation: int


class Runner:
    def __init__(
        self,
        num_blocks: int = 16,
        block_size: int = 4,
        slots: int = 4,
        watermark: float = 0.0,
        reuse: bool = False,
        window: int | None = None,
        **scheduler: object,
    ) -> None:
        kv_cache = KvCacheConfig(
            block_size, num_blocks * block_size, watermark=watermark, enable_block_reuse=reuse, sharing="all"
        )
        scheduler = {"max_batch_size": slots, "max_num_tokens": 64, **scheduler}
        self.workers = HashWorkerGroup(VOCAB, window=window)
        self.core = EngineCore(
            EngineConfig(kv_cache=kv_cache, scheduler=SchedulerConfig(**scheduler)), self.workers, ManualClock()
        )
        self.responses: dict[int, list[Response]] = {}
        self.prompts: dict[int, tuple[list[int], int]] = {}
        self.seen: list[Seen] = []

    def ask(self, request_id: int, prompt: list[int], max_tokens: int, **fields: object) -> int:
        """Enqueue a request that answers without its prompt."""
        self.prompts[request_id] = (prompt, max_tokens)
        output = OutputConfig(exclude_input_from_output=True, return_perf_metrics=True)
        self.core.begin_poll()
        self.core.enqueue(request_id, Request(prompt, max_tokens, output_config=output, **fields))
        self._collect(self.core.take_responses())
        return request_id

    def ask_unchecked(self, request_id: int, prompt: list[int], max_tokens: int) -> int:
        """Enqueue a request that the pool may never hold, past the check that would refuse it on arrival."""
        with MonkeyPatch.context() as patch:
            patch.setattr(Intake, "_check_pool", lambda *arguments: None)
            return self.ask(request_id, prompt, max_tokens)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            scheduled = self._watch_schedule()
            self._collect(self.core.step())
            self.core.check_integrity()
            latest = self.core.latest_iteration()
            self.seen.append(Seen(list(scheduled), scheduled, latest.num_context_requests, latest.num_gen_requests))

    def run(self) -> int:
        """Step until all is done; returns the number of iterations since the beginning."""
        while self.core.has_work:
            assert len(self.seen) < 10_000, "the engine does not come to an end"
            self.step()
        return self.core.iteration

    def tokens(self, request_id: int) -> list[int]:
        return [token for response in self.responses[request_id] for token in response.result.output_token_ids[0]]

    def expected(self, request_id: int) -> list[int]:
        prompt, max_tokens = self.prompts[request_id]
        return oracle(prompt, max_tokens, VOCAB, window=self.workers.info.sliding_window)

    def assert_answers(self) -> None:
        """Every request has said what it would have said alone."""
        for request_id in self.prompts:
            assert self.tokens(request_id) == self.expected(request_id), f"request {request_id}"

    def iterations_of(self, request_id: int) -> list[int]:
        return [index for index, seen in enumerate(self.seen) if request_id in seen.running]

    @property
    def trace(self) -> list[StepInput]:
        return self.workers.trace

    def _watch_schedule(self) -> dict[int, int]:
        """Filled by the next step: request id -> tokens, in the order of the flat batch."""
        scheduled: dict[int, int] = {}
        commit = type(self.core.scheduler).commit

        def watched(plan: StepPlan, step_id: int, now_ns: int) -> StepInput:
            scheduled.update({seq.request_id: num_tokens for seq, num_tokens in plan.rows})
            return commit(self.core.scheduler, plan, step_id, now_ns)

        self.core.scheduler.commit = watched
        return scheduled

    def _collect(self, responses: list[Response]) -> None:
        for response in responses:
            self.responses.setdefault(response.request_id, []).append(response)
