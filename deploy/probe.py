"""Does a server really answer? Readiness endpoints keep saying 200 after the stub has died, so one token is generated.

Also the container's health check:  python -m deploy.probe [http://127.0.0.1:8000] [MODEL]
"""

from __future__ import annotations

import http.client
import json
import sys
import urllib.parse


class ProbeFailed(Exception):
    """The server did not answer as a healthy one does; the message says how."""


def request(
    url: str, method: str, path: str, body: dict[str, object] | None = None, timeout_s: float = 5.0
) -> tuple[int, str]:
    """One HTTP exchange: status and body. Raises ProbeFailed when there is no answer within `timeout_s` per read."""
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port or 80, timeout=timeout_s)
    try:
        payload = None if body is None else json.dumps(body)
        connection.request(method, path, body=payload, headers={"Content-Type": "application/json"} if body else {})
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        raise ProbeFailed(f"no answer from {url}{path}: {error or type(error).__name__}") from None
    finally:
        connection.close()


def is_ready(url: str) -> bool:
    """True once the port is open and every model has loaded (which says nothing about the stubs)."""
    try:
        return request(url, "GET", "/v2/health/ready")[0] == 200
    except ProbeFailed:
        return False


def generate_one_token(url: str, model: str = "ensemble", timeout_s: float = 60.0) -> str:
    """Generate one token through `model`; works for both transaction policies. Returns the text, raises ProbeFailed."""
    body: dict[str, object] = {"text_input": "a", "max_tokens": 1, "stream": False}
    status, text = request(url, "POST", f"/v2/models/{model}/generate", body, timeout_s)
    try:
        answer = json.loads(text)
    except json.JSONDecodeError:
        answer = {"error": text[:200]}
    if status != 200 or not isinstance(answer, dict) or "text_output" not in answer:
        reason = answer.get("error", text[:200]) if isinstance(answer, dict) else text[:200]
        raise ProbeFailed(f"model {model} answered {status}: {reason}")
    return str(answer["text_output"])


def main(arguments: list[str]) -> int:
    url = arguments[0] if arguments else "http://127.0.0.1:8000"
    model = arguments[1] if len(arguments) > 1 else "ensemble"
    try:
        generate_one_token(url, model, timeout_s=20.0)
    except ProbeFailed as failure:
        print(failure, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
