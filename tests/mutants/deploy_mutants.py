"""Planted bugs of the launcher, each one line of it changed, with the tests of which one must notice it."""

from __future__ import annotations

from deploy import (
    environment,
    health,
    invocation,
    log_files,
    memory,
    packages,
    ports,
    processes,
    report,
    rundir,
    secret_flags,
    server_log,
)
from deploy.engine_events import EngineEvents
from deploy.monitor import Monitor
from deploy.ports import Ports
from deploy.processes import Process
from deploy.readiness import Readiness
from deploy.report import ConsoleReporter
from deploy.supervisor import BackOff, StopSignals
from deploy.triton_server import TritonServer
from tests.mutants.changes import Plant, change

HEALTH = ["tests/deploy/test_health.py"]
MONITOR = ["tests/deploy/test_monitor.py"]
PROCESSES = ["tests/deploy/test_processes.py"]
SECRETS = ["tests/deploy/test_secret_flags.py"]
ENVIRONMENT = ["tests/deploy/test_environment.py"]
INVOCATION = ["tests/deploy/test_invocation.py"]
SUPERVISOR = ["tests/deploy/test_supervisor.py"]
LOGS = ["tests/deploy/test_log_files.py"]
EVENTS = ["tests/deploy/test_engine_events.py"]
SERVER = ["tests/deploy/test_triton_server.py"]

MUTANTS: dict[str, tuple[Plant, list[str]]] = {
    "a_sign_that_is_just_in_time_is_silence": (change(health, "judge", ("> SILENT_S", ">= SILENT_S")), HEALTH),
    "the_shortest_silence_is_named": (change(health, "judge", ("max((", "min((")), HEALTH),
    "a_sign_that_is_being_written_counts": (change(health, "read", ('"[!.]*"', '"*"')), HEALTH),
    "signs_of_the_former_server_stay": (change(health, "clear", ("shutil.rmtree(", "str(")), HEALTH),
    "a_server_that_refused_counts_as_told": (
        change(Readiness, "tell", ("if ready:", "self.told_ready = ready\n    if ready:")),
        MONITOR,
    ),
    "the_sentinel_stays_loaded": (change(Readiness, "tell", ('self._post("unload", {}, (200,))', "pass")), MONITOR),
    "an_engine_that_was_given_up_is_started_again": (
        change(Monitor, "failure", ("final=True", "final=False")),
        MONITOR,
    ),
    "a_silent_stub_is_left_alone": (
        change(Monitor, "failure", ("verdict.silent.age_s > self._watchdog_s", "verdict.silent.age_s < 0")),
        MONITOR,
    ),
    "everybody_is_judged_right_after_a_stop_of_the_machine": (
        change(Monitor, "_wait", ("self._trust_after = now + PAUSE_S", "self._trust_after = now")),
        MONITOR,
    ),
    "a_dead_stub_leaves_the_server_ready": (change(Monitor, "_look", (" and not self._dead_stubs()", "")), MONITOR),
    "the_sentinels_errors_are_not_explained": (
        change(Monitor, "_tell", ("log_files.append(self._log_path, EXPLANATION)", "pass")),
        MONITOR,
    ),
    "a_pid_that_was_given_away_is_still_ours": (
        change(Process, "alive", (" and stat.start == self.start", "")),
        PROCESSES,
    ),
    "a_zombie_is_alive": (change(Process, "alive", (' and stat.state not in "ZX"', "")), PROCESSES),
    "a_run_id_that_begins_alike_is_ours": (change(processes, "processes_of_run", ('.split(b"\\0")', "")), PROCESSES),
    "what_is_known_to_be_ours_is_not_waited_for": (change(processes, "kill_run", ("set(known)", "set()")), PROCESSES),
    "shared_memory_of_other_servers_is_removed": (
        change(processes, "shared_memory_files", ("if path.name.startswith(prefix)", "")),
        PROCESSES,
    ),
    "the_flag_begins_a_letter_early": (change(secret_flags, "_addresses", ("+ len(name) + 1", "+ len(name)")), SECRETS),
    "an_unknown_mark_ends_the_start": (
        change(secret_flags, "visible", ("variables.get(word[1:], word)", "variables[word[1:]]")),
        SECRETS,
    ),
    "the_flags_stand_in_the_command_line": (
        change(invocation, "command_line", ("secret_flags.mark(name)", 'SECRET_FLAGS[name] + "secret"')),
        INVOCATION,
    ),
    "triton_listens_on_every_interface": (
        change(invocation, "command_line", ('f"--metrics-address={host}",', "")),
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
    "an_interrupted_set_up_leaves_pip_behind": (change(packages, "pip", ("process.terminate()", "pass")), ENVIRONMENT),
    "each_checkout_locks_for_itself": (change(environment, "_open_lock", ("venv.resolve()", "venv")), ENVIRONMENT),
    "a_half_made_environment_is_whole": (
        change(environment, "is_complete", (' and not (venv / "incomplete").exists()', "")),
        ENVIRONMENT,
    ),
    "failures_before_it_was_ready_count_for_ever": (
        change(BackOff, "ready", ("self._in_a_row = 0", "pass")),
        SUPERVISOR,
    ),
    "a_hang_up_ends_the_launcher_alone": (
        change(StopSignals, "__enter__", ("in self.SIGNALS", "in self.SIGNALS[:2]")),
        SUPERVISOR,
    ),
    "a_new_log_overwrites_the_last_but_one": (change(log_files, "begin", ("_make_room(path)", "pass")), LOGS),
    "an_emptied_log_is_not_read": (change(EngineEvents, "_events", ("if size < self._position:", "if False:")), EVENTS),
    "half_a_line_is_lost": (change(EngineEvents, "_events", ("self._rest + file", "file")), EVENTS),
    "the_admin_key_is_for_everybody": (
        change(rundir, "write_private", ("0o600", "0o644")),
        ["tests/deploy/test_rundir.py"],
    ),
    "one_port_may_be_given_twice": (
        change(Ports, "check_free", (".count(port) > 1", ".count(port) > 2")),
        ["tests/deploy/test_ports.py"],
    ),
    "other_machines_see_no_danger": (
        change(
            ports,
            "is_loopback",
            ("except socket.gaierror:\n        return False", "except socket.gaierror:\n        return True"),
        ),
        ["tests/deploy/test_ports.py"],
    ),
    "everybody_is_pointed_at_the_metrics": (
        change(report, "addresses", ("if not suffix:", "if True:")),
        ["tests/deploy/test_report.py"],
    ),
    "events_without_a_time": (
        change(ConsoleReporter, "_line", ("{time.strftime('%H:%M:%S')}", "")),
        ["tests/deploy/test_report.py"],
    ),
    "a_stack_is_all_of_the_memory": (
        change(memory, "_stack_bytes", ("total // 2", "total")),
        ["tests/deploy/test_memory.py"],
    ),
    "noise_is_the_reason": (
        change(server_log, "telling_lines", ("and not any(", "and any(")),
        ["tests/deploy/test_server_log.py"],
    ),
    "a_server_may_grow_without_end": (
        change(TritonServer, "_too_large", ("resident <= self._memory_limit", "True")),
        SERVER,
    ),
}
