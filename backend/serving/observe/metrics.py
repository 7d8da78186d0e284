"""MetricsPublisher: sends changed values of the metric families to Triton, which shows them on /metrics.

Each update of a value is a round trip to the server. So the housekeeper sends only the values of the engine that have changed,
and of ended requests everything at once, some times a second. docs/metrics.md lists all families.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from backend.api import EngineStats
from backend.api.stats import PauseCounts
from backend.serving.observe.ended import EndedRow
from backend.serving.observe.families import ENGINE_DIED, FINISHED, MetricFamily, engine_families
from backend.serving.protocols import FamilyHandle, MetricHandle

TOKEN_BUCKETS = [10.0, 50.0, 100.0, 500.0, 1000.0]
# The buckets of vLLM, which everbatch_* share so that both can be compared; queues and totals may be as short as a first token.
FIRST_TOKEN_BUCKETS = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0]
PER_TOKEN_BUCKETS = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5]
TOTAL_BUCKETS = [1.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0]
N_BUCKETS = [1.0, 2.0, 5.0, 10.0, 20.0]
INTER_TOKEN_BUCKETS = [0.001, 0.0025, 0.005, *PER_TOKEN_BUCKETS]
REQUEST_BUCKETS = [0.01, 0.05, 0.1, 0.5, *TOTAL_BUCKETS, 120.0, 300.0, 600.0]
PAUSE_FAMILIES = {
    "resumed_requests": "Requests of this model that went on with another engine process",
    "engine_pauses": "How often requests of this model waited for another engine process",
    "engine_pause_seconds": "Seconds for which they did",
}
SPANS = "everbatch_spans_total"
FAILED = ("error", "refused")  # the reasons of rows that answered with an error


NewFamily = Callable[[str, str, str], FamilyHandle]  # (name, description, kind) registers a family with Triton


class RowHistogram(NamedTuple):
    """A family of which each ended row that did not fail adds to."""

    name: str
    description: str
    buckets: list[float]
    read: Callable[[EndedRow], float | None]  # None adds nothing
    times: Callable[[EndedRow], int] = lambda row: 1  # how often the value is added
    label: tuple[str, str] | None = None


HISTOGRAMS = (
    RowHistogram(
        "nv_llm_input_token_len",
        "TRT LLM response metrics",
        TOKEN_BUCKETS,
        lambda row: row.num_prompt_tokens,
        label=("response_metric_type", "total_input_tokens"),
    ),
    RowHistogram(
        "nv_llm_output_token_len",
        "TRT LLM response metrics",
        TOKEN_BUCKETS,
        lambda row: row.num_output_tokens,
        label=("response_metric_type", "total_output_tokens"),
    ),
    RowHistogram(
        "everbatch_time_to_first_token_seconds",
        "From the arrival of a request at its model to its first token",
        FIRST_TOKEN_BUCKETS,
        lambda row: row.first_token_s,
    ),
    RowHistogram(
        "everbatch_inter_token_latency_seconds",
        "The mean time between two tokens of a request",
        INTER_TOKEN_BUCKETS,
        lambda row: row.inter_token_s,
    ),
    RowHistogram(
        "everbatch_request_seconds",
        "From the arrival of a request at its model to its end",
        REQUEST_BUCKETS,
        lambda row: row.total_s,
    ),
    RowHistogram(
        "everbatch_prepare_seconds",
        "Waiting for a guide to be compiled or an adapter to be read",
        FIRST_TOKEN_BUCKETS,
        lambda row: row.prepare_s,
    ),
    RowHistogram(
        "everbatch_queue_seconds",
        "Waiting in the engine for the first admission to the batch, once it was prepared",
        FIRST_TOKEN_BUCKETS,
        lambda row: row.queue_s,
    ),
)


def vllm_histograms(max_seq_len: int) -> tuple[RowHistogram, ...]:
    """vLLM's families, for a model whose sequences have at most `max_seq_len` tokens."""
    lengths = up_to(max_seq_len)
    return (
        RowHistogram(
            "vllm:time_to_first_token_seconds",
            "Histogram of time to first token in seconds.",
            FIRST_TOKEN_BUCKETS,
            lambda row: row.first_token_s,
        ),
        RowHistogram(  # its count is that of the tokens behind the first ones
            "vllm:time_per_output_token_seconds",
            "Histogram of time per output token in seconds.",
            PER_TOKEN_BUCKETS,
            lambda row: row.inter_token_s,
            times=lambda row: max(0, row.num_output_tokens - row.num_sequences),
        ),
        RowHistogram(
            "vllm:e2e_request_latency_seconds",
            "Histogram of end to end request latency in seconds.",
            TOTAL_BUCKETS,
            lambda row: row.total_s,
        ),
        RowHistogram(
            "vllm:request_prompt_tokens",
            "Number of prefill tokens processed.",
            lengths,
            lambda row: row.num_prompt_tokens,
        ),
        RowHistogram(
            "vllm:request_generation_tokens",
            "Number of generation tokens processed.",
            lengths,
            lambda row: row.num_output_tokens,
        ),
        RowHistogram(
            "vllm:request_params_n", "Histogram of the n request parameter.", N_BUCKETS, lambda row: row.num_sequences
        ),
    )


class TokenTotals(NamedTuple):
    """Two counters of the tokens of all rows, those that failed too."""

    prompt: MetricHandle
    output: MetricHandle

    def add(self, num_prompt: int, num_output: int) -> None:
        for metric, num_tokens in ((self.prompt, num_prompt), (self.output, num_output)):
            if num_tokens:
                metric.increment(float(num_tokens))


class MetricsPublisher:
    """Sends metrics to Triton. After its construction only one thread may use it."""

    def __init__(self, new_family: NewFamily, labels: dict[str, str], engine: bool, is_static: bool = False) -> None:
        """Register the families with Triton.

        `labels` name the model and its version. With `engine` the engine's families are published too, which exactly one
        model of a server does; `is_static`: whether its batches are.
        """
        self._new_family = new_family
        self._labels = labels
        self._families: list[FamilyHandle] = []  # Triton drops a family with its last reference, so they are kept here
        self._sent: dict[tuple[str, str], float] = {}
        self._metrics: dict[tuple[str, str], MetricHandle] = {}
        self._before: EngineStats | None = None  # the statistics that were published last
        self._engine_families = engine_families(is_static) if engine else ()
        for family in self._engine_families:
            handle = self._register(family.name, family.description, family.kind)
            for value in family.values:
                extra = {family.label: value} if family.label else {}
                self._metrics[family.name, value] = handle.Metric(labels={**labels, **extra})
        self._ready: MetricHandle | None = None
        if engine:
            ready = self._register("everbatch_engine_ready", "1 while the engine answers, else 0", "GAUGE")
            self._ready = ready.Metric(labels=labels)
        self._histograms = [(histogram, self._histogram(histogram)) for histogram in HISTOGRAMS]
        meaning = "Tokens of ended requests as clients know them: prompt = sent by them, output = sent to them"
        tokens = self._register("everbatch_client_tokens_total", meaning, "COUNTER")
        self._totals = [
            TokenTotals(*(tokens.Metric(labels={**labels, "kind": kind}) for kind in ("prompt", "output"))),
        ]
        self._has_vllm = False
        self._pauses = PauseCounts()
        self._pause_counters = {
            name: self._register(f"everbatch_{name}_total", meaning, "COUNTER").Metric(labels=labels)
            for name, meaning in PAUSE_FAMILIES.items()
        }

    def add_vllm(self, max_seq_len: int) -> None:
        """From now on publish vLLM's families too. Called again it changes nothing."""
        if self._has_vllm:
            return
        self._has_vllm = True
        self._histograms += [(histogram, self._histogram(histogram)) for histogram in vllm_histograms(max_seq_len)]
        self._totals.append(
            TokenTotals(
                *(
                    self._register(
                        f"vllm:{kind}_tokens_total", f"Number of {word} tokens processed.", "COUNTER"
                    ).Metric(labels=self._labels)
                    for kind, word in (("prompt", "prefill"), ("generation", "generation"))
                )
            )
        )

    def end_engine(self) -> None:
        """The engine ends, and no other one is published under these labels: gauges become 0. (Triton 24.10 may end with SIGSEGV
        where a model drops its metrics while others have the families.)
        """
        if self._ready is not None:
            self._ready.set(0.0)
        for family in self._engine_families:
            for label in family.values if family.kind == "GAUGE" else ():
                self._send(family, label, 0.0)

    def publish_engine(self, stats: EngineStats | None, ready: bool) -> None:
        """Send the values of the engine that have changed since the last call.

        Statistics of a new engine process begin at 0. Requests in flight at the death of the one before count as ended, and those
        that are resumed count as accepted once more. So accepted requests are always those that ended and those in flight.
        """
        if self._ready is not None and self._sent.get(("ready", "")) != ready:
            self._ready.set(float(ready))
            self._sent["ready", ""] = ready
        if stats is None:
            return
        if self._before is not None and stats.started_ns != self._before.started_ns:
            self._begin_anew(self._before.latest.num_active_requests)
        self._before = stats
        for family in self._engine_families:
            for label, read in family.values.items():
                self._send(family, label, float(read(stats)))

    def publish_pauses(self, counts: PauseCounts) -> None:
        """Send what has been added to the totals of this model's Executor since the last call."""
        before, self._pauses = self._pauses, counts
        new = (
            counts.resumed_requests - before.resumed_requests,
            counts.pauses - before.pauses,
            counts.paused_s - before.paused_s,
        )
        for counter, more in zip(self._pause_counters.values(), new, strict=True):
            if more > 0:
                counter.increment(float(more))

    def add_spans(self) -> None:
        """From now on publish what became of traces."""
        meaning = (
            "Spans by what became of them: sent, rejected = not taken by the collector; dropped_requests = requests of "
        )
        spans = self._register(SPANS, meaning + "which none were made, because too many waited", "COUNTER")
        for outcome in ("sent", "rejected", "dropped_requests"):
            self._metrics[SPANS, outcome] = spans.Metric(labels={**self._labels, "outcome": outcome})

    def publish_spans(self, totals: Mapping[str, int]) -> None:
        """Send what has been added to the totals since the last call."""
        for outcome, total in totals.items():
            if more := total - self._sent.get((SPANS, outcome), 0.0):
                self._metrics[SPANS, outcome].increment(float(more))
                self._sent[SPANS, outcome] = float(total)

    def publish_rows(self, rows: Iterable[EndedRow]) -> None:
        """Send what rows that have ended add to the families of this model."""
        num_prompt = num_output = 0
        try:
            for row in rows:
                num_prompt += row.num_prompt_tokens
                num_output += row.num_output_tokens
                if row.reason not in FAILED:
                    self._observe(row)
        finally:
            for totals in self._totals:
                totals.add(num_prompt, num_output)

    def _observe(self, row: EndedRow) -> None:
        for histogram, metric in self._histograms:
            value = histogram.read(row)
            if value is not None:
                for _ in range(histogram.times(row)):
                    metric.observe(float(value))

    def _begin_anew(self, num_lost: int) -> None:
        for family in self._engine_families:
            if family.kind == "COUNTER":
                self._sent.update({(family.name, label): 0.0 for label in family.values})
        if num_lost:
            self._metrics[FINISHED, ENGINE_DIED].increment(float(num_lost))

    def _send(self, family: MetricFamily, label: str, value: float) -> None:
        key = (family.name, label)
        before = self._sent.get(key)
        if value == before:
            return
        if family.kind == "GAUGE":
            self._metrics[key].set(value)
        else:
            self._metrics[key].increment(value - (before or 0.0))
        self._sent[key] = value

    def _histogram(self, histogram: RowHistogram) -> MetricHandle:
        extra = dict([histogram.label] if histogram.label else [])
        family = self._register(histogram.name, histogram.description, "HISTOGRAM")
        return family.Metric(labels={**self._labels, **extra}, buckets=histogram.buckets)

    def _register(self, name: str, description: str, kind: str) -> FamilyHandle:
        self._families.append(self._new_family(name, description, kind))
        return self._families[-1]


def up_to(greatest: int) -> list[float]:
    """1, 2, 5, 10, 20, 50 and so on, none of them above `greatest`."""
    series = (float(digit * 10**power) for power in range(len(str(greatest))) for digit in (1, 2, 5))
    return [value for value in series if value <= greatest]
