"""Why an engine takes no part."""

from __future__ import annotations


class Skipped(Exception):
    """An engine cannot be measured; the message is one sentence that completes `skipped: `."""
