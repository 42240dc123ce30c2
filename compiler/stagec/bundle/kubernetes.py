"""Run a bundle's container image in Kubernetes: as a Pod, or with KServe's ServingRuntime and InferenceService.

Formats: https://kubernetes.io/docs/reference/generated/kubernetes-api/v1.35/ (Pod, ImageVolumeSource) and
https://kserve.github.io/website/docs/reference/crd-api (ServingRuntime, InferenceService). A container from another
image runs `stagec serve`; the bundle's image is its volume, by digest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from stagec.bundle.containers import ARCHITECTURES, COMMAND, LISTEN, NOBODY, PORT, architectures
from stagec.bundle.layers import FOLDER
from stagec.core.telling.errors import Problem, StagecError

_MOUNT = "/mnt"
"""The mount point of the image: its files are below `/mnt/models`, like those of all models in KServe."""
_NAME = re.compile("[a-z](?:[a-z0-9-]{0,61}[a-z0-9])?")
"""Names of services (RFC 1035)."""


def manifests(
    index: Mapping[str, Any],
    sha256: str,
    image: str,
    server: str,
    name: str = "",
    limits: Mapping[str, str] | None = None,
    kserve: bool = False,
) -> str:
    """Return the manifest of a Pod, or of a runtime and a service of KServe, as YAML.

    index: of the bundle. sha256: of its file, in hex. image: the container image of the bundle, with its digest.
    server: the image with stagec. name: of the service; "": the bundle's, in the form that Kubernetes allows. limits:
    the resources of the node for the container, by name: `nvidia.com/gpu`, `memory`. Raises StagecError if the name
    cannot be that of a service.
    """
    name = name or index["name"].lower().replace("_", "-").strip("-")
    if not _NAME.fullmatch(name):
        what = f"{name!r} cannot be the name of a service: a letter, then letters, digits and -, 63 in all"
        raise StagecError(Problem("", "--name", what, "give one: --name NAME"))
    annotations = {
        "stagec/name": index["name"],
        "stagec/version": index["version"],
        "stagec/sha256": sha256,
        "stagec/functions": ",".join(index["functions"]),
        "stagec/targets": ",".join(index["targets"]),
    }
    metadata = {"name": name, "labels": {"app.kubernetes.io/name": name}, "annotations": annotations}
    bundle = f"{_MOUNT}/{FOLDER}/{index['name']}.aot"
    container = {
        "image": server,
        "command": COMMAND,
        "args": LISTEN,
        "ports": [{"containerPort": PORT}],
        "readinessProbe": {"httpGet": {"path": "/v2/health/ready", "port": PORT}},
        "livenessProbe": {"httpGet": {"path": "/v2/health/live", "port": PORT}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "runAsUser": NOBODY,
        },
    }
    mount: dict[str, Any] = {"volumeMounts": [{"name": "models", "mountPath": _MOUNT, "readOnly": True}]}
    if limits:
        mount["resources"] = {"limits": dict(limits)}
    machines = [ARCHITECTURES.get(machine, machine) for machine in architectures(index)]
    wanted = {"matchExpressions": [{"key": "kubernetes.io/arch", "operator": "In", "values": machines}]}
    placed = {
        "affinity": {
            "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [wanted]}}
        },
        "volumes": [{"name": "models", "image": {"reference": image, "pullPolicy": "IfNotPresent"}}],
    }
    if not kserve:
        pod = {"containers": [{"name": "server", **container, "args": [*LISTEN, bundle], **mount}], **placed}
        return _documents({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod})
    runtime = {
        "supportedModelFormats": [{"name": "stagec", "version": "1"}],
        "protocolVersions": ["v2"],
        "containers": [{"name": "kserve-container", **container}],
    }
    # KServe puts the arguments of the model behind those of the runtime.
    model = {"modelFormat": {"name": "stagec", "version": "1"}, "runtime": name, "protocolVersion": "v2"}
    # KServe's name for "Standard" before 0.16; newer ones know it too. The other mode, Knative, has no image volumes.
    mode = {"serving.kserve.io/deploymentMode": "RawDeployment"}
    return _documents(
        {"apiVersion": "serving.kserve.io/v1alpha1", "kind": "ServingRuntime", "metadata": metadata, "spec": runtime},
        {
            "apiVersion": "serving.kserve.io/v1beta1",
            "kind": "InferenceService",
            "metadata": {**metadata, "annotations": {**annotations, **mode}},
            "spec": {"predictor": {"model": {**model, "args": [bundle], **mount}, **placed}},
        },
    )


def _documents(*documents: Mapping[str, Any]) -> str:
    return "---\n".join("".join(f"{line}\n" for line in _yaml(document)) for document in documents)


def _yaml(value: Any) -> Iterator[str]:
    """Yield the lines of a value as YAML in blocks; quoted strings are JSON, which is valid YAML."""
    for key, item in value.items() if isinstance(value, Mapping) else ((None, item) for item in value):
        lines = list(_yaml(item)) if isinstance(item, Mapping | list) and item else [json.dumps(item)]
        if key is None:
            yield f"- {lines[0]}"
            yield from (f"  {line}" for line in lines[1:])
        elif isinstance(item, Mapping | list) and item:
            yield f"{key}:"
            yield from (f"  {line}" for line in lines)
        else:
            yield f"{key}: {lines[0]}"
