"""Triton's model control: load and unload of one model of a server that runs, with the admin key."""

from __future__ import annotations

import contextlib
import json
import re

from deploy import probe
from deploy.errors import UserError
from deploy.invocation import ADMIN_HEADER

UNLOAD_TIMEOUT_S = 30.0
_CONFIG_ERROR = re.compile(
    r"\bConfigError: (.+)", re.DOTALL
)  # by a stub whose engine says what is wrong with its settings


class ControlFailed(Exception):
    """Triton has not done it; the message is one sentence."""


class TritonControl:
    """Any thread, one at a time: Triton itself does one after the other."""

    def __init__(self, url: str, admin_key: str) -> None:
        self._url, self._headers = url, {ADMIN_HEADER: admin_key}

    def load(self, model: str, timeout_s: float) -> None:
        """Load a model, or load it anew where its configuration has changed: then the former instance has the requests until
        the new one is there. Raises ControlFailed, and UserError for settings that the engine refuses; a failed load no longer
        counts for the server's readiness.
        """
        try:
            self._post(model, "load", timeout_s)
        except ControlFailed as failure:
            self.forget_failed(model)
            if (wrong := _CONFIG_ERROR.search(str(failure))) is not None:
                raise UserError(f"load of {model}: {wrong[1]}") from None
            raise

    def forget_failed(self, model: str) -> None:
        """Triton is not ready while the last load of any model has failed, unless the model was unloaded on purpose."""
        if not self.is_ready(model):
            with contextlib.suppress(ControlFailed):  # The first failure is the one to report.
                self.unload(model)

    def unload(self, model: str) -> None:
        """Have a model end once its requests have. Raises ControlFailed."""
        self._post(model, "unload", UNLOAD_TIMEOUT_S)

    def is_ready(self, model: str) -> bool:
        return self.readiness(model) is True

    def readiness(self, model: str) -> bool | None:
        """True if a model is ready, False if it is not; None where Triton does not answer."""
        try:
            return probe.request(self._url, "GET", f"/v2/models/{model}/ready", timeout_s=1.0)[0] == 200
        except probe.ProbeFailed:
            return None

    def _post(self, model: str, action: str, timeout_s: float) -> None:
        path = f"/v2/repository/models/{model}/{action}"
        try:
            status, text = probe.request(self._url, "POST", path, {"parameters": {}}, timeout_s, self._headers)
        except probe.ProbeFailed as failure:
            raise ControlFailed(f"{action} of {model}: {failure}") from None
        if status != 200:
            raise ControlFailed(f"{action} of {model}: {_reason(text)}")


def _reason(text: str) -> str:
    """Triton's error text without the traceback."""
    try:
        told = str(json.loads(text)["error"])
    except (ValueError, KeyError, TypeError):
        told = text
    return told.split("\n\nAt:")[0].strip()[:500]
