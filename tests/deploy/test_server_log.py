"""From a server's log to what a person wants to know."""

from __future__ import annotations

from pathlib import Path

from deploy import server_log

LOG = """\
W1120 21:25:22.478944 9107 pinned_memory_manager.cc:273] "Unable to allocate pinned system memory"
I1120 21:25:22.479100 9107 model_lifecycle.cc:472] "loading: ensemble:1"
E1120 21:25:22.479200 9107 server.cc:241] "CudaDriverHelper has not been initialized."
2026-11-20 21:25:24,216 tensorrt_llm INFO everbatch.supervisor: engine: loading torch
2026-11-20 21:25:25,216 tensorrt_llm INFO everbatch.supervisor: engine: loading the model
Traceback (most recent call last):
ModuleNotFoundError: No module named 'nothing'
+----------+-------+
| Option   | Value |
E1120 21:25:24.490407 9107 backend.cc:692] "ERROR: Failed to create: it broke\\n\\nAt:\\n  model.py(58): start"
"""


def test_noise_is_left_out_and_the_reason_stays() -> None:
    lines = server_log.telling_lines(LOG.splitlines())
    assert not any(
        word in "\n".join(lines) for word in ("CudaDriver", "pinned", "loading: ensemble", "Option", "model.py")
    )
    assert "ModuleNotFoundError: No module named 'nothing'" in lines
    assert lines[-1].endswith("it broke")


def test_the_errors_by_which_readiness_is_switched_off_tell_nothing() -> None:
    assert server_log.telling_lines(["E1120 model.cc:1] \"failed to load 'everbatch_not_ready'\"", "it broke"]) == [
        "it broke"
    ]


def test_the_latest_phase_of_the_engine_is_known() -> None:
    assert server_log.engine_phase(LOG.splitlines()) == "loading the model"
    assert server_log.engine_phase(["nothing of it"]) is None


def test_only_the_end_of_a_long_log_is_read(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text("first\n" + "x" * (2 * server_log.TAIL_BYTES) + "\nlast\n")
    assert server_log.tail(path)[-1] == "last"
    assert "first" not in server_log.tail(path)
    assert server_log.tail(tmp_path / "none") == []


def test_the_server_says_when_only_unloading_is_left() -> None:
    waiting = ['I1120 server.cc:305] "Waiting for in-flight requests to complete."']
    assert not server_log.is_unloading(waiting)
    assert server_log.is_unloading([*waiting, 'I1120 server.cc:336] "All models are stopped, unloading models"'])


def test_json_lines_are_read_as_the_text_that_they_would_be(tmp_path: Path) -> None:
    line = (
        '{"time": "2026-11-20T21:25:24.216+00:00", "level": "INFO", "process": "tensorrt_llm", '
        '"logger": "everbatch.supervisor", "message": "engine: loading torch"}\n'
    )
    (tmp_path / "server.log").write_text(line)
    assert server_log.engine_phase(server_log.tail(tmp_path / "server.log")) == "loading torch"


def test_what_the_engine_remarks_is_found_once_each_also_in_json() -> None:
    remark = "kv_cache.block_size is 16: it is 32 in this server"
    line = f"2026-11-20 21:25:26,216 tensorrt_llm WARNING everbatch.supervisor: remark: {remark}"
    json_line = (
        '{"time": "2026-11-20T21:25:24.216+00:00", "level": "WARNING", "process": "tensorrt_llm", '
        '"logger": "everbatch.supervisor", "message": "remark: another"}'
    )
    assert server_log.remarks([*LOG.splitlines(), line, line, server_log.plain(json_line)]) == [remark, "another"]
    assert server_log.remarks(LOG.splitlines()) == []
