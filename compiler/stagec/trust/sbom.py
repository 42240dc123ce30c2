"""A bundle or layer and its toolchain as a bill of materials: CycloneDX 1.7 (https://cyclonedx.org/docs/1.7/json/).

The bundle is a machine-learning model; the files of weights beside it are its parts.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any

from stagec.core.builds.version import VERSION
from stagec.trust.attestation import Subject
from stagec.trust.provenance import Environment, all_wheels, package_url


def bill_of_materials(subject: Subject, environments: Sequence[Environment]) -> str:
    """Return the SBOM as JSON: a bundle with weights, or a layer, and the packages that planned, traced or compiled it.

    environments: as for the statement. The serial number is made from the content.
    """
    name, digest = next(iter(subject.digests.items()))
    root = f"{name}@{subject.version}"
    stagec = package_url("stagec", VERSION)
    components: list[dict[str, Any]] = [
        {"type": "application", "bom-ref": stagec, "name": "stagec", "version": VERSION, "purl": stagec}
    ]
    components += [
        {"type": "platform", "bom-ref": f"cpython@{version}", "name": "cpython", "version": version}
        for version in sorted({environment.python for environment in environments})
    ]
    components += [
        {
            "type": "library",
            "bom-ref": f"{wheel.purl}#{wheel.sha256}",
            "name": wheel.name,
            **({"version": wheel.version} if wheel.version else {}),
            **({"hashes": [{"alg": "SHA-256", "content": wheel.sha256}]} if wheel.is_file else {}),
            "purl": wheel.purl,
            "properties": [{"name": "stagec:wheel" if wheel.is_file else "stagec:installed", "value": wheel.filename}],
        }
        for wheel in all_wheels(environments)
    ]
    weights = [
        {
            "type": "data",
            "bom-ref": f"{path}@{file['sha256']}",
            "name": path,
            "hashes": [{"alg": "SHA-256", "content": file["sha256"]}],
            "properties": [{"name": "stagec:bytes", "value": str(file["bytes"])}],
        }
        for path, file in subject.weights.items()
    ]
    values = {
        "version": 1,
        "metadata": {
            "component": {
                "type": "machine-learning-model" if subject.kind == "bundle" else "file",
                "bom-ref": root,
                "name": name,
                **({"version": subject.version} if subject.version else {}),
                "hashes": [{"alg": "SHA-256", "content": digest}],
                **({"components": weights} if weights else {}),
            },
        },
        "components": components,
        "dependencies": [{"ref": root, "dependsOn": [component["bom-ref"] for component in [*components, *weights]]}],
    }
    head = {
        "$schema": "http://cyclonedx.org/schema/bom-1.7.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.7",
        # A drawn one would make the SBOMs of two equal builds differ.
        "serialNumber": uuid.uuid5(uuid.NAMESPACE_OID, json.dumps(values, sort_keys=True)).urn,
    }
    return json.dumps({**head, **values}, indent=1) + "\n"
