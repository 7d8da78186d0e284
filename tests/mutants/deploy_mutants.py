"""Planted bugs of the launcher, each one line of it changed, with the tests of which one must notice it."""

from __future__ import annotations

from backend.api import checkpoint, silence
from backend.api.silence import Silence
from deploy import (
    capacity,
    chat_template,
    doors,
    environment,
    health,
    invocation,
    janitor,
    limits,
    log_files,
    memory,
    packages,
    ports,
    processes,
    report,
    repository,
    rundir,
    running,
    secret_flags,
    serve,
    server_log,
    supervisor,
)
from deploy.drain import Drain
from deploy.engine_events import EngineEvents
from deploy.gateway import ServerWithGateway
from deploy.health import Report
from deploy.monitor import Monitor
from deploy.ports import Ports
from deploy.processes import Process
from deploy.readiness import Readiness
from deploy.report import ConsoleReporter
from deploy.signs import Signs
from deploy.supervisor import StopSignals, _Supervision
from deploy.triton_server import TritonServer
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
EVENTS = ["tests/deploy/test_engine_events.py"]
SERVER = ["tests/deploy/test_triton_server.py"]
RUNNING = ["tests/deploy/test_running.py"]
CAPACITY = ["tests/deploy/test_capacity.py"]
OPTIONS = ["tests/deploy/test_serve_options.py"]

MUTANTS: dict[str, tuple[Plant, list[str]]] = {
    "a_twin_streams_too": (
        change(repository.Model, "served_configuration", (" and not self.is_unary", "")),
        ["tests/deploy/test_repository.py"],
    ),
    "models_of_one_policy_have_twins": (
        change_everywhere(repository.with_unary_twins, (" and not model.streams(False)", "")),
        ["tests/deploy/test_repository.py"],
    ),
    "the_repository_is_open_to_all": (
        change(invocation, "environment", ("if open_repository else flag", "if True else flag")),
        INVOCATION,
    ),
    "a_stub_that_missed_five_signs_is_well": (
        change(Report, "is_silent", (">=", ">")),
        HEALTH,
    ),
    "a_stub_that_is_slow_is_dead": (change(Report, "is_silent", ("self.busy", "False")), HEALTH),
    "the_shortest_silence_is_named": (change(health, "judge", ("max((", "min((")), HEALTH),
    "requests_that_run_do_not_hold_a_stop_up": (change(health, "drained", ("report.live == 0", "True")), HEALTH),
    "a_stub_that_takes_requests_in_is_drained": (
        change(health, "drained", ("report.state == DRAINING and ", "")),
        HEALTH,
    ),
    "stubs_are_told_apart_by_their_models": (
        change(Signs, "_take", ("report.pid: report", "hash(report.model): report")),
        SIGNS,
    ),
    "every_silent_stub_is_unloaded": (
        change(Signs, "unloaded", ("if report.state == health.UNLOADED", "if True")),
        SIGNS,
    ),
    "half_a_sign_is_lost": (change(Signs, "_take", ("self._rest + self._read()", "self._read()")), SIGNS),
    "the_pipe_stays_open": (change(Signs, "close", ("os.close(self._pipe)", "pass")), SIGNS),
    "a_moments_work_makes_a_stuck_stub_well": (
        change(Silence, "tick", ("self._idle = self.is_too_long", "pass")),
        SIGNS,
    ),
    "time_before_the_silence_counts_as_work": (
        change(Silence, "tick", ("demand.wanted_ns - self._wanted_ns", "demand.wanted_ns")),
        SIGNS,
    ),
    "a_stopped_process_waits_for_a_processor": (
        change(silence, "cpu_demand", ('== b"R"', 'in b"RT"')),
        SIGNS,
    ),
    "waiting_for_a_processor_is_doing_nothing": (
        change(Silence, "tick", ("demand.waiting or ", "")),
        SIGNS,
    ),
    "every_port_of_the_process_is_closed": (
        change(doors, "_inodes", (' and int(fields[1].rpartition(":")[2], 16) == port', "")),
        DOORS,
    ),
    "a_door_leaves_a_file_open": (change(doors, "_duplicates", ("os.close(process)", "pass")), DOORS),
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
    "stubs_without_a_handler_are_killed_by_the_drain": (
        change(Drain, "_ask", (" if catches(stub.pid, signal.SIGUSR1)", "")),
        DRAIN,
    ),
    "a_dead_stub_holds_a_stop_up": (
        change(Drain, "_is_over", (" if read_stat(report.pid) is not None", "")),
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
    "a_watch_that_ended_is_not_missed": (
        change(Monitor, "failure", ("not self._thread.is_alive() and", "False and")),
        MONITOR,
    ),
    "a_log_without_room_for_a_copy_grows_on": (
        change(log_files, "_put_aside", ("    os.truncate(path, 0)", "    pass")),
        LOGS,
    ),
    "half_a_copy_of_a_log_stays": (change(log_files, "_put_aside", ("aside.unlink(missing_ok=True)", "pass")), LOGS),
    "a_full_disk_is_kept_secret": (change(log_files, "look_after", ("< MIN_FREE_BYTES", "< 0")), LOGS),
    "each_of_the_two_logs_takes_a_third": (
        change(log_files, "limit_bytes", ("// DISK_SHARE", "// (DISK_SHARE // 2)")),
        LOGS,
    ),
    "a_restart_without_room_ends_serve": (
        change(
            supervisor._Supervision,
            "live",
            ("if not self.was_ready:\n            raise ServerFailed(f", "if True:\n            raise ServerFailed(f"),
        ),
        SUPERVISOR,
    ),
    "the_endpoint_dies_with_a_server_that_is_started_again": (
        change(ServerWithGateway, "abandon", ("spare=() if self._process is None else (self._process.pid,)", "")),
        ENDPOINT,
    ),
    "clients_of_the_endpoint_hear_nothing_of_the_end": (
        change(ServerWithGateway, "kill", ("self._process.terminate()", "self._process.kill()")),
        ENDPOINT,
    ),
    "the_janitor_of_a_spared_endpoint_ends_it": (
        change(TritonServer, "_sweep", ("self._janitor.kill()", "pass")),
        ENDPOINT,
    ),
    "shared_memory_of_a_dead_launcher_stays": (
        change(janitor, "main", ("remove_shared_memory(shm_prefix)", "pass")),
        PROCESSES,
    ),
    "the_janitor_ends_with_its_launcher": (
        change(janitor, "main", ("signal.SIGINT, signal.SIGTERM, signal.SIGHUP", "signal.SIGINT, signal.SIGHUP")),
        PROCESSES,
    ),
    "fresh_bytecode_is_written_again": (
        change(repository, "compile_models", ("quiet=2", "quiet=2, force=True")),
        ["tests/deploy/test_repository.py"],
    ),
    "open_files_are_limited_to_what_the_shell_says": (
        change(limits, "raise_open_files", ("resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))", "pass")),
        ["tests/deploy/test_limits.py"],
    ),
    "a_blank_in_the_run_directory_is_left_to_the_shell": (
        change(rundir, "plain_directory", (" and is_plain(directory)", "")),
        ["tests/deploy/test_rundir.py"],
    ),
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
        change(Monitor, "failure", ("verdict.silent.silent_s > self._watchdog_s", "verdict.silent.silent_s < 0")),
        MONITOR,
    ),
    "a_stop_of_the_launcher_is_a_silence_of_the_server": (
        change(Monitor, "_wait", ("self._answered_at = now", "pass")),
        MONITOR,
    ),
    "a_dead_stub_leaves_the_server_ready": (change(Monitor, "_judge", (" and not self._dead_stubs()", "")), MONITOR),
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
    "unpacked_packages_are_not_counted": (
        change(packages.Counter, "_unpacked", ("self._installed() - self._before", "self._before")),
        ENVIRONMENT,
    ),
    "test_tools_come_with_serve": (change(environment, "kit_for", ("else SERVING", "else TESTING")), ENVIRONMENT),
    "help_makes_an_environment": (
        change(environment, "_own_python", ("not is_complete", "is_complete")),
        ["tests/deploy/test_written_help.py"],
    ),
    "the_environment_does_not_know_its_checkout": (
        change(environment, "_finish", ("../../../..", "../../..")),
        ENVIRONMENT,
    ),
    "a_model_that_is_not_supported_is_started": (
        change(serve, "serve", ("capacity.examined(config) if config.model.path", "None if config.model.path")),
        CAPACITY,
    ),
    "a_torn_file_is_whole": (change_everywhere(checkpoint.examine, ("tensor_shapes(each)", "each.name")), CAPACITY),
    "kv_of_keys_alone_is_counted": (
        change(checkpoint.Checkpoint, "kv_bytes_per_token", ("* 2 *", "*")),
        CAPACITY,
    ),
    "the_weights_take_no_memory": (
        change(capacity, "_room", ("available - checkpoint.weight_bytes", "available")),
        CAPACITY,
    ),
    "a_model_without_template_is_shown_chatting": (
        change(report, "examples", ('[f"{COMMAND} chat{options}"] * chats', '[f"{COMMAND} chat{options}"]')),
        OPTIONS,
    ),
    "a_chat_template_is_not_tried": (change(chat_template, "check_own", ("if not file:", "if True:")), OPTIONS),
    "the_operators_template_is_forgotten": (
        change(serve, "effective_config", ("options.chat_template or model.chat_template", "model.chat_template")),
        OPTIONS,
    ),
    "a_server_that_was_killed_still_runs": (
        change(running, "_read", ("if Process(found.pid, found.start).alive() else None", "")),
        RUNNING,
    ),
    "the_oldest_server_is_asked": (change(running, "running", ("reverse=True", "reverse=False")), RUNNING),
    "a_server_that_stops_is_asked": (change(running, "locate", ('each.state != "serving"', "0")), RUNNING),
    "an_interrupted_set_up_leaves_pip_behind": (change(packages, "pip", ("process.terminate()", "pass")), ENVIRONMENT),
    "each_checkout_locks_for_itself": (change(environment, "_open_lock", ("venv.resolve()", "venv")), ENVIRONMENT),
    "a_half_made_environment_is_whole": (
        change(environment, "is_complete", (' and not (venv / "incomplete").exists()', "")),
        ENVIRONMENT,
    ),
    "failures_before_it_was_ready_count_for_ever": (
        change(_Supervision, "_start", ("time.monotonic(), 0", "time.monotonic(), self.failures")),
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
