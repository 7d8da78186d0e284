"""What a web page of another server gets, on every route that there is: nothing without keys, unless its origin is allowed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from starlette.routing import Route

from gateway.app import create_app
from gateway.browsers import fault_of
from gateway.core import Gateway
from gateway.middleware import Middleware
from gateway.settings import Settings

HERE = "127.0.0.1:9000"
KEY = "alice-key-0123456789"
EVIL = "https://evil.example"
FORM = {"Content-Type": "application/x-www-form-urlencoded", "Sec-Fetch-Site": "cross-site", "Origin": EVIL}
FOREIGN: dict[str, dict[str, str]] = {  # what browsers send for pages of another server
    "a form": FORM,
    "a script": {"Origin": EVIL, "Sec-Fetch-Site": "cross-site", "Content-Type": "text/plain"},
    "an image": {"Sec-Fetch-Site": "cross-site"},
    "another port of this machine": {"Origin": "http://127.0.0.1:3000", "Sec-Fetch-Site": "same-site"},
    "an image of another port": {"Sec-Fetch-Site": "same-site"},
    "an older browser": {"Origin": EVIL},
    "a file": {"Origin": "null"},
    "an extension": {"Origin": "chrome-extension://abc", "Sec-Fetch-Site": "none"},
    "an empty one": {"Sec-Fetch-Site": ""},
    "after DNS rebinding": {"Host": "evil.example:9000", "Sec-Fetch-Site": "same-origin"},
    "with its own name as a proxy's": {
        "Origin": "http://evil.example",
        "X-Forwarded-Host": "evil.example",
        "Sec-Fetch-Site": "cross-site",
    },
    "after DNS rebinding, as if through a proxy": {"Host": "evil.example", "X-Forwarded-Host": HERE},
    "by a name that only begins well": {"Host": "localhost.evil.example:9000"},
    "by this machine's name": {"Host": "127.0.0.1.evil.example"},
}
OWN: dict[str, dict[str, str]] = {  # what programs send, and browsers for this server's own page
    "a program": {},
    "a script of the page": {"Origin": f"http://{HERE}", "Sec-Fetch-Site": "same-origin"},
    "an older browser": {"Origin": f"http://{HERE}"},
    "the user": {"Sec-Fetch-Site": "none"},
    "by name": {"Host": "localhost:9000", "Origin": "http://localhost:9000"},
    "by its other address": {"Host": "[::1]:1", "Origin": "http://[::1]:1"},
    "in capitals": {"Host": "LOCALHOST"},
    "through a proxy": {"Host": "localhost", "X-Forwarded-Host": "pub.example", "Origin": "https://pub.example"},
}


class Found(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


def front(**values: Any) -> Middleware:
    app = create_app(Gateway(Settings(**values)))
    assert isinstance(app, Middleware)
    return app


def ask(app: Middleware, method: str, path: str, headers: dict[str, str], body: bytes = b"") -> Found:
    """The answer, of an application that is not linked to a Triton: a request that is let in ends in another status than 403."""
    given = {"host": HERE, **{name.lower(): value for name, value in headers.items()}}
    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b""}
    scope |= {"headers": [(name.encode(), value.encode()) for name, value in given.items()], "root_path": ""}
    sent: list[Any] = []
    waiting: list[Any] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        return waiting.pop() if waiting else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    found = {name.decode().lower(): value.decode() for name, value in sent[0]["headers"]}
    return Found(sent[0]["status"], found, b"".join(message.get("body", b"") for message in sent[1:]))


def routes(app: Middleware) -> list[tuple[str, str]]:
    """Every method and path, one that there is not, and the page's files left out."""
    api: Any = app._app
    known = [route for route in api.routes if isinstance(route, Route)]
    found = [(method, route.path) for route in known for method in sorted(route.methods or ())]
    shown = [(method, path.replace("{", "").replace("}", "").replace(":path", "")) for method, path in found]
    return [("GET", "/nothing"), *(each for each in shown if each[1] != "/" and not each[1].startswith("/page"))]


@pytest.fixture(scope="module")
def app() -> Middleware:
    return front()


def test_the_routes_are_all_there(app: Middleware) -> None:
    assert {("POST", "/v1/admin/models/name/unload"), ("POST", "/v1/messages"), ("GET", "/metrics")} <= {*routes(app)}
    assert len(routes(app)) > 40


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_page_of_another_server_gets_nothing_by_any_route(app: Middleware, kind: str) -> None:
    for method, path in routes(app):
        found = ask(app, method, path, FOREIGN[kind], b"{}")
        assert found.status == 403, (method, path)
        assert "access-control-allow-origin" not in found.headers and b"start" in found.body


@pytest.mark.parametrize("kind", OWN)
def test_programs_and_the_own_page_get_as_far_as_every_route(app: Middleware, kind: str) -> None:
    for method, path in routes(app):
        assert ask(app, method, path, OWN[kind], b"{}").status != 403, (method, path)


def test_a_link_of_another_server_may_lead_to_the_page_but_not_by_another_name(app: Middleware) -> None:
    followed = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert ask(app, "GET", "/", followed).status == 200
    assert ask(app, "GET", "/page/page.js", followed).status != 403
    assert ask(app, "GET", "/", {"Host": "evil.example"}).status == 403


def test_the_refusal_names_what_was_sent_and_the_remedy(app: Middleware) -> None:
    origin = json.loads(ask(app, "POST", "/v1/admin/models/a/unload", FORM).body)["error"]
    assert "'https://evil.example'" in origin["message"] and "--allow-origin" in origin["message"]
    assert (origin["code"], origin["type"]) == ("permission_denied", "permission_error")
    host = json.loads(ask(app, "POST", "/v1/messages", {"Host": "evil.example:1"}).body)
    assert host["type"] == "error" and "'evil.example'" in host["error"]["message"]
    assert "--allow-host NAME" in host["error"]["message"]
    assert len(ask(app, "GET", "/version", {"Origin": "http://" + "a" * 9999}).body) < 600


def test_names_that_were_given_are_answered_to_and_others_are_not() -> None:
    named = front(allow_hosts=("Box.lan",))
    assert ask(named, "GET", "/version", {"Host": "box.lan:9000"}).status == 200
    assert ask(named, "GET", "/version", {"Host": "other.lan"}).status == 403


def test_a_server_that_others_reach_answers_to_any_name_unless_its_names_were_given() -> None:
    outside = front(host="0.0.0.0")
    assert ask(outside, "GET", "/version", {"Host": "box.lan"}).status == 200
    assert ask(outside, "GET", "/version", {"Host": "box.lan", "Origin": "http://box.lan"}).status == 200
    assert ask(outside, "GET", "/version", {"Host": "box.lan", "Origin": EVIL}).status == 403
    named = front(host="0.0.0.0", allow_hosts=("box.lan",))
    assert ask(named, "GET", "/version", {"Host": "box.lan:1"}).status == 200
    assert ask(named, "GET", "/version", {"Host": "evil.example"}).status == 403


PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text(f"alice {KEY}\n")
    file.chmod(0o600)
    return file


def test_with_keys_a_key_decides_and_not_where_the_page_came_from(keys: Path) -> None:
    app = front(api_keys=keys)
    for headers in (FOREIGN["a script"], FOREIGN["after DNS rebinding"]):
        assert ask(app, "GET", "/v1/models", headers).status == 401
        assert ask(app, "GET", "/version", {**headers, "Authorization": f"Bearer {KEY}"}).status == 200
    refused = ask(app, "OPTIONS", "/v1/models", {"Origin": EVIL, **PREFLIGHT})
    assert refused.status == 403 and b"--allow-origin" in refused.body


@pytest.mark.parametrize("has_keys", [False, True])
def test_pages_of_an_allowed_origin_may_ask_and_read_everything(keys: Path, has_keys: bool) -> None:
    origin = "app://obsidian.md"
    app = front(allow_origins=("App://Obsidian.md",), api_keys=keys if has_keys else None)
    for _, path in routes(app):
        found = ask(app, "OPTIONS", path, {"Origin": origin, "Sec-Fetch-Site": "cross-site", **PREFLIGHT})
        assert found.status == 200 and found.headers["access-control-allow-origin"] == origin
        assert found.headers["access-control-allow-headers"] == "authorization,content-type"
        assert {"GET", "POST", "DELETE"} <= {*found.headers["access-control-allow-methods"].split(", ")}
    for key in (f"Bearer {KEY}", "Bearer none"):  # errors are readable as well
        asked = {"Origin": origin, "Sec-Fetch-Site": "cross-site", "Authorization": key}
        found = ask(app, "GET", "/version", asked)
        assert found.status == (401 if has_keys and key.endswith("none") else 200)
        assert found.headers["access-control-allow-origin"] == origin
        assert {"x-request-id", "retry-after"} <= {*found.headers["access-control-expose-headers"].split(", ")}
    assert ask(app, "OPTIONS", "/version", {"Origin": EVIL, **PREFLIGHT}).status == 403
    assert "access-control-allow-origin" not in ask(app, "GET", "/version", {"Origin": EVIL}).headers


def test_any_origin_may_be_allowed_where_keys_are_asked_for(keys: Path) -> None:
    app = front(allow_origins=("*",), api_keys=keys)
    found = ask(app, "GET", "/version", {"Origin": EVIL, "Authorization": f"Bearer {KEY}"})
    assert found.headers["access-control-allow-origin"] == "*"
    assert fault_of(("*",), (), True) is None


@pytest.mark.parametrize(
    ("origins", "hosts", "word"),
    [
        (("*",), (), "give --api-keys FILE"),
        (("null",), (), "is no origin"),
        (("https://a.example/path",), (), "without a path"),
        (("https://a.example, https://b.example",), (), "is no origin"),
        (("a.example",), (), "SCHEME://NAME"),
        ((), ("a.example:80",), "without a port"),
        ((), ("",), "is no name"),
    ],
)
def test_a_value_that_is_none_is_refused_before_anything_starts(
    origins: tuple[str, ...], hosts: tuple[str, ...], word: str
) -> None:
    fault = fault_of(origins, hosts, False)
    assert fault is not None and word in fault
    assert fault_of(("https://a.example:8443", "app://obsidian.md"), ("box.lan", "10.0.0.5", "[::2]"), False) is None
