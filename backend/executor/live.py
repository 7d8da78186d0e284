"""The commands of an Executor that are no requests, and commands in flight: what their clients have had of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from backend.api.request import Request, RequestId, SessionId
from backend.api.response import Response, Result
from backend.core.messages import Cancel, Command, Look, NameAdapter, Resume, StopSession, Submit

OnResponse = Callable[[Response], None]


@dataclass(slots=True)
class ReceivedOutput:
    """One sequence of a request."""

    token_ids: list[int] = field(
        default_factory=list
    )  # that the client has had, where the request goes on from its middle
    num_tokens: int = 0  # how many it has had
    cum_log_prob: float = 0.0
    has_ended: bool = False
    num_here: int = 0  # tokens of responses of the present engine, where the request began anew
    num_before: int = 0  # num_tokens when the present engine took over


@dataclass(slots=True)
class Live:
    """A command that has not had its final response."""

    request_id: RequestId  # that its caller knows
    on_response: OnResponse
    command: Command
    accepted_s: float
    num_held_bytes: int | None = 0  # None: it is not held, because too much is
    outputs: dict[int, ReceivedOutput] = field(default_factory=dict)
    num_responses: int = 0  # that the client has had
    num_repeated: int = 0  # responses of beams that the present engine gives once more
    first_token_ns: int = 0
    cancels: list[Cancel] = field(default_factory=list)
    num_cancels_sent: int = 0  # to the present engine
    num_crashes: int = 0  # ends of engines in a row during which it was in flight
    num_lives: int = 1  # 0: it is new, and waits for its first engine
    is_held: bool = False

    @property
    def request(self) -> Request | None:
        return self.command.request if isinstance(self.command, Submit) else None

    def take_up(self, resume: Resume) -> None:
        """Another process has had it begun already."""
        for index, each in enumerate(resume.delivered):
            tokens = list(each.token_ids)
            self.outputs[index] = ReceivedOutput(tokens, len(tokens), each.cum_log_prob, each.has_ended, 0, len(tokens))
        self.num_responses, self.first_token_ns = 1, resume.first_token_ns

    def note(self, result: Result, now_ns: int) -> None:
        """The client gets a result."""
        output = self.outputs.setdefault(result.sequence_index, ReceivedOutput())
        output.has_ended = output.has_ended or result.is_sequence_final
        self.num_responses += 1
        self.first_token_ns = self.first_token_ns or now_ns
        request, tokens = self.request, result.output_token_ids[0]
        if request is None or not request.streaming:
            return
        if result.cum_log_probs:
            output.cum_log_prob = result.cum_log_probs[0]
        if request.return_all_generated_tokens:
            output.token_ids = []
        output.token_ids += tokens
        output.num_tokens = len(output.token_ids)


class Commands:
    """The commands of an Executor that are no requests. Each is answered by one final response, which goes to a callback."""

    def stop_session(self, session_id: SessionId, end: bool, on_response: OnResponse, namespace: str = "") -> RequestId:
        """Interrupt the running turn of a session, and with `end` erase the session. The answer is one final response."""
        return self._send(lambda request_id: StopSession(request_id, session_id, end, namespace), on_response)

    def name_adapter(self, name: str, directory: str | None, on_response: OnResponse) -> RequestId:
        """Let requests name the LoRA adapter in a directory below `lora.allowed_dir`; without one, let them not any more.

        The answer is one final response: an error, or an empty result once the adapter has been read.
        """
        return self._send(lambda request_id: NameAdapter(request_id, name, directory), on_response)

    def look(self, on_response: OnResponse) -> RequestId:
        """Ask what the engine does at this moment. The answer is one final response, with `Result.live_view`."""
        return self._send(Look, on_response)

    def _send(
        self, command: Callable[[RequestId], Command], on_response: OnResponse, mailbox: bool = False
    ) -> RequestId:
        """Give a command its id and send it. Raises EngineUnavailable."""
        raise NotImplementedError
