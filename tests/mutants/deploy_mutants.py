"""Planted bugs of the launcher and of several models in one server, each one line changed, with tests that must notice it."""

from __future__ import annotations

from backend.api.processes import liveness
from backend.architectures import checkpoint
from backend.serving.lifecycle.absence import Absence
from deploy import (
    control_socket,
    doors,
    environment,
    invocation,
    log_files,
    models_file,
    multi_model,
    packages,
    processes,
    repository,
    rundir,
    running,
    secret_flags,
    serve,
)
from deploy.drain import ServerStop
from deploy.engine_sets import EngineSet
from deploy.gateway import ServerWithGateway
from deploy.health import Report
from deploy.monitor import Monitor
from deploy.readiness import Readiness
from deploy.report import ConsoleReporter
from deploy.signs import Signs
from deploy.supervisor import StopSignals, _Supervision
from gateway import loads
from gateway.core import Gateway
from tests.mutants.changes import change, change_everywhere

HEALTH = ["tests/deploy/test_health.py"]
SIGNS = ["tests/deploy/test_signs.py"]
DOORS = ["tests/deploy/test_doors.py"]
DRAIN = ["tests/deploy/test_drain.py"]
ENDPOINT = ["tests/deploy/test_gateway.py"]
MONITOR = ["tests/deploy/test_monitor.py"]
PROCESSES = ["tests/deploy/test_processes.py"]
SECRETS = ["tests/deploy/test_secret_flags.py"]
ENVIRONMENT = ["tests/deploy/test_environment.py"]
INVOCATION = ["tests/deploy/test_invocation.py"]
SUPERVISOR = ["tests/deploy/test_supervisor.py"]
LOGS = ["tests/deploy/test_log_files.py"]
RUNNING = ["tests/deploy/test_running.py"]
CAPACITY = ["tests/deploy/test_capacity.py"]

ABSENCE = ["tests/serving/test_absence.py"]
CONTROL = ["tests/deploy/test_model_control.py"]
FILES = ["tests/deploy/test_models_file.py"]
OPTIONS = ["tests/deploy/test_serve_options.py"]
GATEWAY = ["tests/gateway/test_several_models.py"]

MUTANTS = {
    "a_stub_that_is_slow_is_dead": (change(Report, "is_silent", ("self.busy", "False")), HEALTH),
    "stubs_are_told_apart_by_their_models": (
        change(Signs, "_take", ("report.pid: report", "hash(report.model): report")),
        SIGNS,
    ),
    "a_stopped_process_waits_for_a_processor": (
        change(liveness, "cpu_demand", ('== b"R"', 'in b"RT"')),
        SIGNS,
    ),
    "who_has_knocked_is_reset": (
        change(
            doors,
            "_drop_first_packets",
            ("len(_FILTER) // 8, ctypes.addressof(_FILTER)", "1, ctypes.addressof(_FILTER) + 24"),
        ),
        DOORS,
    ),
    "stubs_refuse_before_the_server_takes_no_more": (
        change(
            ServerStop,
            "_ask",
            ("    self._server.send_signal(signal.SIGTERM)\n", ""),
            (
                "send_signal(stub, signal.SIGUSR1)\n",
                "send_signal(stub, signal.SIGUSR1)\n    self._server.send_signal(15)\n",
            ),
        ),
        DRAIN,
    ),
    "streams_have_as_long_as_an_unloading_server": (
        change(ServerStop, "run", ("timeout_s + LAST_WORDS_S", "UNLOAD_S")),
        DRAIN,
    ),
    "models_without_signs_do_not_count": (change(ServerStop, "_is_over", ("< self._num_models", "< 0")), DRAIN),
    "a_failed_look_ends_the_watch": (
        change(Monitor, "_run", ("except Exception as error:", "except ZeroDivisionError as error:")),
        MONITOR,
    ),
    "a_trouble_is_told_at_every_look": (
        change(Monitor, "_tell_once", ("elif kind not in self._troubles:", "else:")),
        MONITOR,
    ),
    "a_full_disk_is_kept_secret": (change(log_files, "look_after", ("< MIN_FREE_BYTES", "< 0")), LOGS),
    "each_of_the_two_logs_takes_a_third": (
        change(log_files, "limit_bytes", ("// DISK_SHARE", "// (DISK_SHARE // 2)")),
        LOGS,
    ),
    "clients_of_the_endpoint_hear_nothing_of_the_end": (
        change(ServerWithGateway, "kill", ("self._process.terminate()", "self._process.kill()")),
        ENDPOINT,
    ),
    "fresh_bytecode_is_written_again": (
        change(repository, "compile_models", ("quiet=2", "quiet=2, force=True")),
        ["tests/deploy/test_repository.py"],
    ),
    "a_server_that_refused_counts_as_told": (
        change(Readiness, "tell", ("if ready:", "self.told_ready = ready\n    if ready:")),
        MONITOR,
    ),
    "a_silent_stub_is_left_alone": (
        change(Monitor, "failure", ("verdict.silent.silent_s > self._watchdog_s", "verdict.silent.silent_s < 0")),
        MONITOR,
    ),
    "what_is_known_to_be_ours_is_not_waited_for": (change(processes, "kill_run", ("set(known)", "set()")), PROCESSES),
    "an_unknown_mark_ends_the_start": (
        change(secret_flags, "visible", ("variables.get(word[1:], word)", "variables[word[1:]]")),
        SECRETS,
    ),
    "the_flags_stand_in_the_command_line": (
        change(invocation, "command_line", ("secret_flags.mark(name)", 'SECRET_FLAGS[name] + "secret"')),
        INVOCATION,
    ),
    "another_python_comes_first": (
        change(invocation, "_prepend", ("[first, *parts]", "[*parts, first]")),
        INVOCATION,
    ),
    "the_last_line_of_pip_is_lost": (
        change(packages, "lines_or_ticks", ("[*lines, rest]", "lines")),
        ENVIRONMENT,
    ),
    "test_tools_come_with_serve": (change(environment, "kit_for", ("else SERVING", "else TESTING")), ENVIRONMENT),
    "the_environment_does_not_know_its_checkout": (
        change(environment, "_finish", ("../../../..", "../../..")),
        ENVIRONMENT,
    ),
    "a_model_that_is_not_supported_is_started": (
        change(serve, "serve", ("capacity.examined(config) if config.model.path", "None if config.model.path")),
        CAPACITY,
    ),
    "a_torn_file_is_whole": (change_everywhere(checkpoint.examine, ("tensor_shapes(each)", "each.name")), CAPACITY),
    "a_server_that_stops_is_asked": (change(running, "locate", ('each.state != "serving"', "0")), RUNNING),
    "failures_before_it_was_ready_count_for_ever": (
        change(_Supervision, "_start", ("time.monotonic(), 0", "time.monotonic(), self.failures")),
        SUPERVISOR,
    ),
    "a_hang_up_ends_the_launcher_alone": (
        change(StopSignals, "__enter__", ("in self.SIGNALS", "in self.SIGNALS[:2]")),
        SUPERVISOR,
    ),
    "the_admin_key_is_for_everybody": (
        change(rundir, "write_private", ("0o600", "0o644")),
        ["tests/deploy/test_rundir.py"],
    ),
    "events_without_a_time": (
        change(ConsoleReporter, "_line", ("{time.strftime('%H:%M:%S')}", "")),
        ["tests/deploy/test_report.py"],
    ),
    "an_unloaded_model_holds_its_requests": (change(Absence, "take", ('!= "asleep"', '== "nowhere"')), ABSENCE),
    "held_bytes_are_not_counted": (change(Absence, "_check_room", ("> MAX_BYTES", "> 1 << 60")), ABSENCE),
    "clients_own_engines": (change(EngineSet, "_client", ('(OWNS, "false")', '(OWNS, "true")')), CONTROL),
    "the_socket_is_for_everybody": (
        change(control_socket.ControlSocket, "__init__", ("path.chmod(0o600)", "path.chmod(0o666)")),
        ["tests/deploy/test_control_socket.py"],
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
