"""Write a bundle: its members and its index. `stagec.bundle.archive` has the container.

The action that made an artifact described it too, with its digest. So writing a bundle parses no module: it checks
digests and shapes, and joins what is there. An edit of one function waits for it, and it reads all of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stagec.bundle import index
from stagec.bundle.additions import extended
from stagec.bundle.archive import FORMAT, INDEX, Archive, Content, Stored, digest, encode_index, members_table
from stagec.bundle.binding import Bindings
from stagec.bundle.description import LARGEST, Description
from stagec.bundle.expiry import readable_until
from stagec.bundle.external import Description as DescribedFile, Outside
from stagec.bundle.safetensors import Tensor
from stagec.core.builds import components
from stagec.core.builds.specs import FunctionSpec
from stagec.core.builds.version import VERSION
from stagec.core.data import strict_json
from stagec.core.sizes.avals import tolerance
from stagec.core.trees import json_shapes


@dataclass(frozen=True)
class Member:
    """An executable to put into a bundle: its name in the plan (`manifest.function.target.bucket`) and its files.

    stablehlo: the module that it was compiled from, as a portable artifact.
    """

    name: str
    executable: Content
    description: bytes
    stablehlo: Content


class Inconsistent(ValueError):
    """The artifacts given do not belong together."""


def gather(
    name: str,
    version: str,
    exports: Mapping[str, Content],
    specs: Mapping[str, FunctionSpec],
    executables: Sequence[Member],
    descriptions: Mapping[str, bytes] | None = None,
    weights: Mapping[str, Mapping[str, Tensor]] | None = None,
    golden: Mapping[str, Mapping[str, Tensor]] | None = None,
    interfaces: Mapping[str, Mapping[str, Any]] | None = None,
    external: Mapping[str, DescribedFile] | None = None,
) -> dict[str, Content]:
    """Return the members of a bundle; they depend on nothing but the arguments, and not on the order of `executables`.

    exports: `manifest.function` or `manifest.function-variant` -> serialized `Exported`.
    specs: the spec of each of `exports`.
    descriptions: the description of each of `exports`, so that this reads no module. Optional for exports without bound
        arguments.
    weights: the arrays of each file that functions bind arguments to, by its path in the manifest.
    golden: inputs and outputs of some of `exports`, by their paths, as `frontends.golden` makes them.
    interfaces: the result of `Exported.interface` for each of `exports` without a description.
    external: the files that stay beside the bundle, instead of their arrays in `weights`.
    Raises Inconsistent when an executable was not compiled from the given export, or differs from its description;
    StagecError when weights do not match the bound arguments.
    """
    members = _Members()
    files = external or {}
    arrays: dict[str, Mapping[str, Tensor | Outside]] = {name: file.arrays for name, file in files.items()}
    bindings = Bindings({**(weights or {}), **arrays})
    functions: dict[str, Any] = {}
    targets: dict[str, Any] = {}
    for full_name, exported in sorted(exports.items()):
        artifact, spec = full_name.removeprefix(f"{name}."), specs[full_name]
        given = (descriptions or {}).get(full_name)
        if given:
            described = _described(full_name, given, exported)
        else:
            described = {**(interfaces or {})[full_name], "bound": {}, "components": {}}
        made_with = described["components"]  # an artifact of a StableHLO module has no jax
        versions = {name: made_with[name]["value"] for name in ("jax", "jaxlib", "stagec") if name in made_with}
        functions[artifact] = {
            "function": spec.name,
            "variant": spec.variant,
            "static": dict(sorted(spec.static.items())),
            "in_tree": described["in_tree"],
            "in_avals": described["in_avals"],
            "out_tree": described["out_tree"],
            "out_avals": described["out_avals"],
            "bind": bindings.of(spec, described),
            "padding": {dim: dict(table) for dim, table in sorted(spec.padding.items())},
            "exported": members.add(f"{artifact}.exported", exported),
            "platforms": described["platforms"],
            "nr_devices": described["nr_devices"],
            "custom_calls": described["custom_calls"],
            "calling_convention_version": described["calling_convention_version"],
            "versions": versions,
            "readable_until": readable_until(versions.get("jax")),
            "executables": [],
        }
        if given:
            text = (json.dumps(described, separators=(",", ":")) + "\n").encode()
            functions[artifact]["description"] = members.add(f"{artifact}.exported.json", text)
    _add_executables(name, executables, exports, members, functions, targets)
    bindings.check()
    weight_entries = {name: _weight(members, name, tensor) for name, tensor in sorted(bindings.tensors.items())}
    # Last: a member that another entry needs keeps its name when `strip` removes these.
    for full_name, tensors in sorted((golden or {}).items()):
        function = functions[full_name.removeprefix(f"{name}.")]
        function["golden"] = _golden(members, specs[full_name], tensors)
    used = {entry["file"] for entry in weight_entries.values() if "file" in entry}
    listed = {name: {"sha256": file.sha256, "bytes": file.size} for name, file in sorted(files.items()) if name in used}
    result = {
        "format": _format(functions, bool(listed)),
        "kind": "bundle",
        "name": name,
        "version": version,
        "versions": {"stagec": VERSION},
        # From the least demanding to the most: a loader takes the last that its machine can run.
        "targets": dict(sorted(targets.items(), key=lambda item: (len(item[1]["requires"]), item[0]))),
        "functions": functions,
        "weights": weight_entries,
        **({"weights_files": listed} if listed else {}),
        "members": members_table(members.data),
    }
    index.check(result)
    return {INDEX: encode_index(result), **dict(sorted(members.data.items()))}


def extend(archive: Archive, executables: Sequence[Member]) -> dict[str, Content]:
    """Return the members of a bundle with more executables, of a jaxlib that has none for their target and bucket.

    The earlier members stay byte for byte, and the earlier index becomes a member: `bundle/additions.py` restores the
    earlier bundle from them. Writing the members reads and checks them. Raises Inconsistent as `gather` does,
    ValueError if there is an executable of this jaxlib already.
    """
    before = archive[INDEX]
    name, functions = archive.index["name"], archive.index["functions"]
    members = _Members({member: Stored(archive, member) for member in archive.index["members"]})
    exports = {f"{name}.{artifact}": members.data[entry["exported"]] for artifact, entry in functions.items()}
    added: dict[str, Any] = {artifact: {"executables": []} for artifact in functions}
    _add_executables(name, executables, exports, members, added, {**archive.index["targets"]})
    base = {"index": members.add(f"base/{digest(before)}.json", before), "sha256": archive.sha256()}
    rows = {artifact: entry["executables"] for artifact, entry in added.items()}
    result = extended(archive.index, rows, base, members_table(members.data), {"stagec": VERSION})
    index.check(result)
    return {INDEX: encode_index(result), **dict(sorted(members.data.items()))}


def _add_executables(
    name: str,
    executables: Sequence[Member],
    exports: Mapping[str, Content],
    members: _Members,
    functions: Mapping[str, Any],
    targets: dict[str, Any],
) -> None:
    """Add executables to the members of a bundle, and to the functions and targets of its index."""
    rows = [_entry_of(name, member, exports) for member in executables]
    for artifact, entry, target, member in sorted(rows, key=lambda row: (row[0], index.order(row[1]))):
        if targets.setdefault(entry["target"], target) != target:
            raise Inconsistent(f"{member.name}: other executables have another target {entry['target']!r}")
        stem = member.name.removeprefix(f"{name}.")
        names = {
            "executable": members.add(f"{stem}.xla", member.executable),
            "description": members.add(f"{stem}.json", member.description),
            "stablehlo": members.add(f"{stem}.stablehlo.mlirbc", member.stablehlo),
        }
        functions[artifact]["executables"].append({**entry, **names})


def _format(functions: Mapping[str, Any], with_files: bool) -> int:
    """Return the first version of the bundle format that supports these functions."""
    if index.has_several_jaxlibs(functions.values()):
        return index.FORMAT_WITH_JAXLIBS
    if with_files:
        return index.FORMAT_WITH_FILES
    return FORMAT if all(map(index.has_plain_trees, functions.values())) else index.FORMAT_WITH_KEYS


class _Members:
    """The members of a bundle, each content once. data: name -> content."""

    def __init__(self, data: Mapping[str, Content] | None = None) -> None:
        """data: members that are there already, with different contents."""
        self.data: dict[str, Content] = dict(data or {})
        self._names = {digest(content): name for name, content in self.data.items()}

    def add(self, name: str, content: Content) -> str:
        """Add a member, unless one has the same content; return the name of the one that has it."""
        return self._add(digest(content), name, content)

    def add_array(self, folder: str, tensor: Tensor) -> str:
        """Add the bytes of an array, in the same way; the name is their digest."""
        named = digest(tensor.data)
        return self._add(named, f"{folder}/{named}", tensor.data)

    def _add(self, sha256: str, name: str, content: Content) -> str:
        if sha256 not in self._names and name in self.data:
            raise Inconsistent(f"{name}: two members of different content have this name")
        first_name = self._names.setdefault(sha256, name)
        self.data[first_name] = content
        return first_name


def _weight(members: _Members, name: str, array: Tensor | Outside) -> dict[str, Any]:
    """Return the index's entry of an array, called `FILE:ARRAY`, and add its bytes to the bundle if it has them."""
    if isinstance(array, Outside):
        return {"file": name.partition(":")[0], "start": array.start, "aval": str(array.aval)}
    return {"member": members.add_array("weights", array), "aval": str(array.aval)}


def _golden(members: _Members, spec: FunctionSpec, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the index's entry for golden inputs and outputs."""
    rows: dict[str, Any] = {"bucket": dict(spec.golden["bucket"]), "inputs": {}, "outputs": {}}
    for path, tensor in tensors.items():
        row: dict[str, Any] = {"member": members.add_array("golden", tensor), "aval": str(tensor.aval)}
        if not path.startswith("result"):
            rows["inputs"][path] = row
            continue
        default = tolerance(tensor.aval)
        own = spec.golden.get("outputs", {}).get(path, {})
        for key in ("rtol", "atol"):
            said = (value for value in (own.get(key), spec.golden[key]) if value is not None)
            row[key] = next(said, default)
        rows["outputs"][path] = row
    return rows


_DESCRIPTION = json_shapes.shape(
    {
        **index.INTERFACE,
        "exported_sha256": json_shapes.sha256,
        "components": {...: {"value": str, "sha256": json_shapes.sha256}},
        "bound": {...: str},
        ...: object,
    }
)


def _described(name: str, description: bytes, exported: Content) -> dict[str, Any]:
    """Return a bundle's form of the description of an exported artifact; `components.INTERPRETER` gives the reason."""
    try:
        data: dict[str, Any] = strict_json.parse(description, LARGEST)
        _DESCRIPTION(data)
    except ValueError as error:
        raise Inconsistent(f"{name}: not the description of an exported artifact: {error}") from error
    if digest(exported) != data["exported_sha256"]:
        raise Inconsistent(f"{name}: the description belongs to a different export")
    data["components"].pop(components.INTERPRETER, None)
    return data


def _entry_of(
    name: str, member: Member, exports: Mapping[str, Content]
) -> tuple[str, dict[str, Any], dict[str, Any], Member]:
    """Return the index's entry of an executable, without the names of members: artifact, entry, and target.

    Nothing keeps the rest of its description. Raises Inconsistent if it does not belong to this executable, or to these
    exports.
    """
    description = Description.from_json(member.description)
    artifact = description.artifact
    exported = exports.get(f"{name}.{artifact}")
    if exported is None:
        raise Inconsistent(f"{member.name} is of function {artifact!r}, which has no export here")
    if digest(exported) != description.exported_sha256:
        raise Inconsistent(f"{member.name} was compiled from another export of {artifact!r}")
    if digest(member.executable) != description.executable_sha256:
        raise Inconsistent(f"{member.name}: the description belongs to a different executable")
    if digest(member.stablehlo) != description.stablehlo_sha256:
        raise Inconsistent(f"{member.name}: the description belongs to a different StableHLO module")
    entry = index.executable_entry(description, "", "", "")
    return artifact, entry, index.target_entry(description), member
