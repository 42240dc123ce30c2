"""`stagec explain A B`: report the different components of two artifacts, by name (`core.builds.components`).

Instead of an artifact you may give the current inputs (`stagec.audit.inputs`): all that an artifact is made from is
known before XLA compiles.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stagec.audit import inputs, kernels
from stagec.audit.inputs import Inputs
from stagec.bundle.archive import Archive
from stagec.bundle.description import EXPORTED_FORMAT, LARGEST, Description
from stagec.core.builds import components, naming
from stagec.core.builds.imports import WHY
from stagec.core.data import child, reading, strict_json
from stagec.core.messages.errors import Problem, StagecError, blaming
from stagec.core.messages.refusal import LoadError
from stagec.core.trees import json_shapes
from stagec.core.trees.tree import argument_path
from stagec.stages.exported import Exported

_WRITE = (
    "give a bundle (.aot), an executable (.xla), an exported artifact (.exported), a description (.json) "
    "or a manifest (.toml)"
)


def explain(
    first: str,
    second: str,
    roots: Sequence[str],
    packages: Sequence[str],
    plugins: Mapping[str, Path] | None = None,
    environments: Mapping[str, tuple[str, str]] | None = None,
    with_kernels: bool = False,
) -> dict[str, Any]:
    """Return a report on how what the files `first` and `second` stand for differs; "equal" says whether it does.

    A file is a bundle (.aot), an executable (.xla) or exported artifact (.exported) with its description beside it, or
    such a description (.json). An exported artifact without one is compared by what it holds itself. Or it stands for
    the current inputs: a manifest (.toml), or what a Bazel explain target writes; one artifact is compared with
    the one of the same function, variant, target and bucket.
    roots: import roots of a manifest's functions. packages: folders with the packages that tracing imports.
    plugins: for a platform, the folder with its plugin; tracing a function that names the plugin imports it too.
    environments: by name, Python and PYTHONPATH of the compilers for other jaxlibs. An executable for a missing one is
    not compared, and a row says so.
    with_kernels: whether "kernels" has what became of the kernels for NVIDIA devices, where both files have them: rows
    with "artifact", "kernel", "figure", "first" and "second".
    Raises StagecError for any other file, and if the current inputs cannot be traced.
    """
    given = roots, packages, plugins or {}, environments or {}
    sides: list[_Artifacts | Inputs] = [_read(path, *given) for path in (first, second)]
    unknown: dict[str, str] = {}
    for side in sides:
        if isinstance(side, Inputs):
            unknown |= {name.removeprefix(f"{side.name}."): why for name, why in side.unknown.items()}
    single = [next(iter(side.values())) for side in sides if not isinstance(side, Inputs) and "" in side]
    wanted = single[0] if len(single) == 1 else None
    left, right = (_of(side, wanted, path) for side, path in zip(sides, (first, second), strict=True))
    rows, changes = [], []
    for name in sorted({*left, *right, *({} if wanted else unknown)}):
        before, after = left.get(name), right.get(name)
        if before is None or after is None:
            here = "only in the first" if after is None else "only in the second"
            here = f"not compared: {unknown[name]}" if name in unknown else here
            rows.append({"artifact": name, "component": "artifact", "change": here, "first": None, "second": None})
            continue
        rows += [
            {"artifact": name, "component": component, "first": old, "second": new}
            for component, old, new in components.differences(*_comparable(before, after))
        ]
        if with_kernels and before.kernels and after.kernels:
            changes += [{"artifact": name, **row} for row in kernels.changes(before.kernels(), after.kernels())]
    again = {path: why for path in (first, second) if (why := built_again(path))}
    report = {"kind": "explanation", "equal": not rows, "first": first, "second": second, "differences": rows}
    report |= {"whenever_a_file_is_added": again}
    return {**report, "kernels": changes} if with_kernels else report


def built_again(path: str) -> str:
    """Return why Bazel builds an artifact again whenever a file is added to `deps` or `data`; "" if it does not.

    Its build writes the reason into a file beside it. Without the file, or without a reason in it, the answer is "".
    """
    with contextlib.suppress(OSError, LoadError, UnicodeDecodeError):
        lines = Path(f"{path}.unread").read_bytes().decode("utf-8").splitlines() if path.endswith(".exported") else []
        return next((line.removeprefix(WHY) for line in lines if line.startswith(WHY)), "")
    return ""


def as_text(report: dict[str, Any]) -> str:
    """Return the report for a person to read."""
    again = report["whenever_a_file_is_added"].items()
    text = "".join(f"{path} is built again whenever a file is added: {why}\n" for path, why in again)
    if report["equal"]:
        return f"{text}{report['first']} and {report['second']} are made from the same components\n"
    return text + "\n".join([*lines(report["differences"]), *_kernel_lines(report.get("kernels", ()))]) + "\n"


def _kernel_lines(changes: Sequence[Mapping[str, Any]]) -> list[str]:
    """The changes of kernels, below a title."""
    names = [" ".join(filter(None, (row["artifact"], row["kernel"]))) for row in changes]
    what = [
        f"  {name}: {row['figure']} {row['first']} -> {row['second']}" for name, row in zip(names, changes, strict=True)
    ]
    return ["so these kernels differ", *what] if what else []


def lines(differences: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the rows of a report for a person to read, those of an artifact below its name."""
    lines, artifact = [], None
    for row in differences:
        if row["artifact"] != artifact:
            artifact = row["artifact"]
            lines += [artifact] if artifact else []
        indent = "  " if artifact else ""
        if "change" in row:
            lines.append(f"{indent}{row['change']}")
            continue
        values = ["(none)" if row[side] is None else row[side] for side in ("first", "second")]
        what = "differs" if values[0] == values[1] else " -> ".join(values)
        lines.append(f"{indent}{row['component']}: {what}")
    return lines


@dataclass(frozen=True)
class _Artifact:
    """One artifact.

    made_from: its components; None of an exported artifact without a description.
    identity: function, variant, target ("" of an exported artifact) and bucket; None if it is not known.
    serialized: the exported artifact; empty if it is not available. path: of the file, if it has only this artifact.
    kernels: reads those of an executable for NVIDIA devices; None if there is none at hand.
    """

    made_from: components.Table | None
    identity: tuple[str, str, str, str] | None = None
    serialized: bytes = b""
    path: str = ""
    kernels: Callable[[], Sequence[Mapping[str, Any]]] | None = None


_Artifacts = Mapping[str, _Artifact]
"""The artifacts of a bundle by name, or the one of a file under the name ""."""


def _read(
    path: str,
    roots: Sequence[str],
    packages: Sequence[str],
    plugins: Mapping[str, Path],
    environments: Mapping[str, tuple[str, str]],
) -> _Artifacts | Inputs:
    with blaming(path, _WRITE, of=(LoadError, ValueError, KeyError, TypeError)):
        if path.endswith(".aot"):
            return _bundle(Archive(path))
        if path.endswith(".xla"):
            return {"": _executable_at(path)}
        if path.endswith(".exported"):
            beside, serialized = Path(f"{path}.json"), reading.whole(path)
            if beside.is_file():
                return {"": dataclasses.replace(_description(reading.whole(beside, LARGEST)), serialized=serialized)}
            _held(serialized, "")
            return {"": _Artifact(None, None, serialized, path)}
        return inputs.read(path, roots, packages, plugins, environments) or {
            "": _description(reading.whole(path, LARGEST))
        }


def _of(side: _Artifacts | Inputs, wanted: _Artifact | None, path: str) -> _Artifacts:
    """Return the artifacts of one side: only `wanted`, under the name "", or all if `wanted` is None."""
    if wanted is None:
        return _current(side) if isinstance(side, Inputs) else side
    if not isinstance(side, Inputs):
        if "" in side:
            return side
        matching = [
            artifact for artifact in side.values() if artifact.identity and artifact.identity == wanted.identity
        ]
    else:
        exports = {name: (spec.name, spec.variant, "", "") for name, spec in side.exports.items()}
        names = [name for name, identity in exports.items() if identity == wanted.identity]
        if wanted.identity is None:
            names = [name for name in exports if name == Path(wanted.path).stem]
        matching = [_portable(side, name) for name in names] or [
            _executable(side, name)
            for name, (_, spec) in side.executables.items()
            if _identity(spec.function, spec.variant, spec.target.name, spec.bucket) == wanted.identity
        ]
    if matching:  # several where several jaxlibs compile it
        of_jaxlib = (artifact for artifact in matching if _jaxlib(artifact) == _jaxlib(wanted))
        return {"": next(of_jaxlib, matching[0])}
    if wanted.identity is None:
        what = f"it is not known which function {wanted.path} belongs to"
        raise StagecError(Problem(path, "", what, f"keep its description beside it, as {wanted.path}.json"))
    function, variant, target, bucket = wanted.identity
    what = ", ".join(filter(None, (function, variant, target, bucket)))
    raise StagecError(Problem(path, "", f"it has no artifact of {what}"))


def _jaxlib(artifact: _Artifact) -> str:
    return (artifact.made_from or {}).get("jaxlib", {}).get("value", "")


def _current(current: Inputs) -> _Artifacts:
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(current.portable, current.exports))
    prefix = f"{current.name}."
    return {
        "bundle": _Artifact(components.table({"name": current.name, "version": current.version})),
        **{f"{name.removeprefix(prefix)} (portable)": _portable(current, name) for name in current.exports},
        **{name.removeprefix(prefix): _executable(current, name) for name in current.executables},
    }


def _portable(current: Inputs, name: str) -> _Artifact:
    serialized, description, _ = current.portable(name)
    return dataclasses.replace(_description(description), serialized=serialized)


def _executable(current: Inputs, name: str) -> _Artifact:
    from stagec.building.compilation import made_from

    export, spec = current.executables[name]
    serialized, _, lowered_for = current.portable(export)
    environment = current.environments.get(name)
    made = inputs.made_elsewhere(environment, serialized, spec, lowered_for) if environment else None
    return _Artifact(
        made or made_from(serialized, spec, lowered_for),
        _identity(spec.function, spec.variant, spec.target.name, spec.bucket),
    )


def _bundle(archive: Archive) -> _Artifacts:
    artifacts = {"bundle": _Artifact(components.table({key: archive.index[key] for key in ("name", "version")}))}
    for name, function in archive.index["functions"].items():
        portable = _description(archive.read(function["description"], LARGEST))
        serialized = archive.read(function["exported"], reading.LARGEST)
        artifacts[f"{name} (portable)"] = dataclasses.replace(portable, serialized=serialized)
        for executable in function["executables"]:
            # An executable may be one member with others, a description never is.
            stem = executable["description"].removesuffix(".json")
            text = archive.read(executable["description"], LARGEST)
            of_archive = functools.partial(kernels.in_bundle, archive, executable, Description.from_json(text))
            artifacts[stem] = dataclasses.replace(_description(text), kernels=of_archive)
    return artifacts


def _executable_at(path: str) -> _Artifact:
    text = reading.whole(Path(path).with_suffix(".json"), LARGEST)
    of_file = functools.partial(kernels.in_file, path, Description.from_json(text))
    return dataclasses.replace(_description(text), kernels=of_file)


def _description(text: bytes) -> _Artifact:
    data = strict_json.parse(text, LARGEST)
    if isinstance(data, dict) and data.get("kind") == "exported":
        strict_json.check_format(data, EXPORTED_FORMAT, "export it again")
        _EXPORTED(data)
        return _Artifact(data["components"], (data["function"], data["variant"], "", ""))
    description = Description.from_json(text)
    identity = _identity(description.function, description.variant, description.target.name, description.bucket)
    return _Artifact({name: dict(row) for name, row in description.components.items()}, identity)


def _identity(function: str, variant: str, target: str, bucket: Mapping[str, int]) -> tuple[str, str, str, str]:
    return function, variant, target, naming.bucket(bucket)


def _comparable(first: _Artifact, second: _Artifact) -> tuple[components.Table, components.Table]:
    """Return the components of both artifacts, as far as they are known of both."""
    both = first, second
    function = next((artifact.identity[0] for artifact in both if artifact.identity), "")
    described = [artifact.made_from for artifact in both if artifact.made_from is not None]
    # A description has more facts than its artifact: compare only the common ones.
    use_held = len(described) < 2 and all(artifact.serialized for artifact in both)
    tables = [
        _held(artifact.serialized, function) if use_held or artifact.made_from is None else artifact.made_from
        for artifact in both
    ]
    dropped = {*tables[0]} ^ {*tables[1]}
    if len(described) == 2:
        dropped &= {components.INTERPRETER}
    elif use_held:
        dropped = set()
    else:
        dropped = {name for name in dropped if not name.startswith("aval ")}
    left, right = ({name: row for name, row in table.items() if name not in dropped} for table in tables)
    return left, right


_EXPORTED = json_shapes.shape(
    {"function": str, "variant": str, "components": {...: {"value": str, "sha256": str}}, ...: object}
)


@functools.cache
def _held(serialized: bytes, name: str) -> components.Table:
    """Return the components that an exported artifact without a description has itself."""
    table: components.Table = child.call(held, serialized, name)
    return table


def held(serialized: bytes, name: str) -> components.Table:
    """Do that in this process; jaxlib may end it if the artifact is damaged.

    name: of the function; "": as the artifact says. Raises ValueError for anything else.
    """
    exported = Exported.deserialize(serialized)
    paths = map(argument_path, exported.in_tree.paths())
    values: dict[str, object] = {f"aval {p}": str(a) for p, a in zip(paths, exported.in_avals, strict=True)}
    values |= {"key platforms": list(exported.platforms), "devices": exported.nr_devices}
    values["disabled checks"] = list(exported.disabled_safety_checks)
    values["calling convention"] = exported.calling_convention_version
    return {**components.source(name or exported.fun_name, exported.mlir_module_serialized), **components.table(values)}
