"""What a URL means, and what is refused instead of being taken for something else."""

from __future__ import annotations

import pytest

from client.address import Address, parse_address
from client.client import EverbatchClient


@pytest.mark.parametrize(
    ("url", "protocol", "wanted"),
    [
        (None, None, Address("grpc", "127.0.0.1", 8001, False, "127.0.0.1:8001")),
        (None, "http", Address("http", "127.0.0.1", 8000, False, "http://127.0.0.1:8000")),
        ("host:9", None, Address("grpc", "host", 9, False, "host:9")),
        ("grpc://host:9", None, Address("grpc", "host", 9, False, "host:9")),
        ("grpcs://host", None, Address("grpc", "host", 443, True, "grpcs://host")),
        ("host:9", "http", Address("http", "host", 9, False, "http://host:9")),
        ("http://host:9/", None, Address("http", "host", 9, False, "http://host:9")),
        ("https://host", "http", Address("http", "host", 443, True, "https://host")),
        ("http://[::1]:9", None, Address("http", "::1", 9, False, "http://[::1]:9")),
    ],
)
def test_the_url_says_protocol_tls_host_and_port(url: str | None, protocol: str | None, wanted: Address) -> None:
    assert parse_address(url, protocol) == wanted


def test_an_address_of_ipv6_has_brackets_for_grpc() -> None:
    assert parse_address("[::1]:9").authority == "[::1]:9"


@pytest.mark.parametrize(
    ("url", "protocol", "words"),
    [
        ("http://host", "grpc", "which is not grpc; name 'grpc://host', or no protocol"),
        ("https://host", "grpc", "name 'grpcs://host'"),
        ("grpc://host:1", "http", "name 'http://host:1'"),
        ("ftp://host", None, "HOST:PORT, grpc://, grpcs://, http:// or https:// is expected"),
        ("host:port", None, "its port is expected to be a number"),
        ("host:70000", None, "its port is expected to be a number up to 65535"),
        ("http://host/v2/models", None, "nothing behind them"),
        ("http://me:secret@host", None, "a host and a port are expected"),
        (":8001", None, "a host and a port are expected"),
        ("host", "ftp", "'ftp', grpc or http is expected"),
    ],
)
def test_what_is_no_address_is_refused_in_one_sentence(url: str, protocol: str | None, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        EverbatchClient(url, protocol)  # type: ignore[arg-type]
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(("url", "protocol", "name"), [(8001, None, "url"), (None, 1, "protocol")])
def test_what_is_no_text_is_refused_and_named(url: object, protocol: object, name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} is an int, a str is expected"):
        parse_address(url, protocol)  # type: ignore[arg-type]
