"""The three ports of a server: checks that chosen ones are free, and finds free ones."""

from __future__ import annotations

import errno
import ipaddress
import socket
from dataclasses import astuple, dataclass

from deploy.errors import UserError


@dataclass(frozen=True)
class Ports:
    """TCP ports of tritonserver."""

    http: int = 8000
    grpc: int = 8001
    metrics: int = 8002

    @classmethod
    def free(cls, host: str = "127.0.0.1") -> Ports:
        """Three different ports that no process listens on at this moment. Another process may take them before a server
        does.
        """
        sockets = [_bind(host, 0) for _ in range(3)]
        numbers = [bound.getsockname()[1] for bound in sockets]
        for bound in sockets:
            bound.close()
        return cls(*numbers)

    def check_free(self, host: str) -> None:
        """Raise UserError naming the ports that are taken, or the first that is not allowed, and the options that change them."""
        named = {"--http-port": self.http, "--grpc-port": self.grpc, "--metrics-port": self.metrics}
        for option, port in named.items():
            if not 1 <= port <= 65535:
                raise UserError(f"{option} is {port}, allowed is 1 to 65535")
            if list(named.values()).count(port) > 1:
                raise UserError(f"port {port} is given twice; choose another one with {option} PORT")
        in_use = {option: port for option, port in named.items() if _is_in_use(host, port)}
        if len(in_use) > 1:
            free = dict(zip(named, astuple(Ports.free(host)), strict=True))
            others = " ".join(f"{option}={free[option]}" for option in in_use)
            numbers = ", ".join(map(str, in_use.values()))
            raise UserError(
                f"ports {numbers} on {host} are already in use; stop what uses them or choose others, such as {others}"
            )
        for option, port in named.items():
            check_port(host, port, option)


def _is_in_use(host: str, port: int) -> bool:
    try:
        _bind(host, port).close()
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False


def check_port(host: str, port: int, option: str) -> None:
    """Raise UserError unless a server could listen on `host:port` now."""
    try:
        _bind(host, port).close()
    except OSError as error:
        raise UserError(_reason(error, host, port, option)) from None


def _reason(error: OSError, host: str, port: int, option: str) -> str:
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return f"address {host!r} is none of this machine's; choose another one with --host ADDRESS"
    if error.errno == errno.EACCES:
        return f"port {port} may be opened by root only; choose one above 1023 with {option} PORT"
    return f"port {port} on {host} is already in use; stop what uses it or choose another one with {option} PORT"


def _bind(host: str, port: int) -> socket.socket:
    """A socket bound as tritonserver binds its own. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(1)
    except OSError:
        bound.close()
        raise
    return bound


def reachable(host: str) -> str:
    """The address at which a client on this machine reaches a server that listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)


def seen_from_elsewhere(host: str) -> str | None:
    """The address of this machine for others, where `host` means every interface: the one with which this machine would
    reach the network. None for any other `host`, and where there is no network. Sends nothing.
    """
    # No machine has these addresses: they are reserved for documentation (RFC 5737, RFC 3849).
    documentation = {"0.0.0.0": "192.0.2.1", "": "192.0.2.1", "::": "2001:db8::1"}
    if host not in documentation:
        return None
    family = socket.AF_INET6 if host == "::" else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as unconnected:
            # A datagram socket sends nothing here, and only looks up the route.
            unconnected.connect((documentation[host], 9))
            return str(unconnected.getsockname()[0])
    except OSError:  # There is no route to any network.
        return None


def is_loopback(host: str) -> bool:
    """True if only this machine reaches a server that listens on `host`. Asks the resolver; unknown names are not."""
    try:
        found = socket.getaddrinfo(host or "0.0.0.0", None, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return False
    return all(ipaddress.ip_address(entry[4][0]).is_loopback for entry in found)


def url_host(host: str) -> str:
    """`host` as it is written in a URL."""
    return f"[{host}]" if ":" in host else host
