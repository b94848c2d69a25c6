"""The Kubernetes manifests, held against the program: names, ports, times, labels.

`make deploy-check` builds the overlays and validates them against Kubernetes' own schemas.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tokenmill import __version__
from tokenmill.keys import GROUP, Keyspace
from tokenmill_worker.settings import Settings

REPOSITORY = Path(__file__).resolve().parents[2]
K8S = REPOSITORY / "deploy" / "k8s"
FILES = sorted(file for file in K8S.rglob("*.yaml"))
POD_OWNERS = ("Deployment", "StatefulSet")
WORKER_OPTIONS = {f"TOKENMILL_{name.upper()}" for name in Settings.model_fields}
#: What deploy/secrets.sh makes.
SECRET_KEYS = {"admin", "worker", "producer", "observer", "metrics", "grafana", "users.acl"}


def documents(*files: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    for file in files or FILES:
        for document in yaml.safe_load_all(file.read_text()):
            yield file, document


def is_patch(file: Path) -> bool:
    return file.name == "worker.yaml" and file.parent.name != "base"


def complete_pods() -> list[Any]:
    """(name, pod template) of everything that makes pods, patches left out."""
    return [
        pytest.param(document["spec"]["template"], id=document["metadata"]["name"])
        for file, document in documents()
        if document["kind"] in POD_OWNERS and not is_patch(file)
    ]


def one(kind: str, name: str) -> dict[str, Any]:
    (found,) = (
        document
        for file, document in documents()
        if (document["kind"], document.get("metadata", {}).get("name")) == (kind, name)
        and not is_patch(file)
        and "keda-streams" not in file.parts
    )
    return found


def worker() -> dict[str, Any]:
    spec: dict[str, Any] = one("Deployment", "tokenmill-worker")["spec"]["template"]["spec"]
    return spec


@pytest.mark.parametrize("pod", complete_pods())
def test_no_pod_may_do_more_than_it_must(pod: dict[str, Any]) -> None:
    spec = pod["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in [*spec["containers"], *spec.get("initContainers", [])]:
        assert container["securityContext"] == {
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }


@pytest.mark.parametrize("pod", complete_pods())
def test_variables_of_services_do_not_pass_for_options(pod: dict[str, Any]) -> None:
    # Of a Service `tokenmill-redis` come TOKENMILL_REDIS_PORT, _SERVICE_HOST and more.
    assert pod["spec"]["enableServiceLinks"] is False


@pytest.mark.parametrize("pod", complete_pods())
def test_what_is_mounted_is_declared(pod: dict[str, Any]) -> None:
    declared = {volume["name"] for volume in pod["spec"]["volumes"]} | {"data"}
    for container in [*pod["spec"]["containers"], *pod["spec"].get("initContainers", [])]:
        assert {mount["name"] for mount in container["volumeMounts"]} <= declared


@pytest.mark.parametrize("pod", complete_pods())
def test_secrets_are_those_that_the_script_makes(pod: dict[str, Any]) -> None:
    for volume in pod["spec"]["volumes"]:
        if "secret" in volume:
            assert volume["secret"]["secretName"] == "tokenmill-redis"
            assert {item["key"] for item in volume["secret"]["items"]} <= SECRET_KEYS


def test_every_variable_of_the_worker_is_one_of_its_options() -> None:
    given = {
        variable["name"]
        for file, document in documents()
        if document["kind"] == "Deployment" and document["metadata"]["name"] == "tokenmill-worker"
        for container in document["spec"]["template"]["spec"]["containers"]
        for variable in container.get("env", [])
    }
    configured = (K8S / "base" / "configuration.env").read_text().splitlines()
    given |= {line.split("=")[0] for line in configured if line}
    overlay = yaml.safe_load((K8S / "overlays" / "gpu-prod" / "kustomization.yaml").read_text())
    for generator in overlay["configMapGenerator"]:
        given |= {literal.split("=")[0] for literal in generator["literals"]}
    assert given <= WORKER_OPTIONS


def test_the_time_to_end_is_enough_for_a_drain() -> None:
    spec = worker()
    options = {each["name"]: each.get("value") for each in spec["containers"][0]["env"]}
    drain_s = float(options["TOKENMILL_DRAIN_GRACE_S"])
    handover_s = float(Settings.model_fields["handover_timeout_s"].default)
    # A drain has three steps with that limit: the end of the read, of the writes, the releases.
    assert spec["terminationGracePeriodSeconds"] > drain_s + 3 * handover_s


def test_probes_ask_what_the_worker_answers() -> None:
    source = (REPOSITORY / "worker" / "tokenmill_worker" / "worker.py").read_text()
    container = worker()["containers"][0]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert f'"{container[probe]["httpGet"]["path"]}"' in source
    # An outage of Redis makes workers unready; it must not restart them.
    assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"
    (port,) = container["ports"]
    dockerfile = (REPOSITORY / "Dockerfile").read_text()
    assert f"TOKENMILL_METRICS_PORT={port['containerPort']}" in dockerfile


@pytest.mark.parametrize("kind", ["Service", "PodDisruptionBudget", "NetworkPolicy"])
def test_selectors_find_their_pods(kind: str) -> None:
    labels = {
        name: {"app.kubernetes.io/name": "tokenmill", **pod["metadata"]["labels"]}
        for name, pod in ((each.id, each.values[0]) for each in complete_pods())
    }
    for _, document in documents():
        if document["kind"] == kind:
            spec = document["spec"]
            selector = spec.get("selector") or spec["podSelector"]
            wanted = selector.get("matchLabels", selector).items()
            assert any(wanted <= each.items() for each in labels.values()), document["metadata"]


def test_who_connects_to_redis_carries_the_label_that_its_policy_asks_for() -> None:
    policy = one("NetworkPolicy", "tokenmill-redis")["spec"]["ingress"][0]["from"][0]
    wanted = policy["podSelector"]["matchLabels"].items()
    for name in ("tokenmill-worker", "tokenmill-exporter"):
        template = one("Deployment", name)["spec"]["template"]
        assert wanted <= template["metadata"]["labels"].items()


def test_rolling_never_has_fewer_workers() -> None:
    update = one("Deployment", "tokenmill-worker")["spec"]["strategy"]["rollingUpdate"]
    assert (update["maxSurge"], update["maxUnavailable"]) == (1, 0)


def test_only_the_autoscaler_says_how_many_workers() -> None:
    # Every `apply` would set the number back.
    assert "replicas" not in one("Deployment", "tokenmill-worker")["spec"]
    overlay = yaml.safe_load((K8S / "overlays" / "gpu-prod" / "kustomization.yaml").read_text())
    assert "replicas" not in overlay


@pytest.mark.parametrize("component", ["keda", "keda-streams"])
def test_no_answer_is_not_taken_for_no_work(component: str) -> None:
    (scaled,) = (
        document
        for _, document in documents(K8S / "components" / component / "scaled-object.yaml")
        if document["kind"] == "ScaledObject"
    )
    assert scaled["spec"]["fallback"]["replicas"] >= 1
    assert scaled["spec"]["scaleTargetRef"]["name"] == "tokenmill-worker"
    # Activation above 0 would let a single request wait for ever (docs/kubernetes.md).
    for trigger in scaled["spec"]["triggers"]:
        assert trigger["metricType"] == "AverageValue"  # the fallback works with no other
        metadata = trigger["metadata"]
        activation = metadata.get("activationLagCount", metadata.get("activationTargetValue"))
        assert activation == "0"


def test_keda_reads_the_streams_and_the_group_of_the_protocol() -> None:
    (scaled,) = (
        document["spec"]
        for _, document in documents(K8S / "components" / "keda-streams" / "scaled-object.yaml")
        if document["kind"] == "ScaledObject"
    )
    metadata = [trigger["metadata"] for trigger in scaled["triggers"]]
    streams = set(Keyspace().ready_streams.values())
    assert {each["consumerGroup"] for each in metadata} == {GROUP}
    for measure in ("lagCount", "pendingEntriesCount"):
        assert {each["stream"] for each in metadata if measure in each} == streams


def test_the_work_signal_is_asked_of_the_exporter() -> None:
    (trigger,) = one("ScaledObject", "tokenmill-worker")["spec"]["triggers"]
    url = re.fullmatch(r"http://([\w-]+)\.tokenmill\.svc:(\d+)/scaling", trigger["metadata"]["url"])
    assert url is not None
    service = one("Service", url[1])
    assert [port["port"] for port in service["spec"]["ports"]] == [int(url[2])]


@pytest.mark.parametrize("overlay", ["cpu-demo", "gpu-prod"])
def test_images_are_of_this_version(overlay: str) -> None:
    document = yaml.safe_load((K8S / "overlays" / overlay / "kustomization.yaml").read_text())
    (image,) = document["images"]
    assert image["newTag"].split("-")[0] == __version__


def test_no_image_floats() -> None:
    for _, document in documents():
        if document["kind"] in POD_OWNERS:
            for container in document["spec"]["template"]["spec"]["containers"]:
                image = container.get("image", "tokenmill")
                assert image == "tokenmill" or re.search(r":\d", image), image
