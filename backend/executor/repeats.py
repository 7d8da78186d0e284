"""Responses of requests that were run again from their beginning, without what their clients have had."""

from __future__ import annotations

from msgspec.structs import replace

from backend.api.errors import ErrorCode, SessionStatus, session_status
from backend.api.response import FinishReason, Response, Result
from backend.api.tensor import TensorData
from backend.core.messages import NameAdapter, StopSession
from backend.engine.resume import goes_on
from backend.executor.live import Live, ReceivedOutput


def without_repeats(live: Live, response: Response) -> Response | None:
    """The part of a response of a later life that the client has not had; None if it has had everything."""
    request = live.request
    if response.has_error():
        return _done_before(live, response)
    if request is None or goes_on(request):
        return response
    result = response.result
    if request.sampling_config.beam_width > 1:
        live.num_repeated -= 1
        return response if live.num_repeated < 0 or result.is_final else None
    output = live.outputs.setdefault(result.sequence_index, ReceivedOutput())
    if output.has_ended:
        return None
    if request.streaming:
        told = _tail(result, output, request.return_all_generated_tokens)
        if told is None:
            return None
        result = told
    others = [each.has_ended for index, each in live.outputs.items() if index != result.sequence_index]
    is_last = result.is_sequence_final and sum(others) + 1 == (request.sampling_config.num_return_sequences or 1)
    return replace(response, result_or_none=replace(result, is_final=is_last))


def _tail(result: Result, output: ReceivedOutput, shows_all: bool) -> Result | None:
    """A result of a stream that began anew, without the tokens and tensors that its client has had."""
    tokens = result.output_token_ids[0]
    num_new = len(tokens) - output.num_here if shows_all else len(tokens)
    num_had = max(0, min(num_new, output.num_before - output.num_here))
    output.num_here += num_new
    if num_had == num_new and not result.is_sequence_final and output.num_before:
        return None
    if not output.num_before:
        return result  # it has had nothing of this sequence
    cut = 0 if shows_all else num_had
    return replace(
        result,
        output_token_ids=[tokens[cut:]],
        log_probs=None if result.log_probs is None else [result.log_probs[0][cut:]],
        top_log_probs=None if result.top_log_probs is None else result.top_log_probs[cut:],
        generation_logits=_rows_from(result.generation_logits, num_had),
        additional_outputs=None
        if result.additional_outputs is None
        else {
            name: rows
            for name, tensor in result.additional_outputs.items()
            if (rows := _rows_from(tensor, num_had)) is not None
        },
        context_logits=None,
        additional_context_outputs=None if result.additional_context_outputs is None else {},
        prompt_log_probs=None,
        prompt_hidden_states=None,
        prompt_logits=None,
        history_token_ids=None,
    )


def _rows_from(tensor: TensorData | None, first: int) -> TensorData | None:
    """The rows of [1, rows, width] from `first` on; None if there are none."""
    if tensor is None or not first:
        return tensor
    _, rows, width = tensor.shape
    if first >= rows:
        return None
    num_bytes = len(tensor.data) // rows
    return TensorData(tensor.dtype, (1, rows - first, width), tensor.data[first * num_bytes :])


def _done_before(live: Live, response: Response) -> Response:
    """An error of a command that may have been carried out in an earlier life, whose answer was lost, is no error."""
    status = session_status(response.error_msg)
    stopped = isinstance(live.command, StopSession) and status in (SessionStatus.INVALID, SessionStatus.INACTIVE)
    is_removal = isinstance(live.command, NameAdapter) and live.command.directory is None
    if stopped or (is_removal and response.error_code is ErrorCode.NOT_FOUND):
        reasons = (FinishReason.CANCELLED,)
        result = Result([[]], is_final=True, is_sequence_final=True, finish_reasons=reasons)
        return Response(response.request_id, None, result)
    return response
