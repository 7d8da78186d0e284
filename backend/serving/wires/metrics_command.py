"""The command {"metrics": "NAME"} of model `everbatch`, for programs that collect metrics.

It is answered with the end of a reply (end_of_reply.py), whose `text` is a page of metrics with vLLM's names and NAME as
their `model_name` (serving/observe/vllm_page.py). The text is empty while the engine does not answer. The main thread answers
at once, so that a server that is full of requests still tells how full it is.
"""

from __future__ import annotations

from msgspec import Struct

from backend.api import InvalidRequest
from backend.serving.delivery.outputs import Answer
from backend.serving.intake.batch import Batch
from backend.serving.observe.vllm_page import vllm_page
from backend.serving.protocols import EngineClient
from backend.serving.wires.end_of_reply import EndOfReply
from backend.serving.wires.named_sampling import from_json, json_value
from backend.serving.work import Work

MAX_NAME = 256  # characters
_BEGINNING = b'{"metrics"'  # as it is written without blanks; one with them is refused like any unknown key
_MOST_BYTES = 12 * MAX_NAME + 100  # a name may be escaped


class MetricsCommand(Struct, frozen=True, forbid_unknown_fields=True):
    """`timeout_s` is what the gateway adds to whatever it sends."""

    metrics: str
    timeout_s: float | None = None


def read_metrics(batch: Batch, engine: EngineClient) -> list[Work] | None:
    """The answer; None if the request is another one. Raises InvalidRequest."""
    array = batch.array("request")
    if array is None or array.size != 1 or not bytes(array.flat[0]).startswith(_BEGINNING):
        return None
    batch.check_texts("request", 0, 1, _MOST_BYTES)
    command: MetricsCommand = from_json("request", json_value("request", batch.scalar("request", 0)), MetricsCommand)
    if len(command.metrics) > MAX_NAME:
        raise InvalidRequest(
            f"metrics has {len(command.metrics)} characters, the limit is {MAX_NAME}; use a shorter name"
        )
    hello, stats = engine.hello, engine.latest_stats()
    page = ""
    if hello is not None and stats is not None and engine.is_ready():
        page = vllm_page(stats, hello.config, hello.model.max_seq_len, command.metrics)
    return [Work(None, Answer(EndOfReply(text=page).arrays()))]
