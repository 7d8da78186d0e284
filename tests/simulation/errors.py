"""The classes of errors that the model foresees."""

from __future__ import annotations

import re

from backend.api import Response


def error_class(response: Response) -> str:
    message = response.error_msg
    found = re.match(r"session error (\d)", message)
    if found and found[1] != "5":  # 5: the turn failed, for a reason of its own
        return f"session {found[1]}"
    classes = {
        "is in use by a request": "duplicate",
        "KV blocks": "pool",
        "model step failed": "worker",
        "KV pool was lost": "worker",
        "Maximum queue size": "queue",
        "scheduler.max_num_tokens": "step",
        "leave no token": "stuck",
        "the guide is bad": "guide",
        "was not compiled within": "guide",
        "guides wait to be compiled": "compiling",
    }
    return next((name for text, name in classes.items() if text in message), "field")
