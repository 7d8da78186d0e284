"""`everbatch serve` as it is typed, with the OpenAI endpoint beside Triton's ports."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import openai
import pytest

from tests.e2e.launched import Launched, launched
from tests.e2e.wire import eventually

KEY = "alice-key-0123456789"
ASK = {"model": "everbatch", "prompt": "def main(", "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.touch(0o600)
    keys.write_text(f"alice {KEY}\n")
    with launched(f"--api-keys={keys}") as found:
        yield found


def ask(served: Launched, key: str = KEY) -> str:
    with openai.OpenAI(base_url=served.url, api_key=key, max_retries=0) as client:
        return client.completions.create(**ASK).choices[0].text


def test_the_endpoint_is_on_the_banner_and_answers_those_with_a_key(served: Launched) -> None:
    assert f"OpenAI   {served.url}" in served.said
    assert f"page     {served.url.removesuffix('/v1')}\n" in served.said
    assert ask(served)
    with pytest.raises(openai.AuthenticationError):
        ask(served, "a-key-of-nobody-0123")


def test_an_endpoint_that_is_killed_comes_back(served: Launched) -> None:
    before = ask(served)
    first = served.pid_of(b"gateway")
    assert first is not None
    os.kill(first, signal.SIGKILL)
    assert eventually(lambda: served.pid_of(b"gateway") not in (None, first), 60)

    def answers() -> bool:
        try:
            return ask(served) == before
        except openai.APIError:  # It does not listen yet.
            return False

    assert eventually(answers, 60)


def test_sigterm_ends_the_endpoint_with_the_server(served: Launched) -> None:
    assert served.children()
    served.process.send_signal(signal.SIGTERM)
    said, _ = served.process.communicate(timeout=60)
    assert served.process.returncode == 0 and "stopped; no process of it is left" in said
    assert "the OpenAI endpoint was ended by signal 9 (SIGKILL); starting it again" in said
    assert not served.children()
