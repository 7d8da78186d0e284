"""API keys: the file, who is let in, and that tenants are apart."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import openai
import pytest

from gateway.core import Gateway
from gateway.keys import THIS_MACHINE, Keys, KeysError, namespace_of, read_keys
from gateway.request_context import RequestContext
from gateway.settings import Settings, is_loopback
from gateway.translate import Asked
from tests.gateway.conftest import Served
from tests.gateway.fake_triton import FakeTriton

ALICE, BOB, NEW = "alice-key-0123456789", "bob-key-0123456789", "new-key-0123456789"
LINES = f"# tenants\n\nalice {ALICE}\nbob\t{BOB}\n"
Serve = Callable[..., AbstractContextManager[Served]]


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def names(keys: Keys, *given: str) -> list[str | None]:
    """Whom each key belongs to."""
    found = [keys.client_of(key) for key in given]
    return [None if client is None else client.name for client in found]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "keys", LINES)


def test_a_key_belongs_to_its_name(file: Path) -> None:
    keys = Keys(file)
    assert names(keys, ALICE, BOB, "", ALICE[:-1], ALICE + "x") == [
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


def test_a_line_may_say_what_its_key_may_do(tmp_path: Path) -> None:
    lines = f"alice {ALICE} models=everbatch,doll\nbob {BOB} metrics models=\ncarol {NEW}\n"
    alice, bob, carol = read_keys(write(tmp_path / "keys", lines)).values()
    assert (alice.models, alice.metrics) == ({"everbatch", "doll"}, False)
    assert (bob.models, bob.metrics) == (set(), True)
    assert (carol.models, carol.metrics) == (None, False)


def test_a_model_that_is_not_served_is_named_with_its_line(tmp_path: Path) -> None:
    file = write(tmp_path / "keys", f"alice {ALICE} models=everbatch\nbob {BOB} models=doll,cow\n")
    with pytest.raises(
        KeysError, match="^line 2 of the file of API keys names model 'cow', there are everbatch, doll$"
    ):
        Keys(file, ("everbatch", "doll"))
    keys = Keys(file, ("everbatch", "doll", "cow"))
    write(file, f"alice {ALICE} models=sheep\n")
    assert names(keys, ALICE, BOB) == ["alice", "bob"], "a change that cannot be used leaves the keys as they were"


@pytest.mark.parametrize("options", ["metric", "metrics metrics", "models=a models=b", "models", "metrics x"])
def test_an_unknown_option_of_a_key_is_refused(options: str, tmp_path: Path) -> None:
    with pytest.raises(KeysError, match="line 1 of the file of API keys is not NAME KEY"):
        read_keys(write(tmp_path / "keys", f"alice {ALICE} {options}\n"))


def test_a_key_with_two_different_lines_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeysError, match="the key in line 2 stands in an earlier line with other options"):
        read_keys(write(tmp_path / "keys", f"alice {ALICE}\nalice {ALICE} metrics\n"))
    assert len(read_keys(write(tmp_path / "keys", f"alice {ALICE}\nalice {ALICE}\n"))) == 1


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
    assert names(keys, ALICE, NEW) == [None, "alice"]


def test_a_change_that_cannot_be_used_is_logged_once_and_the_keys_before_stay(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = Keys(file)
    file.chmod(0o644)
    assert names(keys, ALICE, ALICE) == ["alice", "alice"]
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
        names(keys, key)
        assert len(compared) == 2


@pytest.mark.parametrize(
    ("headers", "why"),
    [
        ({}, "there is no API key"),
        ({"Authorization": "Bearer wrong-key-0123456789"}, "the API key is none of this server's"),
        ({"x-api-key": "wrong-key-0123456789"}, "the API key is none of this server's"),
        ({"Authorization": f"Basic {ALICE}"}, "there is no API key"),
        ({"Authorization": ALICE}, "there is no API key"),
    ],
)
def test_without_a_valid_key_everything_but_health_is_401(
    headers: dict[str, str], why: str, file: Path, serve: Serve
) -> None:
    with serve(api_keys=file) as served:
        for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/x")):
            status, body, found = served.request(method, path, b"{" if method == "POST" else None, headers)
            assert (status, body["error"]["code"], found["www-authenticate"]) == (401, "invalid_api_key", "Bearer")
            assert body["error"]["message"].startswith(why)
        served.wait_healthy()
        for path in ("/health", "/openapi.json"):
            assert served.request("GET", path, None, headers)[0] == 200


def keyed(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_only_a_key_for_it_reads_the_metrics(tmp_path: Path, serve: Serve) -> None:
    keys = write(tmp_path / "keys", f"alice {ALICE}\noperator {BOB} metrics\n")
    with serve(api_keys=keys) as served:
        status, body, _ = served.request("GET", "/metrics", None, keyed(ALICE))
        assert (status, body["error"]["type"], body["error"]["code"]) == (403, "permission_error", "permission_denied")
        status, text, _ = served.request("GET", "/metrics", None, keyed(BOB))
        assert status == 200 and "everbatch_gateway_requests_total" in text


def test_a_key_uses_and_sees_only_the_models_of_its_line(tmp_path: Path, serve: Serve, triton: FakeTriton) -> None:
    keys = write(tmp_path / "keys", f"alice {ALICE} models=doll\nbob {BOB}\n")
    with serve(api_keys=keys, adapters=("doll", "other")) as served:
        listed = {
            key: [card["id"] for card in served.request("GET", "/v1/models", None, keyed(key))[1]["data"]]
            for key in (ALICE, BOB)
        }
        assert listed == {ALICE: ["doll"], BOB: ["everbatch", "doll", "other"]}
        for model, status in (("doll", 200), ("other", 404), ("everbatch", 404)):
            asked = {"model": model, "prompt": "a"}
            assert served.request("POST", "/v1/completions", asked, keyed(ALICE))[0] == status
            assert served.request("GET", f"/v1/models/{model}", None, keyed(ALICE))[0] == status
            assert served.request("POST", "/v1/completions", asked, keyed(BOB))[0] == 200
    assert [seen.body.get("lora_name") for seen in triton.requests if "tokenize" not in seen.body] == [
        "doll",
        "doll",
        "other",
        None,
    ]


@pytest.mark.parametrize(
    ("host", "headers", "party"),
    [
        ("127.0.0.1", {}, THIS_MACHINE),
        ("localhost", {}, THIS_MACHINE),
        ("127.0.0.1", {"X-Forwarded-For": "10.1.2.3"}, ""),
        ("127.0.0.1", {"Forwarded": "for=10.1.2.3"}, ""),
        ("127.0.0.1", {"Via": "1.1 proxy"}, ""),
        ("127.0.0.1", {"X-Real-IP": "10.1.2.3"}, ""),
    ],
)
def test_without_keys_the_programs_of_one_machine_are_one_party_and_others_strangers(
    host: str, headers: dict[str, str], party: str, serve: Serve, triton: FakeTriton
) -> None:
    """Only one party is told what of its prompts was in the cache."""
    with serve(host=host) as served:
        body = {"model": "everbatch", "prompt": "a"}
        assert served.request("POST", "/v1/completions", body, headers)[0] == 200
    assert triton.last().namespace == party


def test_where_other_machines_can_ask_nobody_is_of_one_party() -> None:
    for host, party in (("0.0.0.0", ""), ("127.0.0.1", THIS_MACHINE)):
        (job,) = Gateway(Settings(host=host)).jobs([Asked({}, None)], RequestContext(), "everbatch")
        assert job.namespace == party


def test_with_keys_each_name_is_a_party_and_none_is_the_machines(file: Path) -> None:
    assert THIS_MACHINE not in {client.namespace for client in read_keys(file).values()}


@pytest.mark.parametrize(
    ("host", "is_private"),
    [("::1", True), ("127.8.9.1", True), ("::", False), ("192.168.0.1", False), ("example.org", False)],
)
def test_addresses_that_only_this_machine_reaches(host: str, is_private: bool) -> None:
    assert is_loopback(host) == is_private


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
