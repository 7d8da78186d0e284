"""Does a server really answer? At its start one token is generated; after that its readiness is asked, which the launcher
keeps true (deploy/readiness.py).

Also the container's health check:  python -m deploy.probe [http://127.0.0.1:8000]
"""

from __future__ import annotations

import http.client
import json
import sys
import urllib.parse
from collections.abc import Mapping

from backend.api.output_limits import NO_HEAD
from deploy.questions import AskedModel


class ProbeFailed(Exception):
    """The server did not answer as a healthy one does; the message says how."""


def request(
    url: str,
    method: str,
    path: str,
    body: Mapping[str, object] | None = None,
    timeout_s: float = 5.0,
    headers: Mapping[str, str] | None = None,
) -> tuple[int, str]:
    """One HTTP exchange: status and body. Raises ProbeFailed when there is no answer within `timeout_s` per read."""
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port or 80, timeout=timeout_s)
    try:
        payload = None if body is None else json.dumps(body)
        kind = {"Content-Type": "application/json"} if body else {}
        connection.request(method, path, body=payload, headers={**kind, **(headers or {})})
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        raise ProbeFailed(f"no answer from {url}{path}: {error or type(error).__name__}") from None
    finally:
        connection.close()


def is_ready(url: str, timeout_s: float = 5.0) -> bool:
    """True once the port is open and every model has loaded. Under the launcher that holds for the stubs and the
    engine too (deploy/readiness.py); a plain tritonserver says nothing about them.
    """
    try:
        return request(url, "GET", "/v2/health/ready", timeout_s=timeout_s)[0] == 200
    except ProbeFailed:
        return False


def is_live(url: str, timeout_s: float) -> bool:
    """True if the server answers at all within `timeout_s`."""
    try:
        return request(url, "GET", "/v2/health/live", timeout_s=timeout_s)[0] == 200
    except ProbeFailed:
        return False


def generate_one_token(url: str, asked: AskedModel, timeout_s: float = 60.0) -> str:
    """Generate one token through a text model; works for both transaction policies. Returns what it answered, which is nothing
    for a checkpoint without an output head. Raises ProbeFailed.
    """
    body = asked.form.body("a", 1, False)
    status, text = request(url, "POST", f"/v2/models/{asked.name}/generate", body, timeout_s)
    try:
        answer = json.loads(text)
    except json.JSONDecodeError:
        answer = {"error": text[:200]}
    if status != 200 or not isinstance(answer, dict) or asked.form.answer not in answer:
        reason = answer.get("error", text[:200]) if isinstance(answer, dict) else text[:200]
        if NO_HEAD in str(reason):  # the engine has read the request, and that is all that can be asked of it
            return ""
        raise ProbeFailed(f"model {asked.name} answered {status}: {reason}")
    return str(answer[asked.form.answer])


def main(arguments: list[str]) -> int:
    """Exit status 0 when healthy. Asks nothing of the engine, so it does not wait behind the work of a busy server."""
    url = arguments[0] if arguments else "http://127.0.0.1:8000"
    if not is_ready(url, timeout_s=10.0):
        print(f"{url} is not ready", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
