"""model_repository/*/1/model.py and the process they run in."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Never

import numpy as np
import pytest

from backend.api import ConfigError, EngineConfig
from backend.serving import assembly
from backend.serving.lifecycle import environment
from backend.serving.lifecycle.environment import RunDirectory, check_numpy
from backend.serving.wires.roles import PROFILES
from tests.serving.helpers import streamed
from tests.serving.scripted import ScriptedExecutor

ROOT = Path(__file__).resolve().parents[2]
ADAPTERS = sorted((ROOT / "model_repository").glob("*/1/model.py"))
ARGS = {"model_version": "1", "model_config": '{"model_transaction_policy": {"decoupled": true}}'}


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"adapter_{path.parents[1].name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.TritonPythonModel()


def test_each_model_has_a_thin_adapter() -> None:
    assert {path.parents[1].name for path in ADAPTERS} == set(PROFILES["trtllm"])
    assert all(len(path.read_text().splitlines()) <= 60 for path in ADAPTERS)


@pytest.mark.feature("000-59")
@pytest.mark.parametrize("path", ADAPTERS, ids=lambda path: path.parents[1].name)
def test_an_adapter_loads_serves_and_finalizes(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    executor = ScriptedExecutor(model_path=str(ROOT / "models" / "default"))
    monkeypatch.setenv("EVERBATCH_RUN_DIR", str(tmp_path))
    monkeypatch.delenv("EVERBATCH_CONFIG", raising=False)
    monkeypatch.setattr(assembly.Executor, "launch", lambda config, socket_path: executor)
    monkeypatch.setattr(assembly.Executor, "attach", lambda socket_path, wait_s: executor)
    interval = sys.getswitchinterval()
    model = load(path)
    model.initialize({**ARGS, "model_name": path.parents[1].name})
    request = streamed([[1, 2]])
    assert model.execute([request]) is None
    if path.parents[1].name == "tensorrt_llm":
        executor.end(1, 5)
        assert request.sender.column("output_ids") == [5]
    else:  # a text model has no input_ids
        assert request.sender.error().startswith("[INVALID_ARGUMENT] Unexpected input")
    assert model.is_ready()
    model.finalize()
    assert executor.was_shut_down
    sys.setswitchinterval(interval)


def test_an_engine_that_does_not_start_leaves_no_claim(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(config: EngineConfig, socket_path: str) -> Never:
        raise ConfigError("model.path: File does not exist")

    monkeypatch.setenv("EVERBATCH_RUN_DIR", str(tmp_path))
    monkeypatch.setattr(assembly.Executor, "launch", fail)
    with pytest.raises(ConfigError, match="File does not exist"):
        assembly.load_model({**ARGS, "model_name": "tensorrt_llm"})
    assert not RunDirectory(tmp_path).has_owner()


def test_a_text_model_waits_for_a_living_owner_and_not_for_a_dead_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "OWNER_START_S", 0.05)
    directory = RunDirectory(tmp_path)
    assert not directory.wait_for_engine(lambda: False, timeout_s=60), "nobody starts an engine here"
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    (tmp_path / "owner.pid").write_text(str(child.pid))
    assert not directory.wait_for_engine(lambda: False, timeout_s=60), "its owner is dead"
    directory.claim("tensorrt_llm")
    answers = iter([False] * 10 + [True])
    assert directory.wait_for_engine(lambda: next(answers), timeout_s=60)


def test_one_living_model_owns_the_engine_and_one_that_is_loaded_anew_keeps_it(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    assert directory.claim("tensorrt_llm")
    assert not directory.claim("a_copy"), "its engine runs already"
    assert directory.claim("tensorrt_llm")
    pid, start, model = (tmp_path / "owner.pid").read_text().split()
    (tmp_path / "owner.pid").write_text(f"{pid} {int(start) - 1} {model}")
    assert directory.claim("a_copy"), "this process has got the number of the one that claimed it"
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    (tmp_path / "owner.pid").write_text(f"{child.pid} {start} tensorrt_llm")
    assert directory.claim("a_copy"), "the claimant is dead"


def test_a_second_model_of_the_owners_role_is_a_client_of_its_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EVERBATCH_RUN_DIR", str(tmp_path))
    assert RunDirectory(tmp_path).claim("tensorrt_llm")
    monkeypatch.setattr(assembly.Executor, "launch", lambda *_: pytest.fail("a second engine was started"))
    running = ScriptedExecutor()
    monkeypatch.setattr(assembly, "_attach", lambda *_: running)
    monkeypatch.setattr(assembly, "ModelServer", lambda *arguments: arguments)
    config = {"parameters": {"role": {"string_value": "tensorrt_llm"}}}
    arguments: Any = assembly.load_model({**ARGS, "model_name": "a_copy", "model_config": json.dumps(config)})
    model, executor, _ = arguments
    assert executor is running and model.owner is False


def test_without_a_launcher_the_models_of_one_server_meet_in_a_private_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("EVERBATCH_RUN_DIR", raising=False)
    monkeypatch.setattr(environment.tempfile, "gettempdir", lambda: str(tmp_path))
    path = Path(RunDirectory.of_this_server().socket_path)
    assert path.name == "engine.sock" and path.parent.stat().st_mode & 0o777 == 0o700
    assert path.parent.name == f"everbatch-{os.getuid()}-{os.getppid()}"
    path.parent.chmod(0o755)
    with pytest.raises(ConfigError, match="not private"):
        RunDirectory.of_this_server()


def test_numpy_2_is_refused_where_the_round_trip_fails_and_numpy_1_is_never_tried(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(np, "__version__", "2.2.6")
    with pytest.raises(ConfigError, match=r"numpy 2\.2\.6 does not fit this tritonserver.*'numpy<2'"):
        check_numpy(lambda: False)
    check_numpy(lambda: True)
    monkeypatch.setattr(np, "__version__", "1.26.4")
    check_numpy(lambda: False)
    assert f"Python environment {sys.prefix}, numpy 1.26.4" in capsys.readouterr().out


def test_the_stub_process_imports_neither_torch_nor_transformers() -> None:
    program = (
        "import sys; from tests.serving import fake_triton\n"
        "sys.modules['triton_python_backend_utils'] = fake_triton\n"
        "import backend.serving.assembly\n"
        "heavy = {'torch', 'transformers', 'triton', 'ray', 'safetensors'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_tables_and_parsing_need_no_triton() -> None:
    program = (
        "import backend.serving.tensors, backend.serving.model_config, backend.serving.intake.batch\n"
        "import backend.serving.wires.word_lists, backend.serving.wires.trtllm_tokens, backend.serving.wires.trtllm_text\n"
        "import sys; assert 'triton_python_backend_utils' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_serving_is_the_only_package_that_imports_triton_python_backend_utils() -> None:
    users = set()
    for path in [*(ROOT / "backend").rglob("*.py"), *(ROOT / "model_repository").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if "triton_python_backend_utils" in names:
                users.add(path.relative_to(ROOT).as_posix())
    assert users == {"backend/serving/pb.py"}
