"""The files for a cluster in docs/serving.md, held against the published schemas, and a server as they start it.

Modules: `stagec_serve/commands/serve.py`.
"""

import ast
import copy
import itertools
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from referencing import Registry
from referencing.jsonschema import DRAFT202012

from compiler.extensions.serve.tests.processes import Server
from tests.building import ROOT

PAGE = (ROOT / "docs" / "serving.md").read_text("utf-8")
DOCUMENTS = {
    document["kind"]: document
    for block in re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    for document in yaml.safe_load_all(block)
}
SCHEMAS = {
    "Deployment": "io.k8s.api.apps.v1.Deployment",
    "Service": "io.k8s.api.core.v1.Service",
    "PodDisruptionBudget": "io.k8s.api.policy.v1.PodDisruptionBudget",
}
KUBERNETES = ("1.30.0", "1.37.0")
"""The first release with a sleep before the end, and the newest that the wheel has."""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, zipfile.ZipFile]:
    """The wheels of `kubernetes.lock` by the names of their packages."""
    folder = tmp_path_factory.mktemp("wheels")
    words = ("download", "--quiet", "--no-deps", "--require-hashes", "--only-binary=:all:", "--dest", folder)
    lock = Path(__file__).with_name("kubernetes.lock")
    subprocess.run([sys.executable, "-m", "pip", *words, "-r", lock], check=True)
    return {path.name.partition("-")[0]: zipfile.ZipFile(path) for path in folder.iterdir()}


def definitions(wheel: zipfile.ZipFile, version: str) -> tuple[dict[str, Any], "Registry[Any]"]:
    """Return the schemas of a release of Kubernetes, in which an unknown key is an error, and what resolves them."""
    path = f"kubernetes_validate/kubernetes-json-schema/v{version}-local-strict/_definitions.json"
    schemas = json.loads(wheel.read(path))
    return schemas["$defs"], Registry().with_resource("/api/_definitions.json", DRAFT202012.create_resource(schemas))


def check(value: dict[str, Any], schema: dict[str, Any], registry: "Registry[Any]") -> None:
    jsonschema.Draft202012Validator(schema, registry=registry).validate(value)


def refers_to(definition: str) -> dict[str, Any]:
    return {"$ref": f"/api/_definitions.json#/$defs/{definition}"}


def edited(value: dict[str, Any], *path: str | int, to: object) -> dict[str, Any]:
    changed = at = copy.deepcopy(value)
    for step in path[:-1]:
        at = at[step]  # type: ignore[index]
    at[path[-1]] = to  # type: ignore[index]
    return changed


@pytest.mark.parametrize("version", KUBERNETES)
def test_files_are_as_kubernetes_says(wheels: dict[str, zipfile.ZipFile], version: str) -> None:
    _, registry = definitions(wheels["kubernetes_validate"], version)
    for kind, name in SCHEMAS.items():
        check(DOCUMENTS[kind], refers_to(name), registry)
    container = "spec", "template", "spec", "containers", 0
    for path in ((*container, "startupProbe", "treshold"), (*container, "lifecycle", "preStop", "slep")):
        with pytest.raises(jsonschema.ValidationError, match="was unexpected"):
            check(edited(DOCUMENTS["Deployment"], *path, to=1), refers_to(SCHEMAS["Deployment"]), registry)


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


def test_a_runtime_is_as_kserve_says(wheels: dict[str, zipfile.ZipFile]) -> None:
    kubernetes, registry = definitions(wheels["kubernetes_validate"], KUBERNETES[1])
    schemas = kserve_schemas(wheels["kserve"], kubernetes)
    schema = {"$defs": schemas, "$ref": "#/$defs/V1alpha1ServingRuntime"}
    runtime = DOCUMENTS["ServingRuntime"]
    check(runtime, schema, registry)
    for path in (("spec", "protocolVersoins"), ("spec", "containers", 0, "arg"), ("spec", "containers", 0, "args")):
        with pytest.raises(jsonschema.ValidationError):
            check(edited(runtime, *path, to="x"), schema, registry)


def options(container: dict[str, Any]) -> dict[str, float]:
    """Return the options of a container that have a number."""
    pairs = itertools.pairwise(container["args"])
    return {name: float(value) for name, value in pairs if name.startswith("--") and re.fullmatch(r"\d+", value)}


def test_what_belongs_together_fits() -> None:
    """Ports, labels and seconds, and what the Pod Security Standard "restricted" wants.

    Source: https://kubernetes.io/docs/concepts/security/pod-security-standards.
    """
    deployment, service, budget = (DOCUMENTS[kind] for kind in SCHEMAS)
    template = deployment["spec"]["template"]
    pod, (container,) = template["spec"], template["spec"]["containers"]
    for labels in (
        deployment["spec"]["selector"]["matchLabels"],
        service["spec"]["selector"],
        budget["spec"]["selector"]["matchLabels"],
    ):
        assert labels.items() <= template["metadata"]["labels"].items()
    assert 0 < budget["spec"]["minAvailable"] < deployment["spec"]["replicas"]
    given = options(container)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": given["--port"], "grpc": given["--grpc-port"], "probes": given["--probe-port"]}
    assert {port["targetPort"] for port in service["spec"]["ports"]} == ports.keys() - {"probes"}
    ending = container["lifecycle"]["preStop"]["sleep"]["seconds"] + given["--drain"] + 4 * given["--timeout"]
    assert pod["terminationGracePeriodSeconds"] > ending
    assert given["--drain"] > 2 * container["readinessProbe"]["periodSeconds"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    (runtime,) = DOCUMENTS["ServingRuntime"]["spec"]["containers"]
    assert runtime["ports"][0]["containerPort"] == options(runtime)["--port"]
    assert runtime["startupProbe"]["httpGet"]["port"] == options(runtime)["--probe-port"]
    load = re.search(r"startupProbe` says how long a load may take:\s+here (\d+) s", PAGE)
    assert load is not None
    for each in (container, runtime):
        probe = each["startupProbe"]
        assert int(load[1]) == probe["periodSeconds"] * probe["failureThreshold"]


@pytest.mark.parametrize("kind", ["Deployment", "ServingRuntime"])
def test_a_server_starts_as_a_cluster_starts_it(served: Path, kind: str) -> None:
    spec = DOCUMENTS[kind]["spec"]
    (container,) = spec["template"]["spec"]["containers"] if kind == "Deployment" else spec["containers"]
    file, *words = container["args"]
    assert Path(file).name == "models.aot"
    names = {int(port["containerPort"]): port.get("name") for port in container["ports"]} | {8082: "probes"}
    words = ["0" if word.isdigit() and int(word) in names else word for word in words]
    server = Server(served, *("127.0.0.1" if word == "0.0.0.0" else word for word in words))
    try:
        (port,) = re.findall(r"^probes on http://.*:(\d+)$", server.told, re.MULTILINE)
        server.port = int(port)
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert server.ask("GET", container[probe]["httpGet"]["path"])[0] == 200
    finally:
        server.end()
    assert server.status == 0
