"""What `stagec explain A B` tells: which components of two artifacts differ, by name (`stagec.components`)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stagec import components
from stagec.errors import Problem, StagecError
from stagec.runtime.archive import Archive
from stagec.runtime.description import Description
from stagec.runtime.refusal import LoadError
from stagec.specs import FunctionSpec
from stagec.stages import mlir
from stagec.stages.exported import Exported, NotExported
from stagec.trees import argument_path

EXPORT_FORMAT = 1
"""Version of the JSON form of a portable artifact's description. 1 (November 2026): the first."""


def describe_export(spec: FunctionSpec, serialized: bytes, versions: Mapping[str, str]) -> str:
    """Return the description of a portable artifact: what lies beside it as `<name>.exported.json`.

    spec: the function's slice of the plan. serialized: the artifact.
    versions: of jax, of stagec, and of everything else that tracing imported.
    """
    exported = Exported.deserialize(serialized)
    paths = map(argument_path, exported.in_tree.paths())
    avals = {path: str(aval) for path, aval in zip(paths, exported.in_avals, strict=True)}
    made_from = components.of_export(asdict(spec), exported.mlir_module_serialized, avals, versions)
    values = {
        "format": EXPORT_FORMAT,
        "kind": "exported",
        "manifest": spec.manifest,
        "function": spec.name,
        "variant": spec.variant,
        "custom_calls": mlir.inventory(exported.mlir_module_serialized),
        "exported_sha256": hashlib.sha256(serialized).hexdigest(),
        "components": made_from,
    }
    return json.dumps(values, indent=1) + "\n"


def explain(first: str, second: str) -> dict[str, Any]:
    """Return a report on how the artifacts in the files `first` and `second` differ; "equal" says whether they do.

    An artifact is a bundle (.aot), an executable (.xla) or portable artifact (.exported) with its description beside
    it, or such a description (.json). A portable artifact without one is compared by what it holds itself.
    Raises StagecError for a file that is none of them.
    """
    tables = (_tables(first), _tables(second))
    rows = []
    if first.endswith(".aot") == second.endswith(".aot") and not first.endswith(".aot"):
        tables = ({"": next(iter(tables[0].values()))}, {"": next(iter(tables[1].values()))})
    for name in sorted({*tables[0], *tables[1]}):
        sides = [table.get(name) for table in tables]
        if None in sides:
            here = "only in the first" if sides[1] is None else "only in the second"
            rows.append({"artifact": name, "component": "artifact", "change": here, "first": None, "second": None})
            continue
        rows += [
            {"artifact": name, "component": component, "first": before, "second": after}
            for component, before, after in components.differences(sides[0] or {}, sides[1] or {})
        ]
    return {"kind": "explanation", "equal": not rows, "first": first, "second": second, "differences": rows}


def as_text(report: dict[str, Any]) -> str:
    """Return the report for a person to read."""
    if report["equal"]:
        return f"{report['first']} and {report['second']} are made from the same components\n"
    lines, artifact = [], None
    for row in report["differences"]:
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
    return "\n".join(lines) + "\n"


def _tables(path: str) -> dict[str, components.Table]:
    """Return the components of each artifact in the file."""
    try:
        if path.endswith(".aot"):
            return _bundle(Archive(path))
        if path.endswith(".xla"):
            return {"": _description(Path(path).with_suffix(".json"))}
        if path.endswith(".exported"):
            beside = Path(f"{path}.json")
            return {"": _description(beside) if beside.is_file() else _exported(Path(path).read_bytes())}
        return {"": _description(Path(path))}
    except OSError as error:
        raise StagecError(Problem(str(error.filename or path), "", f"cannot be read: {error.strerror}")) from error
    except (LoadError, NotExported, ValueError, KeyError, TypeError) as error:
        what = str(error).removeprefix(f"{path}: ")
        write = "give a bundle (.aot), an executable (.xla), a portable artifact (.exported) or a description (.json)"
        raise StagecError(Problem(path, "", what, write)) from error


def _description(path: Path) -> components.Table:
    text = path.read_bytes()
    data = json.loads(text)
    if isinstance(data, dict) and data.get("kind") == "exported" and data.get("format") == EXPORT_FORMAT:
        table: components.Table = data["components"]
        return table
    return _plain(Description.from_json(text))


def _plain(description: Description) -> components.Table:
    return {name: dict(row) for name, row in description.components.items()}


def _bundle(archive: Archive) -> dict[str, components.Table]:
    tables = {"bundle": components.table({key: archive.index[key] for key in ("name", "version")})}
    for name, function in archive.index["functions"].items():
        tables[f"{name} (portable)"] = _exported(archive[function["exported"]], name)
        for executable in function["executables"]:
            stem = executable["executable"].removesuffix(".xla")
            tables[stem] = _plain(Description.from_json(archive[executable["description"]]))
    return tables


def _exported(serialized: bytes, name: str = "") -> components.Table:
    exported = Exported.deserialize(serialized)
    paths = map(argument_path, exported.in_tree.paths())
    values: dict[str, object] = {f"aval {p}": str(a) for p, a in zip(paths, exported.in_avals, strict=True)}
    values |= {"key platforms": list(exported.platforms), "devices": exported.nr_devices}
    values["key disabled_checks"] = list(exported.disabled_safety_checks)
    values["calling convention"] = exported.calling_convention_version
    return {**components.source(name or exported.fun_name, exported.mlir_module_serialized), **components.table(values)}
