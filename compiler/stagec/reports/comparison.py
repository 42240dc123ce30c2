"""What `stagec diff A B` reports: how two bundles differ, from signatures down to members.

`stagec.reports.explanation` says why: which components of their artifacts differ. Its rows are in the report too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stagec.bundle.archive import Archive
from stagec.bundle.description import LARGEST, Description
from stagec.core.errors import Problem, StagecError
from stagec.core.refusal import LoadError
from stagec.reports import explanation

SIGNATURE = ("static", "platforms", "in_avals", "out_avals", "in_tree", "out_tree")
"""What of a function's entry in the index a caller sees."""

METRICS = ("bytes", "flops", "peak_bytes")
"""What is compared of executables: size of the file, operations of a call, most bytes in use on one device."""

Row = dict[str, Any]
"""{"name", "change": "added", "removed" or "changed"}; of what changed also key -> {"first", "second"}."""


def compare(first: str, second: str) -> dict[str, Any]:
    """Return a report on the bundles at both paths; "equal" says whether they are the same byte for byte.

    "bundle", "targets", "functions", "executables", "members" and "weights" (files beside the bundle) have rows;
    "components" has those of `explain`.
    Raises StagecError when one is no bundle.
    """
    try:
        return _compare([_open(path) for path in (first, second)], first, second)
    except LoadError as error:
        raise StagecError(Problem("", "", str(error))) from error


def _compare(archives: Sequence[Archive], first: str, second: str) -> dict[str, Any]:
    left, right = (archive.index for archive in archives)
    sections = {
        "bundle": _rows(
            *({"bundle": {key: one[key] for key in ("name", "version", "format")}} for one in (left, right))
        ),
        "targets": _rows(left["targets"], right["targets"]),
        "functions": _rows(*(_signatures(archive) for archive in archives)),
        "executables": _rows(*(_executables(archive) for archive in archives)),
        "members": _rows(left["members"], right["members"]),
        "weights": _rows(*(one.get("weights_files", {}) for one in (left, right))),
    }
    components = explanation.explain(first, second, (), ())["differences"]  # nothing is traced for bundles
    equal = not components and not any(sections.values())
    return {
        "kind": "comparison",
        "equal": equal,
        "first": first,
        "second": second,
        **sections,
        "components": components,
    }


def as_text(report: dict[str, Any]) -> str:
    """Return the report for a person to read: `+` is in the second only, `-` in the first only, `~` in both."""
    if report["equal"]:
        return f"{report['first']} and {report['second']} are the same\n"
    lines = []
    for section in ("bundle", "targets", "functions", "executables", "members", "weights"):
        if report[section]:
            lines.append(section)
        for row in report[section]:
            lines.append(f"  {_SIGNS[row['change']]} {row['name']}")
            values = ((key, value) for key, value in row.items() if key not in ("name", "change"))
            lines += [f"      {key}: {_told(value)}" for key, value in values]
    # What only one of them has is reported above.
    both = [row for row in report["components"] if "change" not in row]
    if both:
        lines += ["made from", *(f"  {line}" for line in explanation.lines(both))]
    return "\n".join(lines) + "\n"


_SIGNS = {"added": "+", "removed": "-", "changed": "~"}


def _open(path: str) -> Archive:
    try:
        return Archive(path)
    except LoadError as error:
        raise StagecError(Problem(path, "", str(error).removeprefix(f"{path}: "), "give two bundles (.aot)")) from error


def _signatures(archive: Archive) -> dict[str, Row]:
    functions = archive.index["functions"]
    return {name: {key: entry[key] for key in SIGNATURE} for name, entry in functions.items()}


def _executables(archive: Archive) -> dict[str, Row]:
    """Return the metrics of each executable, by the name of its description without `.json`."""
    found = {}
    for function in archive.index["functions"].values():
        for entry in function["executables"]:
            try:
                description = Description.from_json(archive.read(entry["description"], LARGEST))
            except ValueError as error:
                raise StagecError(Problem(archive.path, entry["description"], str(error))) from error
            metrics = {"bytes": description.executable_bytes, **description.analysis}
            found[entry["description"].removesuffix(".json")] = {key: metrics[key] for key in METRICS}
    return found


def _rows(first: Mapping[str, Row], second: Mapping[str, Row]) -> list[Row]:
    rows: list[Row] = []
    for name in sorted({*first, *second}):
        before, after = first.get(name), second.get(name)
        if before is None or after is None:
            rows.append({"name": name, "change": "removed" if after is None else "added"})
        elif before != after:
            keys = [key for key in {**before, **after} if before.get(key) != after.get(key)]
            changed = {key: {"first": before.get(key), "second": after.get(key)} for key in keys}
            rows.append({"name": name, "change": "changed", **changed})
    return rows


def _told(value: Row) -> str:
    first, second = value["first"], value["second"]
    if not all(isinstance(one, int | float) for one in (first, second)):
        return f"{_short(first)} -> {_short(second)}"
    change = f"{first:,.0f} -> {second:,.0f}"
    return f"{change} ({(second - first) / first:+.1%})" if first else change


def _short(value: object) -> str:
    match value:
        case None:
            return "(none)"
        case [*values]:
            return f"({', '.join(map(str, values))})"
    text = str(value)
    return text[:12] if len(text) == 64 and not text.strip("0123456789abcdef") else text
