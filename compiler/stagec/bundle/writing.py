"""Write a bundle: what is in it and its index. `stagec.runtime.archive` has the container."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stagec import components
from stagec.runtime.archive import FORMAT, INDEX, encode
from stagec.runtime.description import Description
from stagec.specs import FunctionSpec
from stagec.stages.exported import Exported


@dataclass(frozen=True)
class Member:
    """An executable to put into a bundle: its name in the plan (`manifest.function.target.bucket`) and both files."""

    name: str
    executable: bytes
    description: bytes


class Inconsistent(ValueError):
    """The artifacts given do not belong together."""


def write_bundle(
    name: str,
    version: str,
    exports: Mapping[str, bytes],
    specs: Mapping[str, FunctionSpec],
    executables: Sequence[Member],
    descriptions: Mapping[str, bytes] | None = None,
) -> bytes:
    """Return the bytes of a bundle; they depend on nothing but the arguments, and not on the order of `executables`.

    exports: `manifest.function` or `manifest.function-variant` -> serialized `Exported`.
    specs: the slice of each of `exports`. descriptions: what each of `exports` was made from; may be left out.
    Raises Inconsistent when an executable was not compiled from the export given, or is not the one described.
    """
    members: dict[str, bytes] = {}
    functions: dict[str, Any] = {}
    targets: dict[str, Any] = {}
    for full_name, serialized in sorted(exports.items()):
        exported = Exported.deserialize(serialized)
        artifact, spec = full_name.removeprefix(f"{name}."), specs[full_name]
        members[f"{artifact}.exported"] = serialized
        functions[artifact] = {
            "function": spec.name,
            "variant": spec.variant,
            "static": dict(sorted(spec.static.items())),
            "exported": f"{artifact}.exported",
            "platforms": list(exported.platforms),
            "in_tree": exported.in_tree.to_json(),
            "in_avals": [str(aval) for aval in exported.in_avals],
            "out_tree": exported.out_tree.to_json(),
            "out_avals": [str(aval) for aval in exported.out_avals],
            "executables": [],
        }
        if descriptions and full_name in descriptions:
            functions[artifact]["description"] = f"{artifact}.exported.json"
            members[f"{artifact}.exported.json"] = _made_from(full_name, descriptions[full_name], serialized)
    described = [(member, Description.from_json(member.description)) for member in executables]
    for member, description in sorted(described, key=lambda pair: _order(pair[1])):
        _check(name, member, description, exports)
        target = description.target
        hardware = {key: value for key, value in target.to_plain().items() if key not in ("name", "compiler_options")}
        targets[target.name] = {**hardware, "requires": list(target.requires)}
        stem = member.name.removeprefix(f"{name}.")
        members[f"{stem}.json"] = member.description
        members[f"{stem}.xla"] = member.executable
        functions[description.artifact]["executables"].append(
            {
                "target": target.name,
                "bucket": dict(description.bucket),
                "executable": f"{stem}.xla",
                "description": f"{stem}.json",
            }
        )
    index = {
        "format": FORMAT,
        "name": name,
        "version": version,
        # From the least demanding to the most: a loader takes the last that its machine can run.
        "targets": dict(sorted(targets.items(), key=lambda item: (len(item[1]["requires"]), item[0]))),
        "functions": functions,
        "members": {
            path: {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
            for path, data in sorted(members.items())
        },
    }
    return encode({INDEX: (json.dumps(index, indent=1) + "\n").encode(), **dict(sorted(members.items()))})


def _made_from(name: str, description: bytes, exported: bytes) -> bytes:
    """Return the description of a portable artifact as a bundle holds it; `components.INTERPRETER` says why."""
    data = json.loads(description)
    if hashlib.sha256(exported).hexdigest() != data["exported_sha256"]:
        raise Inconsistent(f"{name}: the description is of another export")
    data["components"].pop(components.INTERPRETER, None)
    return (json.dumps(data, indent=1) + "\n").encode()


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
