"""docker-compose.yml against the compose specification's keys that are used, and against the rules of this project.

There is no Docker engine where the tests run, so structure and values are what can be checked.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from deploy import ROOT
from gateway.__main__ import settings_of
from tools import write_dashboards

COMPOSE = ROOT / "docker-compose.yml"
GPU = ROOT / "deploy" / "gpu.yml"  # given besides
DURATION = re.compile(r"^(\d+h)?(\d+m)?(\d+s)?$")
BYTES = re.compile(r"^\d+(b|k|kb|m|mb|g|gb)$")
PORT = re.compile(r"^(127\.0\.0\.1:)?\d+:\d+$")
SERVICE_KEYS: dict[str, type | tuple[type, ...]] = {
    "build": dict, "image": str, "init": bool, "user": str, "read_only": bool, "cap_drop": list, "security_opt": list,
    "shm_size": (str, int), "mem_limit": (str, int), "ulimits": dict, "pids_limit": int, "tmpfs": (list, str),
    "volumes": list, "ports": list, "command": (list, str),
    "stop_grace_period": str, "restart": str, "healthcheck": dict, "profiles": list,
    "deploy": dict, "depends_on": list, "environment": dict, "entrypoint": list,
}  # fmt: skip
BESIDE = ("gateway", "prometheus", "grafana")
HEALTH_KEYS = {"test", "interval", "timeout", "retries", "start_period"}


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return yaml.safe_load(COMPOSE.read_text())


@pytest.fixture
def service(document: dict[str, Any]) -> dict[str, Any]:
    return document["services"]["everbatch"]


def test_a_gpu_is_given_to_the_same_service_so_that_no_second_one_wants_its_ports(document: dict[str, Any]) -> None:
    given = yaml.safe_load(GPU.read_text())["services"]
    assert set(given) == {"everbatch"} and set(given["everbatch"]) == {"deploy"}
    (device,) = given["everbatch"]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    assert not any("gpu" in service.get("profiles", []) for service in document["services"].values())


def test_a_model_of_the_hub_and_its_token_are_taken_from_the_environment(service: dict[str, Any]) -> None:
    assert "${EVERBATCH_MODEL:-/model}" in service["command"]
    assert service["environment"] == {"HF_TOKEN": "${HF_TOKEN:-}"}


def seconds(duration: str) -> int:
    hours, minutes, rest = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", duration).groups("0")  # type: ignore[union-attr]
    return int(hours) * 3600 + int(minutes) * 60 + int(rest)


def test_the_document_has_only_keys_of_the_specification(document: dict[str, Any]) -> None:
    assert set(document) - {key for key in document if key.startswith("x-")} == {"services", "volumes"}


def test_a_service_has_only_known_keys_with_the_right_types(service: dict[str, Any]) -> None:
    for key, value in service.items():
        assert key in SERVICE_KEYS, key
        assert isinstance(value, SERVICE_KEYS[key]), (key, value)


def test_values_have_the_forms_of_the_specification(service: dict[str, Any]) -> None:
    assert BYTES.match(service["shm_size"])
    assert BYTES.match(re.sub(r"^\$\{[A-Z_]+:-(.*)\}$", r"\1", service["mem_limit"]))
    assert all(PORT.match(port) for port in service["ports"])
    assert DURATION.match(service["stop_grace_period"])
    assert all(isinstance(limit, (int, dict)) for limit in service["ulimits"].values())
    assert re.match(r"^(no|always|unless-stopped|on-failure(:\d+)?)$", service["restart"])
    assert all(entry.startswith("/") for entry in service["tmpfs"])
    health = service["healthcheck"]
    assert set(health) == HEALTH_KEYS
    assert health["test"][0] in ("CMD", "CMD-SHELL") and isinstance(health["retries"], int)
    assert all(DURATION.match(health[key]) for key in ("interval", "timeout", "start_period"))


def test_every_named_volume_is_declared_and_every_file_exists(
    service: dict[str, Any], document: dict[str, Any]
) -> None:
    for volume in service["volumes"]:
        name = with_defaults(volume).split(":", 1)[0]
        assert name.startswith((".", "/")) or name in document["volumes"]
    assert (ROOT / service["build"]["context"] / service["build"]["dockerfile"]).is_file()


def with_defaults(value: str) -> str:
    """A value of the file where none of its variables is set."""
    return re.sub(r"\$\{[A-Z_]+:-([^}]*)\}", r"\1", value)


def test_the_model_that_is_served_is_the_one_that_is_mounted(service: dict[str, Any]) -> None:
    mounts = dict(reversed(with_defaults(volume).split(":")[:2]) for volume in service["volumes"])
    given = with_defaults(dict(zip(service["command"][::2], service["command"][1::2]))["--model"])
    assert (ROOT / mounts[given] / "config.json").is_file(), "the default is this project's own model"
    assert any(volume.startswith("${EVERBATCH_MODEL_DIR:-") and volume.endswith(":ro") for volume in service["volumes"])


def test_the_container_has_few_rights(service: dict[str, Any]) -> None:
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert service["user"].split(":")[0] not in ("", "0", "root")
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])


def test_the_engine_has_shared_memory_and_the_http_front_its_stack(service: dict[str, Any]) -> None:
    assert service["shm_size"] == "1gb"
    assert service["ulimits"]["stack"]["hard"] == -1


def test_the_container_waits_longer_than_the_exit_timeout(service: dict[str, Any]) -> None:
    command = service["command"]
    exit_timeout = int(command[command.index("--exit-timeout") + 1])
    assert seconds(service["stop_grace_period"]) > exit_timeout + 10


def test_health_is_asked_of_readiness_and_the_run_directory_is_private_memory(service: dict[str, Any]) -> None:
    *command, url = service["healthcheck"]["test"]
    assert command == ["CMD", "python3", "-P", "-m", "deploy.probe"] and url.startswith("http://127.0.0.1:")
    root = re.search(r"EVERBATCH_RUN_ROOT=(\S+)", (ROOT / "deploy" / "Dockerfile").read_text())
    assert root is not None
    assert any(entry.startswith(f"{root[1]}:") for entry in service["tmpfs"])


@pytest.mark.parametrize("name", BESIDE)
def test_what_stands_beside_the_server_has_few_rights_and_starts_only_when_asked_for(
    name: str, document: dict[str, Any]
) -> None:
    service = document["services"][name]
    test_a_service_has_only_known_keys_with_the_right_types(service)
    test_the_container_has_few_rights(service)
    assert service["profiles"] and re.fullmatch(r"[a-z/]+:(latest|v?\d+\.\d+\.\d+)", service["image"])
    assert all(each in document["services"] for each in service["depends_on"])
    for volume in service.get("volumes", []):
        place = volume.split(":", 1)[0]
        assert place in document["volumes"] or ((ROOT / place).exists() and volume.endswith(":ro")), volume


def test_no_two_services_take_the_same_port(document: dict[str, Any]) -> None:
    ports = [port for service in document["services"].values() for port in service["ports"]]
    taken = [port.rsplit(":", 1)[0] for port in ports]
    assert len(set(taken)) == len(taken)


def test_the_endpoint_takes_the_options_that_it_is_given(document: dict[str, Any]) -> None:
    settings = settings_of(document["services"]["gateway"]["command"])
    assert settings.triton.startswith("everbatch:") and settings.metrics_url is not None


def test_prometheus_reads_the_endpoint_that_the_server_has(document: dict[str, Any]) -> None:
    config = yaml.safe_load((ROOT / "deploy" / "monitoring" / "prometheus.yml").read_text())
    (target,) = config["scrape_configs"][0]["static_configs"][0]["targets"]
    name, port = target.split(":")
    assert any(each.endswith(f":{port}") for each in document["services"][name]["ports"])


def test_the_dashboards_are_those_of_the_tables() -> None:
    stored = {path.name: path.read_text() for path in write_dashboards.DIRECTORY.iterdir()}
    assert write_dashboards.texts() == stored, "run python -m tools.write_dashboards"
