"""A Front's live requests, and the messages that replicas put into its inbox."""

from __future__ import annotations

from msgspec import Struct

from backend.api.request import Request, RequestId
from backend.api.response import Response
from backend.core.messages import NameAdapter, Resume


class Live(Struct):
    """A request that runs on a replica."""

    request_id: RequestId  # the client's
    replica: int
    num_new_tokens: int  # tokens of its prompt that the replica has to compute
    request: Request | None = None  # kept until its first response; None for a command that is no request
    lost_by: tuple[int, ...] = ()  # replicas that were lost before it began
    resume: Resume | None = None  # its state before this front's life
    movable: Request | None = None  # the request, if another replica may go on with it when its own is lost
    local_id: RequestId = RequestId(0)  # the replica's
    is_cancelled: bool = False


class Answer(Struct):
    """A replica's response, in the inbox."""

    serial: int
    response: Response


class Naming(Struct):
    """A NameAdapter command that all ready replicas have been given."""

    command: NameAdapter
    num_open: int
    error: Response | None = None


class Named(Struct):
    """One replica's answer to a NameAdapter command, in the inbox."""

    naming: Naming
    response: Response
