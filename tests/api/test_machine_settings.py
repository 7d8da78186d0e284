"""What is read of this machine and of its environment: endpoints of replicas, the collector of traces, the cores."""

from __future__ import annotations

from pathlib import Path

import pytest

from backend.api.config.endpoints import check_endpoint, endpoint_of_replica, is_bound
from backend.api.config.schema import TelemetryConfig
from backend.api.config.telemetry import OtlpSettings, otlp_settings
from backend.api.errors import ConfigError
from backend.api.processes import setup

HERE = "http://here:4318"
TOLD = {
    "OTEL_EXPORTER_OTLP_ENDPOINT": "https://there:4318/",
    "OTEL_TRACES_SAMPLER_ARG": "0.25",
    "OTEL_SERVICE_NAME": "shop",
    "OTEL_EXPORTER_OTLP_HEADERS": " Api-Key = a%20b%3Dc , X-Team=d=e,",
}


@pytest.mark.parametrize(
    ("endpoint", "bound", "of_replicas"),
    [
        ("tcp://*:5557", True, ["tcp://*:5557", "tcp://*:5558", "tcp://*:5567"]),
        ("tcp://[::]:5557", True, ["tcp://[::]:5557", "tcp://[::]:5558", "tcp://[::]:5567"]),
        ("tcp://10.0.0.1:65535", False, ["tcp://10.0.0.1:65535", "tcp://10.0.0.1:65536", "tcp://10.0.0.1:65545"]),
        ("tcp://[fd00::1]:1", False, ["tcp://[fd00::1]:1", "tcp://[fd00::1]:2", "tcp://[fd00::1]:11"]),
        ("ipc:///run/kv", True, ["ipc:///run/kv", "ipc:///run/kv-1", "ipc:///run/kv-10"]),
        ("", False, ["", "", ""]),
    ],
)
def test_each_replica_has_an_endpoint_of_its_own(endpoint: str, bound: bool, of_replicas: list[str]) -> None:
    assert is_bound(endpoint) is bound
    assert [endpoint_of_replica(endpoint, index) for index in (0, 1, 10)] == of_replicas


@pytest.mark.parametrize(
    "endpoint", ["tcp://*:0", "tcp://*:65536", "tcp://*", "http://a:1", "ipc://run", "ipc:///a\n", "ipc:///" + "é" * 54]
)
def test_what_is_no_endpoint_is_one_sentence(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"^kv_events.endpoint is "):
        check_endpoint("kv_events.endpoint", endpoint)


def test_the_configuration_of_traces_goes_before_the_environment() -> None:
    given = TelemetryConfig(otlp_endpoint=HERE + "/", sample_ratio=0.0, service_name="mine")
    headers = {"api-key": "a b=c", "x-team": "d=e"}
    assert otlp_settings(given, TOLD) == OtlpSettings(HERE, 0.0, "mine", headers)
    assert otlp_settings(TelemetryConfig(), TOLD) == OtlpSettings("https://there:4318", 0.25, "shop", headers)
    assert otlp_settings(TelemetryConfig(otlp_endpoint=HERE), {}) == OtlpSettings(HERE, 1.0, "everbatch", {})


@pytest.mark.parametrize("environment", [{}, TOLD | {"OTEL_SDK_DISABLED": " TRUE "}, {"OTEL_SERVICE_NAME": "shop"}])
def test_without_a_collector_nothing_is_traced(environment: dict[str, str]) -> None:
    assert otlp_settings(TelemetryConfig(), environment) is None


WRONG = {
    "OTEL_TRACES_SAMPLER_ARG": ("nan", "-0.1", "1.01", "1e999", "x"),
    "OTEL_EXPORTER_OTLP_HEADERS": ("secret", "=secret", "a b=secret", "a=secret%0A", "a=s%C3%A9cret"),
    "OTEL_EXPORTER_OTLP_ENDPOINT": ("there:4318", "http://user:secret@there", "http://a/?b", "http://a b"),
}


@pytest.mark.parametrize("changed", [{name: value} for name, values in WRONG.items() for value in values])
def test_what_the_environment_may_not_say_is_named_by_its_variable(changed: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as caught:
        otlp_settings(TelemetryConfig(), TOLD | changed)
    (name,) = changed
    assert str(caught.value).startswith(name)
    assert name.endswith("ENDPOINT") or "cret" not in str(caught.value), "headers hold secrets"


def test_hyper_threads_are_counted_once_where_the_kernel_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cores 0 and 4 are threads of one; of core 9 nothing is told; the process may not run on core 7."""
    for cpu, siblings in ((0, "0,4"), (4, "0,4"), (5, "1,5"), (7, "3,7")):
        place = tmp_path / f"cpu{cpu}"
        place.mkdir()
        (place / "siblings").write_text(siblings + "\n")
    monkeypatch.setattr(setup, "Path", lambda path: tmp_path / path.split("/")[5] / "siblings")
    monkeypatch.setattr(setup.os, "sched_getaffinity", lambda pid: {0, 4, 5, 9})
    assert setup.physical_cores() == 3
    monkeypatch.setattr(setup.os, "sched_getaffinity", lambda pid: {4})
    assert setup.physical_cores() == 1
