"""Settings of a client: address, model, API key and namespace, and timeouts."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from pathlib import Path

from client.address import Address, parse_address
from client.checks import check_api_key, check_namespace, check_timeout, check_type, kind_of
from client.retry import Retry

API_KEY_VARIABLE = "EVERBATCH_API_KEY"
DEFAULT_MODEL = "ensemble"
DEFAULT_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Settings:
    """Checked already: see make_settings."""

    address: Address
    model: str
    namespace: str
    api_key: str
    timeout_s: float
    retry: Retry
    ca_pem: bytes | None  # certificates to trust in place of the system's

    @property
    def metadata(self) -> list[tuple[str, str]]:
        """The key as gRPC carries it."""
        return [("authorization", f"Bearer {self.api_key}")] if self.api_key else []

    def ssl_context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cadata=None if self.ca_pem is None else self.ca_pem.decode())


def make_settings(
    url: str | None,
    protocol: str | None,
    model: str,
    namespace: str,
    api_key: str | None,
    *,
    timeout_s: float,
    retry: Retry | None,
    ca_file: str | os.PathLike[str] | None,
) -> Settings:
    """Raises TypeError and ValueError that name the argument. The environment has a key where none is given."""
    check_type("model", model, str, "a str")
    if not model:
        raise ValueError("model is empty, the name of a model of the server is expected")
    check_namespace(namespace)
    key = os.environ.get(API_KEY_VARIABLE, "") if api_key is None else api_key
    check_api_key(key)
    check_timeout(timeout_s)
    chosen = Retry() if retry is None else retry
    check_type("retry", chosen, Retry, "a Retry")
    address = parse_address(url, protocol)
    if ca_file is not None and not address.tls:
        raise ValueError(f"ca_file is given, and {address.url} speaks no TLS; name it with https:// or grpcs://")
    pem = None if ca_file is None else _read_certificates(ca_file)
    return Settings(address, model, namespace, key, float(timeout_s), chosen, pem)


def _read_certificates(ca_file: str | os.PathLike[str]) -> bytes:
    if not isinstance(ca_file, str | os.PathLike):
        raise TypeError(f"ca_file is {kind_of(ca_file)}, a path is expected")
    name = os.fspath(ca_file)
    try:
        pem = Path(name).read_bytes()
    except OSError as error:
        raise ValueError(f"ca_file {name!r} cannot be read: {error.strerror}") from None
    try:
        ssl.create_default_context(cadata=pem.decode("ascii"))
    except (ValueError, ssl.SSLError):
        raise ValueError(f"ca_file {name!r} holds no certificates in PEM form") from None
    return pem
