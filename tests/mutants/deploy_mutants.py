"""Planted bugs of the launcher, each one line of it changed, with the tests of which one must notice it."""

from __future__ import annotations

from backend.api.processes import liveness
from backend.architectures import checkpoint
from deploy import (
    doors,
    environment,
    invocation,
    log_files,
    packages,
    processes,
    repository,
    rundir,
    running,
    secret_flags,
    serve,
)
from deploy.drain import Drain
from deploy.gateway import ServerWithGateway
from deploy.health import Report
from deploy.monitor import Monitor
from deploy.readiness import Readiness
from deploy.report import ConsoleReporter
from deploy.signs import Signs
from deploy.supervisor import StopSignals, _Supervision
from tests.mutants.changes import Plant, change, change_everywhere

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

MUTANTS: dict[str, tuple[Plant, list[str]]] = {
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
            Drain,
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
        change(Drain, "run", ("timeout_s + LAST_WORDS_S", "UNLOAD_S")),
        DRAIN,
    ),
    "models_without_signs_do_not_count": (change(Drain, "_is_over", ("< self._num_models", "< 0")), DRAIN),
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
}
