"""Planted bugs of several models in one server, each one line changed, with the tests of which one must notice it."""

from __future__ import annotations

from backend.serving.lifecycle.absence import Absence
from deploy import control_socket, models_file, multi_model
from deploy.engine_sets import EngineSet
from deploy.model_control import ModelControl
from gateway import loads
from gateway.core import Gateway
from tests.mutants.changes import Plant, change

ABSENCE = ["tests/serving/test_absence.py"]
CONTROL = ["tests/deploy/test_model_control.py"]
FILES = ["tests/deploy/test_models_file.py"]
OPTIONS = ["tests/deploy/test_serve_options.py"]
GATEWAY = ["tests/gateway/test_several_models.py"]

MUTANTS: dict[str, tuple[Plant, list[str]]] = {
    "an_unloaded_model_holds_its_requests": (change(Absence, "take", ('!= "asleep"', '== "nowhere"')), ABSENCE),
    "held_bytes_are_not_counted": (change(Absence, "_check_room", ("> MAX_BYTES", "> 1 << 60")), ABSENCE),
    "the_clients_move_to_an_engine_that_may_not_generate": (
        change(ModelControl, "_replace", ("        self._first_token(fresh, entry.load_timeout_s)\n", "")),
        CONTROL,
    ),
    "clients_that_cannot_move_stay_where_they_are": (
        change(ModelControl, "_move_clients", ("        self._load_clients(models, former, timeout_s)\n", "")),
        CONTROL,
    ),
    "the_former_engine_ends_at_once": (
        change(ModelControl, "_replace", ("    self._drain(left, entry.drain_timeout_s)\n", "")),
        CONTROL,
    ),
    "a_failed_replacement_stays_in_the_repository": (
        change(ModelControl, "_discard", ("    fresh.remove(self._place)\n", "")),
        CONTROL,
    ),
    "clients_own_engines": (change(EngineSet, "_client", ('(OWNS, "false")', '(OWNS, "true")')), CONTROL),
    "the_socket_is_for_everybody": (
        change(control_socket.ControlSocket, "__init__", ("path.chmod(0o600)", "path.chmod(0o666)")),
        CONTROL,
    ),
    "infinite_memory": (
        change(models_file, "_check_memory", ("math.isfinite(memory) and 0 < memory <= 1 << 20", "memory > 0")),
        FILES,
    ),
    "a_name_is_two_models": (
        change(
            models_file, "_counted", ("owners.setdefault(each, name)) != name", "owners.setdefault(each, name)) == 7")
        ),
        FILES,
    ),
    "two_engines_share_a_directory": (
        change(multi_model, "_check_alone", ("!= name:\n                raise", "== 7:\n                raise")),
        OPTIONS,
    ),
    "every_key_operates_models": (
        change(Gateway, "check_right", ("and not right.is_of(context.client)", "and False")),
        GATEWAY,
    ),
    "the_load_is_that_of_any_engine": (
        change(loads, "load_of", ("if version > newest", "if version != newest")),
        GATEWAY,
    ),
}
