"""Images fetched from a server of this machine, whose address only these tests allow."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import GatewayError
from gateway.image_fetch import MOST_REDIRECTS, ImageFetcher
from gateway.image_hosts import is_public
from gateway.images import Picture
from tests.gateway.conftest import serving
from tests.gateway.fake_triton import FakeTriton
from tests.gateway.pictures import IN_BASE64, OTHER, PNG, image_server, send

LIMIT = 1 << 20
TLS = Path(__file__).parents[1] / "client" / "tls"
Get = Callable[[BaseHTTPRequestHandler], None]


def anything(address: str) -> bool:
    return True


def fetch(
    urls: list[str],
    hosts: tuple[str, ...],
    allowed: Callable[[str], bool] = anything,
    limit: int = LIMIT,
    together: int = 4 * LIMIT,
    timeout_s: float = 60.0,
    tls: Any = True,
) -> list[bytes]:
    async def run() -> list[bytes]:
        fetcher = ImageFetcher(hosts, timeout_s, allowed, tls)
        try:
            return await fetcher.fetched([Picture(f"p{i}", url) for i, url in enumerate(urls)], limit, together)
        finally:
            await fetcher.close()

    return asyncio.run(run())


def fault(*arguments: Any, **more: Any) -> str:
    with pytest.raises(GatewayError) as caught:
        fetch(*arguments, **more)
    assert caught.value.status == 400 and "\n" not in caught.value.message and len(caught.value.message) < 400
    return caught.value.message


def test_images_come_in_their_order_and_one_url_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the environment is used, and no cookie is kept."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")

    def answers(handler: BaseHTTPRequestHandler) -> None:
        send(handler, OTHER if "other" in handler.path else PNG, "image/png; x=y", Set_Cookie="a=b")

    with image_server(answers) as server:
        base, hosts = f"http://localhost:{server.port}", (f"localhost:{server.port}",)
        assert fetch([f"{base}/a", f"{base}/other?x=%20y", f"{base}/a"], hosts) == [PNG, OTHER, PNG]
        assert sorted(path for path, _ in server.asked) == ["/a", "/other?x=%20y"]
        assert fetch([f"http://127.0.0.1:{server.port}//b.test/c"], (f"127.0.0.1:{server.port}",)) == [PNG]
        assert server.asked[-1][0].endswith("/b.test/c"), "a path is no host"
        for _, headers in server.asked:
            assert headers["host"] in (f"localhost:{server.port}", f"127.0.0.1:{server.port}")
            assert not headers.keys() & {"cookie", "authorization", "referer", "proxy-authorization"}
            assert headers["accept-encoding"] == "identity"


def test_an_address_that_is_not_public_is_not_asked() -> None:
    with image_server(send) as server:
        for host in ("localhost", "127.0.0.1", "127.1", "2130706433", "0x7f000001", "0"):
            said = fault([f"http://{host}:{server.port}/"], (f"{host}:{server.port}",), is_public)
            assert f"{host} has no address of the internet" in said, said
        assert "::1 has no address of the internet" in fault(
            [f"http://[::1]:{server.port}/"], (f"[::1]:{server.port}",), is_public
        )
        assert server.asked == []


def test_the_address_that_was_looked_at_is_the_one_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that means another address each time it is looked up: the second answer is never needed."""
    looked: list[str] = []

    async def rebinding(self: Any, host: str, port: int, **more: Any) -> list[Any]:
        looked.append(host)
        address = "127.0.0.1" if len(looked) == 1 else "127.0.0.2"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", rebinding)
    seen: list[str] = []

    def allowed(address: str) -> bool:
        seen.append(address)
        return address == "127.0.0.1"

    with image_server(send) as server:
        hosts = (f"img.example.org:{server.port}",)
        assert fetch([f"http://img.example.org:{server.port}/a"], hosts, allowed) == [PNG]
        assert (looked, seen) == (["img.example.org"], ["127.0.0.1"])
        assert server.asked[-1][1]["host"] == f"img.example.org:{server.port}"
        said = fault([f"http://img.example.org:{server.port}/a"], hosts, allowed)
        assert "no address of the internet" in said and len(server.asked) == 1


def test_one_bad_address_among_several_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    async def several(self: Any, host: str, port: int, **more: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in ("8.8.8.8", "10.0.0.1")]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", several)
    assert "no address of the internet" in fault(["http://a.example/"], ("a.example",), is_public)


def test_redirects_are_followed_and_each_is_looked_at() -> None:
    def answers(handler: BaseHTTPRequestHandler) -> None:
        count = int(handler.path.strip("/"))
        send(handler) if count == 0 else send(handler, b"", status=302, Location=f"/{count - 1}")

    with image_server(answers) as server:
        base, hosts = f"http://127.0.0.1:{server.port}", (f"127.0.0.1:{server.port}",)
        assert fetch([f"{base}/{MOST_REDIRECTS}"], hosts) == [PNG]
        said = fault([f"{base}/{MOST_REDIRECTS + 1}"], hosts)
        assert f"leads to more than {MOST_REDIRECTS} other URLs, the limit" in said


@pytest.mark.parametrize(
    ("location", "said"),
    [
        ("/", "leads to more than 3 other URLs"),  # to itself
        ("http://example.org/", "is not fetched, because example.org is no host of --allow-image-hosts"),
        ("http://169.254.169.254/latest/meta-data/", "because 169.254.169.254 is no host"),
        ("file:///etc/passwd", "has the scheme 'file'"),
        ("http://user:pw@127.0.0.1/", "holds a user or a password"),
        ("http://other.test:PORT/", "other.test has no address of the internet"),
    ],
)
def test_a_redirect_leads_nowhere_else(location: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def found(self: Any, host: str, port: int, **more: Any) -> list[Any]:
        address = "127.0.0.2" if host == "other.test" else "127.0.0.1"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", found)
    port = 0

    def answers(handler: BaseHTTPRequestHandler) -> None:
        send(handler, b"", status=301, Location=location.replace("PORT", str(port)))

    with image_server(answers) as server:
        port = server.port
        hosts = (f"first.test:{port}", f"other.test:{port}")
        assert said in fault([f"http://first.test:{port}/"], hosts, lambda address: address == "127.0.0.1")
        assert {path for path, _ in server.asked} == {"/"}


def with_type(kind: str, **headers: str) -> Get:
    return lambda handler: send(handler, PNG, kind, **headers)


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        (lambda handler: send(handler, status=404), "answers 404; check the URL"),
        (lambda handler: send(handler, status=206), "answers 206"),
        (lambda handler: send(handler, b"", status=302), "answers 302"),
        (lambda handler: send(handler, b"", status=302, Location=""), "answers 302"),
        (with_type("text/html"), "with the type 'text/html', which is no image"),
        (with_type("application/octet-stream"), "which is no image"),
        (with_type("image/png", Content_Encoding="gzip"), "a compressed body"),
        (lambda handler: send(handler, b"<svg/>", "image/svg+xml"), "is none of the formats"),
        (lambda handler: send(handler, b""), "is empty"),
        (lambda handler: send(handler, PNG.ljust(2000, b"\0")), "has more than 1000 bytes, the limit"),
        (lambda handler: send(handler, b"3e8\r\n" + PNG.ljust(1000) + b"\r\n1\r\nx\r\n0\r\n\r\n",
                              Transfer_Encoding="chunked"), "has more than 1000 bytes, the limit"),
        (lambda handler: send(handler, b"zz\r\n", Transfer_Encoding="chunked"), "no image comes from 127.0.0.1"),
        (lambda handler: handler.wfile.write(b"\0" * 100), "no image comes from 127.0.0.1"),
        (lambda handler: handler.wfile.write(b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 100_000), "no image comes from"),
        (lambda handler: handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nContent-Length: 9\r\n\r\n"),
         "no image comes from"),
    ],
)  # fmt: skip
def test_an_answer_that_is_no_image_is_a_sentence(answers: Get, said: str) -> None:
    def answered(handler: BaseHTTPRequestHandler) -> None:
        handler.close_connection = True
        answers(handler)

    with image_server(answered) as server:
        message = fault([f"http://127.0.0.1:{server.port}/a.png"], (f"127.0.0.1:{server.port}",), limit=1000)
        assert said in message and message.startswith("the image at p0"), message


def test_all_images_together_have_a_limit() -> None:
    with image_server(lambda handler: send(handler, PNG.ljust(900, b"\0"))) as server:
        urls = [f"http://127.0.0.1:{server.port}/{i}" for i in range(4)]
        said = fault(urls, (f"127.0.0.1:{server.port}",), limit=1000, together=3000)
        assert "all images of this request together has more than 3000 bytes" in said or "together" in said


def test_a_server_that_drips_is_left_in_time() -> None:
    def drips(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nContent-Length: 100000\r\n\r\n")
        try:
            for _ in range(100):
                handler.wfile.write(b"x")
                time.sleep(0.05)
        except OSError:
            return

    with image_server(drips) as server:
        began = time.monotonic()
        said = fault([f"http://127.0.0.1:{server.port}/"], (f"127.0.0.1:{server.port}",), timeout_s=0.3)
        assert "did not arrive within 0.3 s, the limit" in said and time.monotonic() - began < 4


def test_a_host_that_does_not_answer_or_is_not_there_is_a_sentence() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        said = fault([f"http://127.0.0.1:{port}/"], (f"127.0.0.1:{port}",))
    assert "no image comes from 127.0.0.1; check the URL, or send a data: URL" in said
    assert "no image comes from absent.invalid" in fault(["http://absent.invalid/"], ("absent.invalid",))


def test_one_refused_url_keeps_all_from_being_asked() -> None:
    with image_server(send) as server:
        urls = [f"http://127.0.0.1:{server.port}/", "http://example.org/"]
        assert "example.org is no host" in fault(urls, (f"127.0.0.1:{server.port}",))
        assert server.asked == []


def test_a_certificate_is_verified_by_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    async def here(self: Any, host: str, port: int, **more: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", here)
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(TLS / "certificate.pem", TLS / "key.pem")
    trusting = ssl.create_default_context(cafile=str(TLS / "certificate.pem"))
    with image_server(send, server_side) as server:
        hosts = (f"localhost:{server.port}", f"other.test:{server.port}")
        assert fetch([f"https://localhost:{server.port}/"], hosts, tls=trusting) == [PNG]
        assert "no image comes from localhost" in fault([f"https://localhost:{server.port}/"], hosts)
        assert "no image comes from other.test" in fault([f"https://other.test:{server.port}/"], hosts, tls=trusting)
        assert len(server.asked) == 1


def test_the_gateway_fetches_for_a_model_that_takes_images(
    shared_triton: FakeTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton = shared_triton
    monkeypatch.setattr(triton, "takes_images", True)
    with image_server(send) as server:
        hosts = (f"127.0.0.1:{server.port}",)
        with serving(triton.url, allow_image_hosts=hosts) as served:
            served.wait_healthy()
            part = {"type": "image_url", "image_url": {"url": f"http://127.0.0.1:{server.port}/a.png"}}
            body = {"model": "everbatch", "messages": [{"role": "user", "content": [part, part]}]}
            status, answer, _ = served.request("POST", "/v1/chat/completions", body)
            assert status == 400 and "has no address of the internet" in answer["error"]["message"]
            assert answer["error"]["param"] == "messages[0].content[0].image_url"
            assert answer["error"]["code"] == "invalid_image_url" and server.asked == []
            monkeypatch.setattr(served.gateway.images._fetcher, "_is_allowed", anything)
            block = {"type": "image", "source": {"type": "url", "url": f"http://127.0.0.1:{server.port}/b.png"}}
            turns = [{"role": "user", "content": [block]}]
            counted = served.request("POST", "/v1/messages/count_tokens", {"model": "everbatch", "messages": turns})[1]
            assert counted == {"input_tokens": 8} and triton.last().body["images"] == [IN_BASE64]
