"""ModelServer: one Triton model in its stub process. Triton calls its `execute` and `finalize` (through model.py).

    intake       takes requests in: read, check, submit
    delivery     the pump sends the engine's responses; the poller finds clients that have left
    lifecycle    health, drain, absence of the engine; the housekeeper's thread calls `_pulse` and `_tick` here
    observe      the books: metrics, request log, traces

A stream ends when the engine has ended all its rows, or when it fails as a whole.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from functools import partial

from backend.api import EngineConfig, ErrorCode
from backend.serving.delivery.cancellation import CancellationPoller, EngineRows
from backend.serving.delivery.pump import ResponsePump
from backend.serving.intake.intake import RequestIntake
from backend.serving.lifecycle.absence import Absence
from backend.serving.lifecycle.drain import SHUTTING_DOWN, Drain
from backend.serving.lifecycle.health import StubHealth
from backend.serving.lifecycle.housekeeper import Housekeeper, end_orphan
from backend.serving.observe.books import open_books
from backend.serving.protocols import EngineClient, TritonRequest
from backend.serving.served_model import ServedModel

log = logging.getLogger("everbatch.serving")
SWITCH_INTERVAL_S = 0.0005  # After a round trip a sender waits at most this long for the interpreter's lock, not 5 ms.


class ModelServer:
    def __init__(self, model: ServedModel, executor: EngineClient, config: EngineConfig) -> None:
        """Start all threads. Call it on the main thread, because it installs the drain signal."""
        triton, dialect = config.triton, model.dialect
        self._model, self._executor = model, executor
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._books = open_books(model, executor, config)
        self._pump = ResponsePump(
            triton.sender_threads,
            EngineRows(executor),
            self._books.ended.add,
            on_refused=self._books.ended.add_refused,
            coalesce=dialect.coalesces(config),
            dialect=dialect,
        )
        self._drain = Drain(model.drain_grace_s)
        self._absence = Absence(model.away_file, config.limits.max_queue_size)
        self._intake = RequestIntake(model, executor, config, self._pump, self._absence, self._drain)
        self._health = StubHealth(
            executor,
            self._drain,
            self._absence,
            model.prepare,
            lambda: self._intake.text.is_stuck,
            lambda: self.num_live_streams,
            model.report_health,
        )
        period_s = triton.cancellation_check_period_ms / 1000
        self._poller = CancellationPoller(self._pump.live_streams, self._pump.abandon, period_s, dialect.log_name)
        self._housekeeper = Housekeeper(
            self._tick,
            triton.stats_period_ms / 1000,
            self._begin_drain,
            partial(end_orphan, executor.shutdown),
            pulse=self._pulse,
        )
        self._housekeeper.listen_for_drain()
        self._health.give_sign()
        self._poller.start()
        self._housekeeper.start()

    # ---- Triton's side, on the main thread ---------------------------------------------------------------------------

    def execute(self, requests: Iterable[TritonRequest]) -> None:
        """Take in Triton requests. Whatever is wrong with one, it is answered through its response sender; nothing is raised."""
        for request in requests:
            try:
                stream = self._pump.open(request.get_response_sender())
            except Exception:
                # Without a sender this request cannot be answered. The other requests of the call must still be taken in.
                log.exception("a request came without a response sender")
                continue
            self._intake.take(stream, request)

    def is_ready(self) -> bool:
        """True if requests are served. Triton asks models for it from release 26.03 on."""
        return self._health.state() == "ready"

    def finalize(self) -> None:
        """End the threads, and the engine if this model owns it. Triton calls it once all requests have been answered."""
        if self._model.owner:
            self._drain.wait_for_other_models(self._executor)
        self._poller.stop()
        self._housekeeper.stop()
        self._health.report_unloading()
        self._intake.close()
        self._pump.close()
        self._books.close(self._model.is_one_of_several and self._model.owner)
        self._executor.shutdown()

    @property
    def num_live_streams(self) -> int:
        return len(self._pump.live_streams())

    # ---- the housekeeper's thread ------------------------------------------------------------------------------------

    def _pulse(self) -> None:
        self._health.give_sign()
        self._intake.text.expire()
        is_ready = self._executor.is_ready()
        if (why := self._absence.look(is_ready and self._health.is_prepared)) and not is_ready:
            for stream in self._pump.live_streams():  # They have waited for an engine that does not come back.
                self._pump.fail(stream, ErrorCode.UNAVAILABLE, why)
                self._pump.stop_rows(stream)
        self._books.publish_rows()
        self._health.prepare()  # Last, because it may raise.

    def _tick(self) -> None:
        if self._drain.is_over:
            # This comes before the metrics, whose update may fail, because the streams must be ended in any case.
            for stream in self._pump.live_streams():
                self._pump.fail(stream, ErrorCode.UNAVAILABLE, SHUTTING_DOWN)
        self._books.publish_pauses(self._executor.pauses)
        self._books.publish_spans()
        if self._model.owner:
            self._books.publish_engine(self._executor.latest_stats(), self.is_ready())

    def _begin_drain(self) -> None:
        self._drain.begin(self.num_live_streams)
        self._health.give_sign()
