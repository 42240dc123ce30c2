"""Write a bundle: what is in it and its index. `stagec.runtime.archive` has the container."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stagec import components
from stagec.avals import tolerance
from stagec.bundle.binding import Bindings
from stagec.bundle.expiry import readable_until
from stagec.bundle.safetensors import Tensor
from stagec.runtime import index, shapes, strict_json
from stagec.runtime.archive import FORMAT, INDEX, Content, encode_index, members_table
from stagec.runtime.description import LARGEST, Description
from stagec.specs import FunctionSpec
from stagec.stages import mlir
from stagec.stages.exported import Exported
from stagec.version import VERSION


@dataclass(frozen=True)
class Member:
    """An executable to put into a bundle: its name in the plan (`manifest.function.target.bucket`) and its files.

    stablehlo: the module that it was compiled from, as a portable artifact.
    """

    name: str
    executable: bytes
    description: bytes
    stablehlo: bytes


class Inconsistent(ValueError):
    """The artifacts given do not belong together."""


def gather(
    name: str,
    version: str,
    exports: Mapping[str, bytes],
    specs: Mapping[str, FunctionSpec],
    executables: Sequence[Member],
    descriptions: Mapping[str, bytes] | None = None,
    weights: Mapping[str, Mapping[str, Tensor]] | None = None,
    golden: Mapping[str, Mapping[str, Tensor]] | None = None,
) -> dict[str, Content]:
    """Return the members of a bundle; they depend on nothing but the arguments, and not on the order of `executables`.

    exports: `manifest.function` or `manifest.function-variant` -> serialized `Exported`.
    specs: the slice of each of `exports`.
    descriptions: what each of `exports` was made from; may be left out of those that bind no argument.
    weights: the arrays of each file that functions bind arguments to, by its path in the manifest.
    golden: inputs and outputs of some of `exports`, by their paths, as `frontends.golden` makes them.
    Raises Inconsistent when an executable was not compiled from the export given, or is not the one described;
    StagecError when weights are not those that the bound arguments take.
    """
    members = _Members()
    bindings = Bindings(weights or {})
    functions: dict[str, Any] = {}
    targets: dict[str, Any] = {}
    for full_name, serialized in sorted(exports.items()):
        exported = Exported.deserialize(serialized)
        artifact, spec = full_name.removeprefix(f"{name}."), specs[full_name]
        given = (descriptions or {}).get(full_name)
        made_from = _made_from(full_name, given, serialized) if given else None
        versions = _versions(made_from) if made_from else {}
        functions[artifact] = {
            "function": spec.name,
            "variant": spec.variant,
            "static": dict(sorted(spec.static.items())),
            "in_tree": exported.in_tree.to_json(),
            "in_avals": [str(aval) for aval in exported.in_avals],
            "out_tree": exported.out_tree.to_json(),
            "out_avals": [str(aval) for aval in exported.out_avals],
            "bind": bindings.of(spec, exported, made_from),
            "padding": {dim: dict(table) for dim, table in sorted(spec.padding.items())},
            "exported": members.add(f"{artifact}.exported", serialized),
            "platforms": list(exported.platforms),
            "nr_devices": exported.nr_devices,
            "custom_calls": mlir.inventory(exported.mlir_module_serialized),
            "calling_convention_version": exported.calling_convention_version,
            "versions": versions,
            "readable_until": readable_until(versions.get("jax")),
            "executables": [],
        }
        if made_from:
            text = (json.dumps(made_from, indent=1) + "\n").encode()
            functions[artifact]["description"] = members.add(f"{artifact}.exported.json", text)
    described = [(member, Description.from_json(member.description)) for member in executables]
    for member, description in sorted(described, key=lambda pair: _order(pair[1])):
        _check(name, member, description, exports)
        target = index.target_entry(description)
        if targets.setdefault(description.target.name, target) != target:
            raise Inconsistent(f"{member.name}: other executables have another target {description.target.name!r}")
        stem = member.name.removeprefix(f"{name}.")
        names = (
            members.add(f"{stem}.xla", member.executable),
            members.add(f"{stem}.json", member.description),
            members.add(f"{stem}.stablehlo.mlirbc", member.stablehlo),
        )
        functions[description.artifact]["executables"].append(index.executable_entry(description, *names))
    bindings.check()
    weight_entries = {
        name: {"member": members.add_array("weights", tensor), "aval": str(tensor.aval)}
        for name, tensor in sorted(bindings.tensors.items())
    }
    # Last: a member that is there for other reasons keeps its name when these are stripped.
    for full_name, tensors in sorted((golden or {}).items()):
        function = functions[full_name.removeprefix(f"{name}.")]
        function["golden"] = _golden(members, specs[full_name], function, tensors)
    found = {
        "format": FORMAT,
        "kind": "bundle",
        "name": name,
        "version": version,
        "versions": {"stagec": VERSION},
        # From the least demanding to the most: a loader takes the last that its machine can run.
        "targets": dict(sorted(targets.items(), key=lambda item: (len(item[1]["requires"]), item[0]))),
        "functions": functions,
        "weights": weight_entries,
        "members": members_table(members.data),
    }
    index.check(found)
    return {INDEX: encode_index(found), **dict(sorted(members.data.items()))}


class _Members:
    """The members of a bundle, each content once. data: name -> content."""

    def __init__(self) -> None:
        self.data: dict[str, Content] = {}
        self._names: dict[str, str] = {}

    def add(self, name: str, content: bytes) -> str:
        """Add a member, unless one has the same content; return the name of the one that has it."""
        return self._add(hashlib.sha256(content).hexdigest(), name, content)

    def add_array(self, folder: str, tensor: Tensor) -> str:
        """Add the bytes of an array, in the same way; the name is their digest."""
        digest = hashlib.sha256(tensor.data).hexdigest()
        return self._add(digest, f"{folder}/{digest}", tensor.data)

    def _add(self, digest: str, name: str, content: Content) -> str:
        found = self._names.setdefault(digest, name)
        self.data[found] = content
        return found


def _golden(
    members: _Members, spec: FunctionSpec, function: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Return what the index says of golden inputs and outputs."""
    rows: dict[str, Any] = {"bucket": dict(spec.golden["bucket"]), "inputs": {}, "outputs": {}}
    for path, tensor in tensors.items():
        row: dict[str, Any] = {"member": members.add_array("golden", tensor), "aval": str(tensor.aval)}
        if not path.startswith("result"):
            rows["inputs"][path] = row
            continue
        default = tolerance(tensor.aval)
        given = {key: spec.golden[key] for key in ("rtol", "atol")}
        row |= {key: default if value is None else value for key, value in given.items()}
        rows["outputs"][path] = row
    return rows


_MADE_FROM = shapes.record(
    {
        "exported_sha256": shapes.sha256,
        "components": shapes.table(shapes.record({"value": shapes.text, "sha256": shapes.sha256})),
        "bound": shapes.table(shapes.text),
    },
    rest=shapes.anything,
)


def _made_from(name: str, description: bytes, exported: bytes) -> dict[str, Any]:
    """Return the description of a portable artifact as a bundle holds it; `components.INTERPRETER` says why."""
    try:
        data: dict[str, Any] = strict_json.parse(description, LARGEST)
        _MADE_FROM("", data)
    except ValueError as error:
        raise Inconsistent(f"{name}: not the description of a portable artifact: {error}") from error
    if hashlib.sha256(exported).hexdigest() != data["exported_sha256"]:
        raise Inconsistent(f"{name}: the description is of another export")
    data["components"].pop(components.INTERPRETER, None)
    return data


def _versions(made_from: Mapping[str, Any]) -> dict[str, str]:
    """Return the versions of what made a portable artifact; one of a StableHLO module has no jax."""
    rows = made_from["components"]
    return {name: rows[name]["value"] for name in ("jax", "jaxlib", "stagec") if name in rows}


def _order(description: Description) -> tuple[Any, ...]:
    return (description.artifact, description.target.name, sorted(description.bucket.items()))


def _check(name: str, member: Member, description: Description, exports: Mapping[str, bytes]) -> None:
    exported = exports.get(f"{name}.{description.artifact}")
    if exported is None:
        raise Inconsistent(f"{member.name} is of function {description.artifact!r}, which has no export here")
    if hashlib.sha256(exported).hexdigest() != description.exported_sha256:
        raise Inconsistent(f"{member.name} was compiled from another export of {description.artifact!r}")
    if hashlib.sha256(member.executable).hexdigest() != description.executable_sha256:
        raise Inconsistent(f"{member.name}: the description is of another executable")
    if hashlib.sha256(member.stablehlo).hexdigest() != description.stablehlo_sha256:
        raise Inconsistent(f"{member.name}: the description is of another StableHLO module")
