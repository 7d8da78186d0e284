"""What a server says of itself."""

from __future__ import annotations

import json
import urllib.request

from benchmarks.peers.errors import Skipped

LONGEST = 1 << 20


def first_model(url: str) -> str:
    """The model that /v1/models lists first. Raises Skipped."""
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as response:
            name = json.loads(response.read(LONGEST))["data"][0]["id"]
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        raise Skipped(f"{url}/v1/models lists no model") from None
    return str(name)
