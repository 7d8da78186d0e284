"""Flags and environment of the server."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from backend.api import EngineConfig
from backend.api.config.schema import TelemetryConfig
from backend.serving.wires.roles import PROFILES
from deploy import invocation, libpython, repository, secret_flags
from deploy.errors import UserError
from deploy.invocation import Installation
from deploy.ports import Ports


def flags(**changes: object) -> list[str]:
    options: dict[str, object] = dict(
        repositories=[Path("/models")], backend_directory=None, host="127.0.0.1", ports=Ports(1, 2, 3), shm_prefix="p_",
        exit_timeout_s=7,
    )  # fmt: skip
    return invocation.command_line(Installation(Path("/bin/server")), **(options | changes))  # type: ignore[arg-type]


def variables(installation: Installation, open_repository: bool = False, **base: str) -> dict[str, str]:
    return invocation.environment(
        installation,
        config_file=Path("/r/config.json"),
        socket_directory=Path("/r"),
        code=Path("/code"),
        run_id="id",
        admin_key="secret",
        open_repository=open_repository,
        exit_timeout_s=7,
        base=base,
    )


def test_every_port_is_bound_to_the_given_address_only() -> None:
    for name, port in (("http", 1), ("grpc", 2), ("metrics", 3)):
        assert f"--{name}-address=127.0.0.1" in flags()
        assert f"--{name}-port={port}" in flags()


def test_dangerous_apis_ask_for_the_secret_on_both_protocols_and_the_command_line_does_not_hold_it() -> None:
    revealed = secret_flags.visible(flags(), variables(Installation(Path("/bin/server"))))
    for flag in ("--http-restricted-api", "--grpc-restricted-protocol"):
        (value,) = [item for item in revealed if item.startswith(flag)]
        assert value.endswith(f"{invocation.ADMIN_HEADER}=secret")
        for api in ("model-repository", "shared-memory", "logging", "trace"):
            assert api in value
    assert not any("secret" in item for item in flags())


def test_the_repository_api_is_open_where_the_operator_says_so_and_nothing_else_is() -> None:
    installation = Installation(Path("/bin/server"))
    open_ones = variables(installation, open_repository=True)
    for name, flag in invocation.SECRET_FLAGS.items():
        assert "model-repository" in flag and "model-repository" in variables(installation)[name]
        assert open_ones[name] == flag.replace("model-repository,", "") + "secret"
        assert all(api in open_ones[name] for api in ("shared-memory", "logging", "trace"))


def test_readiness_can_be_switched_by_loading_models() -> None:
    assert {"--model-control-mode=explicit", "--load-model=*"} <= set(flags())


def test_models_that_wait_for_the_engine_do_not_keep_its_owner_from_loading() -> None:
    (threads,) = [flag for flag in flags() if flag.startswith("--model-load-thread-count=")]
    assert int(threads.partition("=")[2]) >= max(len(models) for models in PROFILES.values())


def test_the_model_file_is_imported_once_and_the_shared_memory_is_ours() -> None:
    assert "--disable-auto-complete-config" in flags()
    assert "--disable-auto-complete-config" not in flags(complete=False)
    assert "--exit-timeout-secs=7" in flags()
    assert "--backend-config=python,shm-region-prefix-name=p_" in flags()


def test_only_a_server_from_the_wheel_gets_a_backend_directory() -> None:
    assert not any(item.startswith("--backend-directory") for item in flags())
    assert "--backend-directory=/b" in flags(backend_directory=Path("/b"))


def test_the_environments_python_is_first_on_the_path_once() -> None:
    bin_directory = str(Path(sys.executable).parent)
    found = variables(Installation(Path("/bin/server")), PATH=f"/usr/bin:{bin_directory}:/bin")
    assert found["PATH"].split(os.pathsep) == [bin_directory, "/usr/bin", "/bin"]


def test_the_environment_names_everything_the_models_look_for() -> None:
    found = variables(Installation(Path("/bin/server")))
    assert found["EVERBATCH_CONFIG"] == "/r/config.json"
    assert found["EVERBATCH_RUN_DIR"] == "/r"
    assert found["EVERBATCH_BACKEND_PATH"] == "/code"
    assert found["EVERBATCH_PYTHON"] == sys.executable
    assert found["EVERBATCH_EXIT_TIMEOUT_S"] == "7"
    assert found["EVERBATCH_RUN_ID"] == "id"
    assert found["EVERBATCH_LOG_FORMAT"] == "text"


def test_the_wheels_stub_gets_the_libpython_of_this_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libpython, "search_path", lambda: ["/own/lib"])
    wheel = Installation(Path("/site/w/t/bin/server"), wheel=Path("/site/w/t"))
    assert variables(wheel, LD_LIBRARY_PATH="/other")["LD_LIBRARY_PATH"] == "/own/lib:/site/nvidia_pytriton.libs:/other"
    assert "LD_LIBRARY_PATH" not in variables(Installation(Path("/bin/server")))


@pytest.fixture
def wheel(tmp_path: Path) -> Installation:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    for name in (
        "bin/tritonserver",
        "backends/python/libtriton_python.so",
        "backends/python/triton_python_backend_utils.py",
        f"python_backend_stubs/{version}/triton_python_backend_stub",
    ):
        path = tmp_path / "wheel" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return Installation(tmp_path / "wheel" / "bin" / "tritonserver", tmp_path / "wheel")


def test_the_backend_directory_is_a_copied_library_and_links_and_the_wheel_stays_untouched(
    wheel: Installation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libpython, "find", lambda version=None: "/lib/libpython.so")
    before = sorted(tmp_path.joinpath("wheel").rglob("*"))
    for _ in range(2):  # a second start replaces the links
        directory = invocation.prepare_backend_directory(wheel, tmp_path / "backends")
    links = {path.name for path in (tmp_path / "backends" / "python").iterdir() if path.is_symlink()}
    library = tmp_path / "backends" / "python" / "libtriton_python.so"
    assert directory == tmp_path / "backends"
    assert links == {"triton_python_backend_utils.py", "triton_python_backend_stub"}
    assert library.read_text() == "backends/python/libtriton_python.so" and not library.is_symlink()
    assert sorted(tmp_path.joinpath("wheel").rglob("*")) == before


def test_the_backends_of_this_project_are_linked_beside_tritons(
    wheel: Installation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libpython, "find", lambda version=None: "/lib/libpython.so")
    own = tmp_path / "own" / "words" / "model.py"
    own.parent.mkdir(parents=True)
    own.write_text("# backend\n")
    for module in (invocation, repository):
        monkeypatch.setattr(module, "BACKENDS", tmp_path / "own")
    invocation.prepare_backend_directory(wheel, tmp_path / "backends")
    assert (tmp_path / "backends" / "words" / "model.py").resolve() == own


def test_a_missing_libpython_names_the_one_command(
    wheel: Installation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libpython, "find", lambda version=None: None)
    with pytest.raises(UserError, match="apt-get install -y libpython3"):
        invocation.prepare_backend_directory(wheel, tmp_path / "backends")


def test_a_python_without_a_stub_is_refused(wheel: Installation, tmp_path: Path) -> None:
    for stub in wheel.wheel.rglob("triton_python_backend_stub"):  # type: ignore[union-attr]
        stub.unlink()
    with pytest.raises(UserError, match="no stub for Python"):
        invocation.prepare_backend_directory(wheel, tmp_path / "backends")


def test_the_headers_of_traces_are_forwarded_only_where_there_is_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    assert invocation.tracing_flags(EngineConfig(), {}) == ()
    pattern = "(traceparent|tracestate)"
    flags = (f"--grpc-header-forward-pattern={pattern}", f"--http-header-forward-pattern={pattern}")
    config = EngineConfig(telemetry=TelemetryConfig(otlp_endpoint="http://collector:4318"))
    assert invocation.tracing_flags(config, {}) == flags
    assert invocation.tracing_flags(EngineConfig(), {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}) == flags
