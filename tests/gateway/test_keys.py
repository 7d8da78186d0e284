"""API keys: the file, who is let in, and that tenants are apart."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import openai
import pytest

from gateway.keys import Keys, KeysError, namespace_of, read_keys
from tests.gateway.conftest import Served
from tests.gateway.fake_triton import FakeTriton

ALICE, BOB, NEW = "alice-key-0123456789", "bob-key-0123456789", "new-key-0123456789"
LINES = f"# tenants\n\nalice {ALICE}\nbob\t{BOB}\n"
Serve = Callable[..., AbstractContextManager[Served]]


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "keys", LINES)


def test_a_key_belongs_to_its_name(file: Path) -> None:
    keys = Keys(file)
    assert [keys.name_of(key) for key in (ALICE, BOB, "", ALICE[:-1], ALICE + "x")] == [
        "alice",
        "bob",
        None,
        None,
        None,
    ]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "holds no key"),
        ("alice\n", "line 1 of the file of API keys is not NAME KEY"),
        (f"a {ALICE} more\n", "line 1"),
        ("alice short\n", "the key in line 1 is not 16 or more ASCII characters"),
        (f"a {ALICE}\nb {ALICE}\n", "the key in line 2 belongs to another name already"),
        ("a " + "x" * (1 << 20), "more than 1048576 bytes"),
    ],
)
def test_a_file_that_is_wrong_is_refused_without_naming_a_key(text: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(KeysError, match=sentence) as caught:
        read_keys(write(tmp_path / "keys", text))
    assert ALICE not in str(caught.value) and str(tmp_path) not in str(caught.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o610, 0o666])
def test_a_file_that_others_may_use_is_refused_with_the_remedy(mode: int, file: Path) -> None:
    file.chmod(mode)
    with pytest.raises(KeysError, match=f"mode 0{mode:o}, others may use it; chmod 600 mends that"):
        read_keys(file)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path, sentence in (
        (tmp_path, "read|regular"),
        (tmp_path / "pipe", "regular"),
        (tmp_path / "no", "No such file"),
    ):
        with pytest.raises(KeysError, match=sentence):
            read_keys(path)


def test_a_changed_file_is_read_again_at_the_next_request(file: Path) -> None:
    keys = Keys(file)
    write(file, f"alice {NEW}\n")
    assert [keys.name_of(key) for key in (ALICE, NEW)] == [None, "alice"]


def test_a_change_that_cannot_be_used_is_logged_once_and_the_keys_before_stay(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = Keys(file)
    file.chmod(0o644)
    assert keys.name_of(ALICE) == keys.name_of(ALICE) == "alice"
    assert len(caplog.records) == 1 and "chmod 600" in caplog.text and ALICE not in caplog.text


def test_every_known_key_is_compared_wherever_the_right_one_stands(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    def compare(known: bytes, given: bytes) -> bool:
        compared.append(known)
        return known == given

    keys = Keys(file)
    monkeypatch.setattr("gateway.keys.hmac.compare_digest", compare)
    for key in (ALICE, BOB, "nobody"):
        compared.clear()
        keys.name_of(key)
        assert len(compared) == 2


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong-key-0123456789"},
        {"Authorization": f"Basic {ALICE}"},
        {"Authorization": ALICE},
    ],
)
def test_without_a_valid_key_everything_but_health_is_401(headers: dict[str, str], file: Path, serve: Serve) -> None:
    with serve(api_keys=file) as served:
        for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/x")):
            status, body, found = served.request(method, path, b"{" if method == "POST" else None, headers)
            assert (status, body["error"]["code"], found["www-authenticate"]) == (401, "invalid_api_key", "Bearer")
        served.wait_healthy()
        for path in ("/health", "/openapi.json"):
            assert served.request("GET", path, None, headers)[0] == 200


def test_tenants_have_namespaces_of_their_own_and_see_no_others_responses(
    file: Path, serve: Serve, triton: FakeTriton
) -> None:
    with serve(api_keys=file) as served, served.client(ALICE) as alice, served.client(BOB) as bob:
        response = alice.responses.create(model="everbatch", input="secret")
        with pytest.raises(openai.NotFoundError):
            bob.responses.retrieve(response.id)
        with pytest.raises(openai.BadRequestError):
            bob.responses.create(model="everbatch", input="x", previous_response_id=response.id)
        with pytest.raises(openai.NotFoundError):
            bob.responses.delete(response.id)
        bob.completions.create(model="everbatch", prompt="a")
        assert alice.responses.retrieve(response.id).id == response.id
    assert [seen.namespace for seen in triton.requests] == [namespace_of("alice"), namespace_of("bob")]
    assert "alice" not in namespace_of("alice") and namespace_of("alice") != namespace_of("bob")


def test_neither_a_key_nor_any_text_is_logged(
    file: Path, serve: Serve, caplog: pytest.LogCaptureFixture, triton: FakeTriton
) -> None:
    caplog.set_level(logging.DEBUG)
    with serve(api_keys=file) as served, served.client(ALICE) as client:
        client.completions.create(model="everbatch", prompt="MARKED prompt", echo=True)
        client.responses.create(model="everbatch", input="MARKED input", instructions="MARKED")
        for prompt in ("error [INTERNAL] MARKED", "late error MARKED"):
            with pytest.raises(openai.APIError):
                list(client.completions.create(model="everbatch", prompt=prompt, stream=True))
        served.request("POST", "/v1/MARKED?MARKED", {"MARKED": 1}, {"Authorization": f"Bearer {ALICE}"})
        served.request("GET", "/v1/models/MARKED", None, {"Authorization": f"Bearer {BOB}"})
        served.request("GET", "/v1/models", None, {"Authorization": "Bearer MARKED-key-0123456789"})
    ours = ("everbatch", "uvicorn", "grpc", "asyncio")  # the client of the test logs what it does as well
    lines = [record.getMessage() for record in caplog.records if record.name.startswith(ours)]
    assert len([line for line in lines if line.startswith(("POST", "GET"))]) == 7
    assert not any("MARKED" in line or ALICE in line or BOB in line or "client left" in line for line in lines)
    assert any("7 prompt and 4 completion tokens" in line for line in lines)
