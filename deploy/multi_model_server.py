"""A TritonServer with several models: an engine each behind one server (docs/several-models.md)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from deploy import health, probe
from deploy.control_socket import ControlSocket
from deploy.engine_sets import Engine
from deploy.health import Report, Verdict
from deploy.log_files import append
from deploy.model_control import ModelControl
from deploy.multi_model import MultiModel
from deploy.processes import read_stat
from deploy.questions import TOKENS, AskedModel, text_model
from deploy.shares import free_bytes
from deploy.triton_control import ControlFailed, TritonControl
from deploy.triton_server import TritonServer


class MultiModelServer(TritonServer):
    """`several`: the models, checked. All else as for a TritonServer."""

    def __init__(self, several: MultiModel, **options: Any) -> None:
        self.sets = several.sets
        self._several = several
        self.control: ModelControl | None = None
        self._socket: ControlSocket | None = None
        self._place = Path()
        models = [model for each in self.sets for model in each.models]
        super().__init__(several.default.engine.share.config, models=models, probe_model=None, **options)
        first = self.sets[0]
        if several.generates(first.name):
            self.text_model = text_model(first.clients(first.engine))

    @property
    def control_path(self) -> Path:
        """Socket of the operations on models, for programs of this user."""
        return self._place / "control.sock"

    def _lay_out(self, place: Path) -> list[Path]:
        self._place = place
        for each in self.sets:
            each.start_again()
        self.models = [model for each in self.sets for model in each.models]
        for each in self.sets:
            each.engine.lay_out(place)
        return super()._lay_out(place)

    def _generate_first_tokens(self, deadline: float, on_phase: Callable[[str], None]) -> None:
        on_phase("generating a first token of each model")
        for each in self.sets:
            asked = text_model(each.clients(each.engine))
            if asked is not None and self._several.generates(each.name):
                self._generate_first_token(asked, deadline)

    def _watch(self) -> None:
        super()._watch()
        signs = self._signs
        assert signs is not None, "start() has made them"
        self.control = ModelControl(
            self.sets,
            TritonControl(self.http_url, self.admin_key),
            lambda: signs.latest,
            self._place,
            self._several.described_again,
            lambda share: free_bytes(share.config),
            self._first_token_of,
            lambda pid: (stat := read_stat(pid)) is not None and stat.state not in "ZX",
            self._tell_operator,
        )
        threading.Thread(target=self.control.run, name="everbatch-models", daemon=True).start()
        self._socket = ControlSocket(self.control_path, self.control)

    def _stop_watching(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self.control is not None:
            self.control.stop()
            self.control = None
        super()._stop_watching()

    def _judge(self, reports: Sequence[Report]) -> Verdict:
        """An engine that was given up ends no other one, and nothing is asked of stubs that are to end."""
        retired = self.control.retired if self.control is not None else set()
        told = [
            replace(report, state="unavailable") if report.state == "given_up" else report
            for report in reports
            if report.pid not in retired
        ]
        return health.judge(told)

    def _first_token_of(self, engine: Engine, timeout_s: float) -> None:
        if not self._several.generates_with(engine.share):
            return
        try:
            probe.generate_one_token(self.http_url, AskedModel(engine.owner, TOKENS), timeout_s)
        except probe.ProbeFailed as failure:
            raise ControlFailed(f"the new engine does not generate: {failure}") from None

    def _tell_operator(self, text: str) -> None:
        """To the user's console and the server's log."""
        append(self.log_path, f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}")
        self.on_event(text)
