"""Drives an EngineCore over the model-free worker group, one command or step at a time."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from backend.api import EngineConfig, Request, Response, SessionConfig
from backend.api.config.schema import (
    KvCacheConfig,
    KvTransferConfig,
    LimitsConfig,
    RecordsConfig,
    SchedulerConfig,
    SessionsConfig,
    SpeculationConfig,
    TritonConfig,
)
from backend.core.clock import ManualClock
from backend.core.sequence import Sequence, SessionKey
from backend.engine.core import EngineCore
from backend.engine.make_level import MakeLevelIo
from backend.engine.recorder import KvEventSink
from tests.fakes.hash_worker import HashWorkerGroup, oracle

VOCAB = 1000


class Driver:
    """Collects every response by request id, and checks the engine's integrity after each step."""

    def __init__(
        self,
        pool_tokens: int = 64,
        block_size: int = 4,
        slots: int = 4,
        policy: str = "guaranteed_no_evict",
        preemption: str = "recompute",
        max_num_tokens: int = 64,
        max_sessions: int = 100,
        max_session_bytes: int = 1 << 28,
        reuse: bool = True,
        sharing: str = "namespace",
        chunked: bool = True,
        batching: str = "fused",
        records: RecordsConfig | None = None,
        stream_interval_ms: float = 0.0,
        speculation: SpeculationConfig | None = None,
        limits: LimitsConfig | None = None,
        vocab: int = VOCAB,
        kv_events: KvEventSink | None = None,
        kv_transfer: KvTransferConfig | None = None,
        kv_cache: dict[str, Any] | None = None,
        level_io: MakeLevelIo | None = None,
        **worker: object,
    ) -> None:
        config = EngineConfig(
            kv_cache=replace(
                KvCacheConfig(
                    block_size=block_size,
                    max_tokens=pool_tokens,
                    enable_block_reuse=reuse,
                    sharing=sharing,
                    watermark=0.0,
                ),
                **(kv_cache or {}),
            ),
            scheduler=SchedulerConfig(
                max_batch_size=slots,
                max_num_tokens=max_num_tokens,
                policy=policy,
                preemption=preemption,
                batching=batching,
                enable_chunked_context=chunked,
            ),
            sessions=SessionsConfig(max_sessions, max_session_bytes, idle_ttl_s=100.0),
            records=records or RecordsConfig(),
            triton=TritonConfig(stream_interval_ms=stream_interval_ms),
            speculation=speculation or SpeculationConfig(),
            limits=limits or LimitsConfig(),
            kv_transfer=kv_transfer or KvTransferConfig(),
        )
        self.clock = ManualClock()
        self.workers = HashWorkerGroup(vocab_size=vocab, **worker)
        self.core = EngineCore(config, self.workers, self.clock, kv_events, level_io)
        self.responses: dict[int, list[Response]] = {}
        self._next_id = 1

    def ask(self, prompt: list[int], max_tokens: int, request_id: int | None = None, **fields: object) -> int:
        """Enqueue a streaming request; returns its id."""
        request_id = request_id or self._next_id
        self._next_id = max(self._next_id, request_id) + 1
        self.core.begin_poll()
        self.core.enqueue(request_id, Request(list(prompt), max_tokens, **{"streaming": True, **fields}))
        self._collect(self.core.take_responses())
        return request_id

    def turn(self, session: int, prompt: list[int], max_tokens: int, **session_fields: object) -> int:
        """Enqueue a turn of a session."""
        return self.ask(prompt, max_tokens, session=SessionConfig(session, **session_fields))

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self._collect(self.core.step())
            self.core.check_integrity()

    def run(self) -> None:
        """Step until nothing is live."""
        for _ in range(10_000):
            if not self.core.has_work:
                return
            self.step()
        raise AssertionError("the engine does not come to an end")

    def stop(self, session: int, end: bool = False, namespace: str = "") -> int:
        request_id = self._next_id
        self._next_id += 1
        self.core.stop_session(request_id, session, end, namespace)
        self._collect(self.core.take_responses())
        return request_id

    def session(self, session_id: int, namespace: str = "") -> Sequence | None:
        return self.core.sessions.get(SessionKey(namespace, session_id))

    def log(self, session_id: int) -> list[int]:
        """The token ids of a session."""
        return list(self.session(session_id).token_ids)

    def tokens(self, request_id: int) -> list[int]:
        return [t for response in self.responses[request_id] for t in response.result.output_token_ids[0]]

    def reason(self, request_id: int) -> str:
        return self.responses[request_id][-1].result.finish_reasons[0].name

    def error(self, request_id: int) -> str:
        (response,) = self.responses[request_id]
        return response.error_msg

    @property
    def used_blocks(self) -> int:
        return self.core.kv.stats().used_num_blocks

    def _collect(self, responses: list[Response]) -> None:
        for response in responses:
            self.responses.setdefault(response.request_id, []).append(response)


def answer(prompt: list[int], max_tokens: int, **options: object) -> list[int]:
    """What a request must answer, whatever happens to its KV."""
    return oracle(list(prompt), max_tokens, VOCAB, **options)
