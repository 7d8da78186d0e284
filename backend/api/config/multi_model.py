"""The contract between the launcher of a server with several models and its stubs (docs/several-models.md)."""

from __future__ import annotations

from typing import Literal

import msgspec

# Parameters of config.pbtxt. ENGINE: the engine's directory below that of the server. OWNS: `true` for the model that starts the
# engine, `false` for its clients. LABEL: what the owner's metrics call the model.
ENGINE, OWNS, LABEL = "engine", "owns_engine", "metrics_model"
FILE = "away"  # beside the engine's socket


class Notice(msgspec.Struct, frozen=True):
    """The content of the file, as JSON: the engine is away on purpose. `why`: one sentence for clients of an engine that is not
    asleep. `hold_s`: for how many seconds a request waits for one that is.
    """

    state: Literal["asleep", "unloaded", "failed"]
    why: str = ""
    hold_s: float = 600.0
