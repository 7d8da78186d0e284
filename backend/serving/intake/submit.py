"""How the executor is asked for what a row of a request wants, and requests that go on from the middle.

A client comes back with what it has had after its server or its stub has ended: it sends the request once more, with the output
token ids of each sequence (docs/replay.md). The engine takes them up as if it had paused the request, and the row's output as if
it had sent them, so what follows is what would have followed. Limits are checked where those of all requests are
(engine/resume.py); `check_resumed` is what must be known of a request before that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from backend.api import InvalidRequest, Request, RequestId
from backend.api.limits import check_outputs_so_far
from backend.core.messages import Delivered, Resume
from backend.core.step import ModelInfo
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


def check_resumed(
    request: Request, delivered: Sequence[Delivered], model: ModelInfo, *, has_seed: bool, streaming: bool
) -> None:
    """Raise InvalidRequest for a request that cannot be the same as the one that was begun, before its output is read."""
    if not delivered:
        return
    if not streaming:
        raise InvalidRequest(
            "resume is for requests that stream; without streaming nothing has come, so send it as it was"
        )
    if not has_seed and not request.sampling_config.is_greedy:
        raise InvalidRequest(
            "resume needs the seed with which the request began; send the one that came with its answer"
        )
    check_outputs_so_far([each.token_ids for each in delivered], request, model.vocab_size, model.max_seq_len)


def resume_of(request: Request, delivered: Sequence[Delivered], request_id: str) -> Resume | None:
    """The Resume that the engine gets; None for a new request, unless it is a session's turn that a client may resume.

    `request_id`: the client's. A turn of a session is known by it, so that a turn that was recorded, while its end was lost, is
    undone before it goes on. Raises InvalidRequest for a turn without one.
    """
    if request.session is None:
        return Resume(list(delivered)) if delivered else None
    if delivered and not request_id:
        raise InvalidRequest("resume of a session's turn needs the request id with which the turn began; send it")
    return Resume(list(delivered), _turn(request, request_id)) if request_id else None


def _turn(request: Request, request_id: str) -> str:
    """The client's part of a turn's name; another prompt is another turn, even if ids are used again."""
    parts = request_id, request.cache_salt, request.session, request.input_token_ids
    return hashlib.blake2b(msgspec.msgpack.encode(parts), digest_size=8).hexdigest() + "/"
