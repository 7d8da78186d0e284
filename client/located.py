"""A server of this machine that is known without being asked for: what a command without --url is meant for."""

from __future__ import annotations

from typing import Literal, NamedTuple

from client.address import DEFAULT_URLS


class Located(NamedTuple):
    """`model`: the name of its checkpoint. `others`: further servers that were started from here."""

    grpc_url: str
    http_url: str
    model: str
    state: Literal["starting", "serving", "stopping"] = "serving"
    others: tuple[Located, ...] = ()
    openai_url: str = ""  # where its OpenAI endpoint is; empty: it has none

    def url(self, protocol: str | None) -> str:
        return self.http_url if protocol == "http" else self.grpc_url

    def instead_of(self, url: str) -> str:
        """Where it is, for one who has named another port of its machine; empty for its own addresses and other machines."""
        found = (self, *self.others)
        is_known = any(url in (each.grpc_url, each.http_url) for each in found)
        near = [each for each in found if _host(each.grpc_url) == _host(url)]
        if is_known or not near:
            return ""
        return f"; Triton is at {' or '.join(f'{each.grpc_url}, over HTTP at {each.http_url}' for each in near)}"

    def why_not(self) -> str | None:
        """Why it takes no request now; None while it serves."""
        if self.state == "stopping":
            return (
                f"the server at {self.grpc_url} is stopping: it finishes the requests that it has and takes no new ones; "
                "start it again with ./everbatch serve"
            )
        if self.state == "starting":
            return f"the server at {self.grpc_url} is still starting; try again when it says that it is ready"
        return None


def _host(url: str) -> str:
    """The machine of an address; this one by one name."""
    host = url.partition("://")[2] or url
    host = host.rpartition(":")[0]
    return "127.0.0.1" if host in ("localhost", "[::1]") else host


def introduced(located: Located | None, protocol: str | None, model_name: str) -> str:
    """One line about the server that will answer, for a person who has given no address."""
    if located is None:
        return (
            f"no server was started from here; asking the one at {DEFAULT_URLS[protocol or 'grpc']}, model {model_name}"
        )
    text = f"{located.model} answers, at {located.url(protocol)}"
    others = " or ".join(f"{each.model} at {each.url(protocol)}" for each in located.others)
    return f"{text}; --url for {others}" if others else text
