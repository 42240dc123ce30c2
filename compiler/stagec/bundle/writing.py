"""Write a bundle: its members and its index. `stagec.bundle.archive` has the container.

The action that made an artifact described it too, with its digest. So writing a bundle parses no module: it checks
digests and shapes, and joins what is there. An edit of one function waits for it, and it reads all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stagec.bundle import index
from stagec.bundle.additions import extended, order
from stagec.bundle.archive import FORMAT, INDEX, Archive
from stagec.bundle.binding import Bindings
from stagec.bundle.description import EXPORTED_FORMAT, LARGEST, Description
from stagec.bundle.expiry import readable_until
from stagec.bundle.external import Description as DescribedFile, Outside
from stagec.bundle.index import FUNCTIONS
from stagec.bundle.members import Content, Stored, bundle_members, digest, members_table, split
from stagec.bundle.safetensors import Tensor
from stagec.core.builds import components
from stagec.core.builds.specs import NOT_EXAMINED, FunctionSpec
from stagec.core.builds.version import VERSION
from stagec.core.data import strict_json
from stagec.core.trees import json_shapes


@dataclass(frozen=True)
class Export:
    """An exported artifact to put into a bundle.

    name: `manifest.function` or `manifest.function-variant`. content: the artifact. spec: its function's.
    description: written with it, so that this reads no module.
    golden: golden inputs and outputs by their paths, as `frontends.golden_arrays` makes them; None if there are none.
    """

    name: str
    content: Content
    spec: FunctionSpec
    description: bytes
    golden: Mapping[str, Tensor] | None = None


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


_ANOTHER_CPU = (
    ': with examined = "none" it has what the CPU has that built it; build all of them again on machines with one CPU'
)


def gather(
    name: str,
    version: str,
    exports: Sequence[Export],
    executables: Sequence[Member],
    weights: Mapping[str, Mapping[str, Tensor]] | None = None,
    external: Mapping[str, DescribedFile] | None = None,
) -> dict[str, Content]:
    """Return the members of a bundle; they depend on nothing but the arguments, and not on the order of a sequence.

    weights: the arrays of each file that functions bind arguments to, by its path in the manifest.
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
    in_order = sorted(exports, key=lambda export: export.name)
    for export in in_order:
        artifact = export.name.removeprefix(f"{name}.")
        functions[artifact] = _function(members, bindings, export, artifact)
    contents = {export.name: export.content for export in exports}
    _add_executables(name, executables, contents, members, functions, targets)
    bindings.check()
    weight_entries = {name: _weight(members, name, tensor) for name, tensor in sorted(bindings.tensors.items())}
    # Last: a member that another entry needs keeps its name when `strip` removes these.
    for export in in_order:
        if export.golden is not None:
            functions[export.name.removeprefix(f"{name}.")]["golden"] = _golden(members, export.spec, export.golden)
    used = {entry["file"] for entry in weight_entries.values() if "file" in entry}
    listed = {name: {"sha256": file.sha256, "bytes": file.size} for name, file in sorted(files.items()) if name in used}
    result = {
        "format": FORMAT,
        "kind": "bundle",
        "name": name,
        "version": version,
        "versions": {"stagec": VERSION},
        # From the least demanding to the most: a loader takes the last that its machine can run.
        "targets": dict(sorted(targets.items(), key=lambda item: (len(item[1]["requires"]), item[0]))),
        "functions": functions,
        "weights": weight_entries,
        "weights_files": listed,
    }
    return _checked(result, members)


def extend(archive: Archive, executables: Sequence[Member]) -> dict[str, Content]:
    """Return the members of a bundle with more executables, of a jaxlib that has none for their target and bucket.

    The earlier members stay byte for byte, and the earlier index becomes a member: `bundle/additions.py` restores the
    earlier bundle from them. Writing the members reads and checks them. Raises Inconsistent as `gather` does,
    ValueError if there is an executable of this jaxlib already.
    """
    before = archive[INDEX]
    name, functions = archive.index["name"], archive.index["functions"]
    stored = {member: Stored(archive, member) for member in archive.index["members"]}
    functions_before = stored.pop(FUNCTIONS)
    members = _Members(stored)
    exports = {f"{name}.{artifact}": members.data[entry["exported"]] for artifact, entry in functions.items()}
    added: dict[str, Any] = {artifact: {"executables": []} for artifact in functions}
    _add_executables(name, executables, exports, members, added, {**archive.index["targets"]})
    base = {
        "index": members.add(f"base/{digest(before)}.json", before),
        "functions": members.add(f"base/{digest(functions_before)}.jsonl", functions_before),
        "sha256": archive.sha256(),
    }
    rows = {artifact: entry["executables"] for artifact, entry in added.items()}
    return _checked(extended(archive.index, rows, base, {"stagec": VERSION}), members)


def strip(archive: Archive) -> dict[str, Content]:
    """Return the members of a bundle as if its manifest asked for no golden inputs and outputs.

    The states before `stagec add-jaxlib` go too, because their signatures do not cover the rest. Writing the members
    reads and checks them: the new bundle is good if this raised no LoadError.
    """
    functions = {
        name: {key: value for key, value in entry.items() if key != "golden"}
        for name, entry in archive.index["functions"].items()
    }
    kept = {weight["member"] for weight in archive.index["weights"].values() if "member" in weight}
    for function in functions.values():
        for entry in (function, *function["executables"]):
            kept |= {entry[key] for key in ("exported", *index.NAMES) if key in entry}
    result = {key: value for key, value in archive.index.items() if key != "base"} | {"functions": functions}
    return bundle_members(result, {name: Stored(archive, name) for name in kept})


def _checked(result: Mapping[str, Any], members: _Members) -> dict[str, Content]:
    """Return the members of a bundle, after checking its index as a reader does."""
    written, _ = split(result, members_table(members.data))
    index.check(written)
    expressions = 0
    for name, entry in result["functions"].items():
        expressions += index.check_function(written, name, entry, expressions)
    return bundle_members(result, members.data)


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
    for artifact, entry, target, member in sorted(rows, key=lambda row: (row[0], order(row[1]))):
        if targets.setdefault(entry["target"], target) != target:
            what = f"{member.name}: other executables have another target {entry['target']!r}"
            raise Inconsistent(what + _ANOTHER_CPU * (target.get("examined") == NOT_EXAMINED))
        stem = member.name.removeprefix(f"{name}.")
        names = {
            "executable": members.add(f"{stem}.xla", member.executable),
            "description": members.add(f"{stem}.json", member.description),
            "stablehlo": members.add(f"{stem}.stablehlo.mlirbc", member.stablehlo),
        }
        functions[artifact]["executables"].append({**entry, **names})


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


def _function(members: _Members, bindings: Bindings[Any], export: Export, artifact: str) -> dict[str, Any]:
    """Return the entry of a function without executables, and add its artifact to the members."""
    spec, described = export.spec, _described(export)
    made_with = described["components"]  # an artifact of a StableHLO module has no jax
    versions = {name: made_with[name]["value"] for name in ("jax", "jaxlib", "stagec") if name in made_with}
    return {
        "function": spec.name,
        "variant": spec.variant,
        "static": dict(sorted(spec.static.items())),
        "in_tree": described["in_tree"],
        "in_avals": described["in_avals"],
        "out_tree": described["out_tree"],
        "out_avals": described["out_avals"],
        "bind": bindings.entries(spec, described),
        "padding": {dim: dict(table) for dim, table in sorted(spec.padding.items())},
        "exported": members.add(f"{artifact}.exported", export.content),
        "platforms": described["platforms"],
        "nr_devices": described["nr_devices"],
        "custom_calls": described["custom_calls"],
        "calling_convention_version": described["calling_convention_version"],
        "versions": versions,
        "readable_until": readable_until(versions.get("jax")),
        "executables": [],
        "description": members.add(f"{artifact}.exported.json", strict_json.line(described)),
    }


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
        own = spec.golden.get("outputs", {}).get(path, {})
        for key in ("rtol", "atol"):
            said = [value for value in (own.get(key), spec.golden[key]) if value is not None]
            row |= {key: said[0]} if said else {}  # without, it is that of the dtype where the executable runs
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


def _described(export: Export) -> dict[str, Any]:
    """Return a bundle's form of the description of an exported artifact; `components.INTERPRETER` gives the reason."""
    try:
        data: dict[str, Any] = strict_json.parse(export.description, LARGEST)
        _DESCRIPTION(data)
        strict_json.check_format(data, EXPORTED_FORMAT, "export it again")
    except ValueError as error:
        raise Inconsistent(f"{export.name}: not the description of an exported artifact: {error}") from error
    if digest(export.content) != data["exported_sha256"]:
        raise Inconsistent(f"{export.name}: the description belongs to a different export")
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
    return artifact, index.executable_entry(description), index.target_entry(description), member
