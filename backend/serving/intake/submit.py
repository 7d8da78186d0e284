"""How the executor is asked for what a row of a request wants."""

from __future__ import annotations

from backend.api import RequestId
from backend.serving.intake.resuming import resume_of
from backend.serving.protocols import EngineClient, OnResponse
from backend.serving.work import Look, NameAdapter, StopSession, Work


def submit(executor: EngineClient, work: Work, client_request_id: str, on_response: OnResponse) -> RequestId:
    """Send a row's request or command to the engine. Its responses go to the callback. Raises EverbatchError."""
    match work.request:
        case StopSession(session_id, end, namespace):
            return executor.stop_session(session_id, end, on_response, namespace=namespace)
        case NameAdapter(name, directory):
            return executor.name_adapter(name, directory, on_response)
        case Look():
            return executor.look(on_response)
        case None:
            raise AssertionError("a row without a request is answered at once")
        case request:
            return executor.submit(request, on_response, resume_of(request, work.delivered, client_request_id))
