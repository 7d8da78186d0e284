"""The client's namespace over both transports: a session and its KV are known to those who name the same one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from client.client import EverbatchClient
from client.conversation import Conversation
from client.errors import ClientError
from client.messages import GenerateRequest, Session, TextChunk
from deploy.triton_server import TritonServer
from tests.e2e.test_command_line import everbatch

Connect = Callable[..., EverbatchClient]
PROMPT = "import os\n" * 40  # several blocks
QUOTED = 'a "quoted" \\ name, ümläut\n'


@pytest.fixture(params=["grpc", "http"])
def connect(request: pytest.FixtureRequest, server: TritonServer) -> Connect:
    """A client of the server over one transport; the argument is `namespace`."""
    url = server.grpc_url if request.param == "grpc" else server.http_url
    return partial(EverbatchClient, url, request.param)


def turn(client: EverbatchClient, session: Session) -> TextChunk:
    """The final chunk of a turn."""
    *_, last = client.send(GenerateRequest(prompt="import os", max_tokens=2, stream=False, session=session))
    return last


@pytest.mark.parametrize("owner, stranger", [("alice", "bob"), ("alice", ""), ("", "bob"), (QUOTED, QUOTED[:-1])])
def test_a_session_of_one_namespace_is_unknown_in_another(connect: Connect, owner: str, stranger: str) -> None:
    with connect(namespace=owner) as mine, connect(namespace=stranger) as theirs:
        turn(mine, Session(9001, start=True))
        with pytest.raises(ClientError, match="session error 1"):
            turn(theirs, Session(9001))
        assert turn(mine, Session(9001, end=True)).num_cached_tokens > 0


def test_a_namespace_named_by_the_request_is_used_in_place_of_the_clients(connect: Connect) -> None:
    with connect(namespace="alice") as client, connect(namespace="bob") as bob:
        talk = Conversation(client, max_tokens=2, namespace="bob")
        list(talk.say("hello"))
        session = Session(talk._session_id)
        with pytest.raises(ClientError, match="session error 1"):
            turn(client, session)
        turn(bob, session)  # known: no error
        talk.end()
        with pytest.raises(ClientError, match="session error 1"):  # it was ended where it was begun
            turn(bob, session)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_the_command_line_reuses_a_prompt_within_its_namespace_only(server: TritonServer, protocol: str) -> None:
    url = server.grpc_url if protocol == "grpc" else server.http_url

    def statistics(namespace: str) -> str:
        done = everbatch("generate", PROMPT, "--max-tokens", "1", "--url", url, "--namespace", namespace)
        assert done.returncode == 0, done.stderr
        return done.stderr

    assert "reused 0 of" in statistics(f"{protocol} one")
    assert "reused 0 of" not in statistics(f"{protocol} one")
    assert "reused 0 of" in statistics(f"{protocol} two")
