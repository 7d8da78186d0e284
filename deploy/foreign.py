"""Models of a repository of the user's own that are no clients of the engine: one that cannot be loaded stops no others."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from deploy import probe, server_log
from deploy.errors import ServerFailed
from deploy.invocation import ADMIN_HEADER
from deploy.readiness import Readiness
from deploy.repository import Model
from deploy.triton_control import TritonControl


class Broken(NamedTuple):
    """A model that Triton could not load."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"model {self.name} cannot be loaded: {self.reason}"


def models_of(models: Sequence[Model]) -> set[str]:
    """The names of models that are no clients of the engine, with models that have come into their repositories since."""
    found = [model for model in models if not model.is_ours]
    later = {path.parent.name for each in found for path in each.directory.parent.glob("*/config.pbtxt")}
    return {each.name for each in found} | (later - {model.name for model in models})


def one_that_serves(models: Sequence[Model], url: str) -> str:
    control = TritonControl(url, "")  # questions need no key
    return next((model.name for model in models if control.is_ready(model.name)), models[0].name)


def leave_out_broken(
    models: Sequence[Model], url: str, admin_key: str, log_path: Path, tell: Callable[[str], None]
) -> None:
    """Have a server that starts serve without the foreign models that cannot be loaded. `tell` gets a sentence for each.

    Raises ServerFailed where a model of ours cannot be, or none is left.
    """
    names = models_of(models)
    broken = broken_models(url, admin_key) if names else []
    lost = {each.name for each in broken}
    for each in broken:
        if each.name not in names or lost >= {model.name for model in models}:
            lines = server_log.tail(log_path)
            raise ServerFailed(server_log.reason(lines) or str(each), "\n".join(server_log.telling_lines(lines)))
    forget_broken(models, url, admin_key, tell)


def forget_broken(models: Sequence[Model], url: str, admin_key: str, tell: Callable[[str], None]) -> None:
    """Foreign models whose load has failed do not count for the readiness of the server."""
    if not (names := models_of(models)) or probe.is_ready(url):
        return
    broken = [each for each in broken_models(url, admin_key) if each.name in names]
    readiness = Readiness(url, admin_key, one_that_serves(models, url))
    for each in broken:
        with suppress(probe.ProbeFailed):  # The next look finds it again.
            readiness.forget(each.name)
            tell(f"{each}; the other models are served without it")


def broken_models(url: str, admin_key: str) -> list[Broken]:
    """The models whose load has failed. The list is empty while Triton does not answer; it answers when all loads have ended."""
    with suppress(probe.ProbeFailed, ValueError, KeyError, TypeError):
        headers = {ADMIN_HEADER: admin_key}
        status, text = probe.request(url, "POST", "/v2/repository/index", {"ready": False}, headers=headers)
        if status == 200:
            found = [Broken(str(each["name"]), _brief(str(each.get("reason", "")))) for each in json.loads(text)]
            return [each for each in found if each.reason not in ("", "unloaded")]
    return []


def _brief(reason: str) -> str:
    """Without the traceback."""
    return " ".join(reason.split("\n\nAt:")[0].split())[:300]
