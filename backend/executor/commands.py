"""The commands of an Executor that are no requests. Each is answered by one final response, which goes to a callback."""

from __future__ import annotations

from collections.abc import Callable

from backend.api.request import RequestId, SessionId
from backend.core.messages import Command, Look, NameAdapter, StopSession
from backend.executor.live import OnResponse


class Commands:
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
