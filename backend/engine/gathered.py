"""Results of steps other than tokens: tensors for clients and failed rows. Also the memory that such tensors may take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from backend.api.config.schema import LimitsConfig
from backend.api.errors import EverbatchError, InvalidRequest, Overloaded
from backend.api.request import Request
from backend.core.gathered import response_bytes
from backend.core.sequence import Sequence
from backend.core.step import StepOutput
from backend.engine.groups import members
from backend.engine.steps_in_flight import StepInFlight


class RowFailure(EverbatchError):
    """The logits post-processor of a request failed; only that request ends."""


def apply(flight: StepInFlight, output: StepOutput) -> Iterator[tuple[Sequence, EverbatchError]]:
    """Add the tensors of a step to their sequences. Yields the sequences whose rows failed in their post-processor or guide;
    they count as dropped from then on.
    """
    sequences = [seq for seq, _ in flight.plan.rows]
    for part in output.gathered:
        seq = sequences[part.row]
        if seq.seq_id not in flight.dropped and seq.gathered is not None:
            seq.gathered.add(part)
    for row, reason in output.failed:
        seq = sequences[row]
        if seq.seq_id not in flight.dropped:
            flight.dropped.update(member.seq_id for member in members(seq))
            yield seq, RowFailure(reason) if seq.request.logits_post_processor else InvalidRequest(reason)


def promise(
    request: Request,
    widths: dict[str, int],
    num_context: int,
    num_output: int,
    live: Iterable[Sequence],
    limits: LimitsConfig,
    count: int = 1,
) -> int:
    """An upper bound of the bytes of tensors of each of a request's `count` sequences. Raises InvalidRequest or Overloaded if a
    response, or all live requests together, would exceed their limit.
    """
    largest, each = response_bytes(request, widths, num_context, num_output)
    total = count * each
    if largest > limits.max_tensor_bytes:
        raise InvalidRequest(
            f"the tensors asked for take up to {largest} bytes of one response ({num_context} prompt tokens, {num_output} output "
            f"tokens), the limit is {limits.max_tensor_bytes} (limits.max_tensor_bytes); "
            f"{'shorten the prompt' if request.streaming else 'ask for fewer tokens, or let it stream'}"
        )
    if total > limits.max_live_tensor_bytes:
        raise InvalidRequest(
            f"the tensors asked for take up to {total} bytes, the limit of all requests together is "
            f"{limits.max_live_tensor_bytes} (limits.max_live_tensor_bytes); ask for fewer tokens"
        )
    taken = sum(seq.gathered.num_promised_bytes for seq in live if seq.gathered is not None)
    if taken + total > limits.max_live_tensor_bytes:
        raise Overloaded(
            f"the tensors asked for take up to {total} bytes, {taken} are promised to others and the limit is "
            f"{limits.max_live_tensor_bytes} (limits.max_live_tensor_bytes); try again later"
        )
    return each
