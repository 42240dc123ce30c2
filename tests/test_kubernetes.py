"""Manifests of Kubernetes and KServe, held against the published schemas, and a server as a Pod starts it.

Modules: `bundle/kubernetes.py`, `cli/kubernetes.py`.
"""

import ast
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import zipfile
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from referencing import Registry
from referencing.jsonschema import DRAFT202012

from stagec.bundle.archive import Archive
from tests.building import ROOT, checked, stagec as command
from tests.bundles import edited_index, without_executables
from tests.signed import write_bundle_of

IMAGE, SERVER = "registry.example.com/models/zoo", "registry.example.com/server@sha256:0123"
KUBERNETES = ("1.31.0", "1.37.0")
"""The first release with image volumes, and the newest that the wheel has."""


@pytest.fixture(scope="module")
def bundle(zoo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle_of(zoo, tmp_path_factory.mktemp("kubernetes"), "loop")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, zipfile.ZipFile]:
    """The wheels of `kubernetes.lock` by the names of their packages."""
    folder = tmp_path_factory.mktemp("wheels")
    words = ("download", "--quiet", "--no-deps", "--require-hashes", "--only-binary=:all:", "--dest", folder)
    subprocess.run([sys.executable, "-m", "pip", *words, "-r", ROOT / "tests" / "kubernetes.lock"], check=True)
    return {path.name.partition("-")[0]: zipfile.ZipFile(path) for path in folder.iterdir()}


def written(bundle: Path, *options: str) -> list[dict[str, Any]]:
    """Return the manifests that the command prints."""
    return [*yaml.safe_load_all(checked("kubernetes", bundle, f"{IMAGE}:1", "--server", SERVER, *options))]


def definitions(wheel: zipfile.ZipFile, version: str) -> tuple[dict[str, Any], "Registry[Any]"]:
    """Return the schemas of a release of Kubernetes, in which an unknown key is an error, and what resolves them."""
    path = f"kubernetes_validate/kubernetes-json-schema/v{version}-local-strict/_definitions.json"
    schemas = json.loads(wheel.read(path))
    return schemas["$defs"], Registry().with_resource("/api/_definitions.json", DRAFT202012.create_resource(schemas))


def check(value: dict[str, Any], schema: dict[str, Any], registry: "Registry[Any]") -> None:
    jsonschema.Draft202012Validator(schema, registry=registry).validate(value)


def refers_to(definition: str) -> dict[str, Any]:
    return {"$ref": f"/api/_definitions.json#/$defs/{definition}"}


@pytest.mark.parametrize("version", KUBERNETES)
def test_a_pod_is_as_kubernetes_says(bundle: Path, wheels: dict[str, zipfile.ZipFile], version: str) -> None:
    _, registry = definitions(wheels["kubernetes_validate"], version)
    schema = refers_to("io.k8s.api.core.v1.Pod")
    (pod,) = written(bundle, "--limit", "nvidia.com/gpu=1", "--limit", "memory=2Gi")
    check(pod, schema, registry)
    assert pod["spec"]["containers"][0]["resources"] == {"limits": {"nvidia.com/gpu": "1", "memory": "2Gi"}}
    with pytest.raises(jsonschema.ValidationError, match="'imagine' was unexpected"):
        check({**pod, "spec": {**pod["spec"], "volumes": [{"name": "models", "imagine": {}}]}}, schema, registry)


def kserve_schemas(wheel: zipfile.ZipFile, kubernetes: dict[str, Any]) -> dict[str, Any]:
    """Return the schemas of KServe's classes, which its client has in Python, generated from OpenAPI.

    kubernetes: the schemas of Kubernetes, which they refer to.
    """
    shared = {name.rpartition(".")[2]: name for name in kubernetes if ".v1." in name}

    def schema_of(kind: str) -> dict[str, Any]:
        plain = {"str": "string", "int": "integer", "bool": "boolean", "float": "number", "object": "object"}
        if kind in plain:
            return {"type": plain[kind]}
        if match := re.fullmatch(r"list\[(.*)\]", kind):
            return {"type": "array", "items": schema_of(match[1])}
        if match := re.fullmatch(r"dict\(str, (.*)\)", kind):
            return {"type": "object", "additionalProperties": schema_of(match[1])}
        if kind in classes:
            return {"$ref": f"#/$defs/{kind}"}
        return refers_to(shared[kind.removeprefix("V1")]) if kind.removeprefix("V1") in shared else {}

    sources = [
        wheel.read(name).decode()
        for name in wheel.namelist()
        if re.fullmatch(r"kserve/models/v\w+\.py", name) and b"openapi_types" in wheel.read(name)
    ]
    classes = {}
    for source in sources:
        (made,) = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
        tables = {
            node.targets[0].id: ast.literal_eval(node.value)
            for node in made.body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
        required = re.findall(r"client_side_validation and (\w+) is None", source)
        classes[made.name] = (tables["openapi_types"], tables["attribute_map"], required)
    return {
        name: {
            "type": "object",
            "properties": {keys[field]: schema_of(kind) for field, kind in types.items()},
            "required": [keys[field] for field in required],
            "additionalProperties": False,
        }
        for name, (types, keys, required) in classes.items()
    }


def test_a_service_is_as_kserve_says(bundle: Path, wheels: dict[str, zipfile.ZipFile]) -> None:
    kubernetes, registry = definitions(wheels["kubernetes_validate"], KUBERNETES[1])
    schemas = kserve_schemas(wheels["kserve"], kubernetes)
    runtime, service = written(bundle, "--kserve")
    for value, name in ((runtime, "V1alpha1ServingRuntime"), (service, "V1beta1InferenceService")):
        check(value, {"$defs": schemas, "$ref": f"#/$defs/{name}"}, registry)
    # The schemas see what is wrong: a key of KServe's, one of Kubernetes below it, and one that is missing.
    schema = {"$defs": schemas, "$ref": "#/$defs/V1beta1InferenceService"}
    for path, key, value in (
        (("spec", "predictor"), "modle", {}),
        (("spec", "predictor", "volumes", 0, "image"), "digest", "x"),
        (("spec", "predictor", "model"), "args", "x"),
    ):
        wrong = json.loads(json.dumps(service))
        at = wrong
        for step in path:
            at = at[step]
        at[key] = value
        with pytest.raises(jsonschema.ValidationError):
            check(wrong, schema, registry)
    wrong = json.loads(json.dumps(runtime))
    del wrong["spec"]["containers"]
    with pytest.raises(jsonschema.ValidationError, match="'containers' is a required property"):
        check(wrong, {"$defs": schemas, "$ref": "#/$defs/V1alpha1ServingRuntime"}, registry)


def test_what_they_say_of_the_bundle(bundle: Path, tmp_path: Path) -> None:
    (pod,), (runtime, service) = written(bundle), written(bundle, "--kserve")
    archive = Archive(str(bundle))
    expected = {
        "stagec/name": "zoo",
        "stagec/version": "1",
        "stagec/sha256": archive.sha256(),
        "stagec/functions": "loop",
        "stagec/targets": ",".join(archive.index["targets"]),
    }
    assert pod["metadata"]["annotations"] == runtime["metadata"]["annotations"] == expected
    mode = {"serving.kserve.io/deploymentMode": "RawDeployment"}
    assert service["metadata"]["annotations"] == expected | mode
    # The image is the one that `image --container` writes and `push --container` pushes.
    checked("image", bundle, "--container", "--output", tmp_path / "image")
    digest = json.loads((tmp_path / "image" / "index.json").read_text())["manifests"][0]["digest"]
    volume = {"name": "models", "image": {"reference": f"{IMAGE}@{digest}", "pullPolicy": "IfNotPresent"}}
    predictor = service["spec"]["predictor"]
    assert pod["spec"]["volumes"] == predictor["volumes"] == [volume]
    (container,), (served,) = pod["spec"]["containers"], runtime["spec"]["containers"]
    assert container["image"] == served["image"] == SERVER
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["args"] == served["args"] + predictor["model"]["args"]
    assert predictor["model"]["runtime"] == runtime["metadata"]["name"]
    assert container["volumeMounts"] == predictor["model"]["volumeMounts"]


def architectures(pod: dict[str, Any]) -> object:
    affinity = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    return affinity["nodeSelectorTerms"][0]["matchExpressions"][0]["values"]


def test_nodes_have_an_architecture_of_the_bundle(bundle: Path, tmp_path: Path) -> None:
    (pod,) = written(bundle)
    assert architectures(pod) == ["amd64"]
    (pod,) = written(without_executables(bundle, tmp_path / "none.aot"))
    assert architectures(pod) == ["amd64"]

    def edit(index: dict[str, Any]) -> None:
        index["targets"]["arm"] = {**next(iter(index["targets"].values())), "architecture": "aarch64"}

    (pod,) = written(edited_index(bundle, tmp_path / "both.aot", edit))
    assert architectures(pod) == ["arm64", "amd64"]


def test_names(bundle: Path, tmp_path: Path) -> None:
    named = edited_index(bundle, tmp_path / "named.aot", lambda index: index.update(name="My_Models"))
    (pod,) = written(named)
    assert pod["metadata"]["name"] == "my-models"
    assert pod["spec"]["containers"][0]["args"][-1] == "/mnt/models/My_Models.aot"
    (pod,) = written(named, "--name", "mine")
    assert pod["metadata"]["name"] == pod["metadata"]["labels"]["app.kubernetes.io/name"] == "mine"
    words = ("kubernetes", bundle, f"{IMAGE}:1", "--server", SERVER)
    for name in ("Mine", "1st", "a" * 64, "a.b", "-a"):
        done = command(*words, f"--name={name}")
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == (
            f"--name: {name!r} cannot be the name of a service: a letter, then letters, digits and -, 63 in all\n"
            "  give one: --name NAME\n"
        )
    done = command(*words, "--limit", "memory")
    assert (done.returncode, done.stderr) == (2, "'memory' has no '=': write NAME=VALUE\n")
    done = command("kubernetes", bundle, "zoo", "--server", SERVER)
    assert (done.returncode, done.stderr.splitlines()[0]) == (2, "'zoo' is not the name of an image in a registry")


@pytest.mark.skipif(
    not shutil.which("umoci") or subprocess.run(["unshare", "-Urm", "true"], capture_output=True).returncode != 0,
    reason="umoci is not installed, or nobody can have a user namespace here",
)
def test_a_container_starts_as_the_pod_says(bundle: Path, tmp_path: Path) -> None:
    """Its command, with the image mounted where the Pod mounts it, in a file system that nobody can write to."""
    (pod,) = written(bundle)
    (container,) = pod["spec"]["containers"]
    checked("image", bundle, "--container", "--output", tmp_path / "image")
    words = ("unpack", "--rootless", "--image", f"{tmp_path / 'image'}:image", tmp_path / "unpacked")
    subprocess.run(["umoci", *words], check=True, capture_output=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    arguments = [port if argument == "8080" else argument for argument in container["args"]]
    python, *words = container["command"]
    assert python == "python3"
    start = [sys.executable, "-B", *words, *arguments]
    root, mounted = tmp_path / "root", container["volumeMounts"][0]["mountPath"]
    root.mkdir()
    mounts = (
        f"mount --rbind / {root} && mount -o remount,bind,ro {root} && ! touch {root}/x 2>/dev/null && "
        f'mount --rbind {tmp_path}/unpacked/rootfs {root}{mounted} && exec chroot {root} "$@"'
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    server = subprocess.Popen(["unshare", "-Urm", "sh", "-c", mounts, "sh", *start], env=environment)
    try:
        url = f"http://127.0.0.1:{port}{container['readinessProbe']['httpGet']['path']}"
        for _ in range(600):
            assert server.poll() is None
            try:
                with urllib.request.urlopen(url) as answer:
                    assert answer.status == 200
                    break
            except urllib.error.URLError:
                time.sleep(0.1)
        else:
            raise AssertionError("it is not ready")
    finally:
        server.kill()
        server.wait()
