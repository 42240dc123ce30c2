"""`stagec diff A B`: report the differences of two bundles, from signatures down to members.

`stagec.audit.explanation` finds the reasons: the components of their artifacts that differ. Its rows are in the
report too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from stagec.audit import explanation, kernels, measurements
from stagec.bundle.additions import jaxlibs
from stagec.bundle.archive import INDEX, Archive
from stagec.bundle.index import FUNCTIONS
from stagec.bundle.members import digest
from stagec.core.builds.platforms import GPUS
from stagec.core.data.strict_json import difference
from stagec.core.messages.errors import blaming
from stagec.core.trees.folding import what_it_is
from stagec.core.trees.tree import Tree, argument_path

SIGNATURE = ("static", "platforms", "in_avals", "out_avals", "in_tree", "out_tree")
"""The keys of a function's entry in the index that matter to a caller."""

METRICS = ("bytes", "flops", "peak_bytes")
"""The figures of executables to compare, besides kernels: size, operations of a call, most bytes on one device."""

_MOST_LEAVES = 20
"""How many leaves of a structure a person gets to read."""
Row = dict[str, Any]
"""{"name", "change": "added", "removed" or "changed"}; if changed, also key -> {"first", "second"}."""


def compare(first: str, second: str) -> dict[str, Any]:
    """Return a report on the bundles at both paths; "equal" says whether they are the same byte for byte.

    "bundle", "targets", "functions", "executables", "members" and "weights" (files beside the bundle) have rows;
    "components" has those of `explain`.
    Raises StagecError for a file that is not a bundle, and LoadError for a bundle that is damaged.
    """
    archives = []
    for path in (first, second):
        with blaming(path, "give two bundles (.aot)"):
            archives.append(Archive(path))
    left, right = map(_index, archives)
    sections = {
        "bundle": _rows(
            *(
                {"bundle": {**{key: index[key] for key in ("name", "version", "format")}, "jaxlib": [*jaxlibs(index)]}}
                for index in (left, right)
            )
        ),
        "targets": _rows(left["targets"], right["targets"]),
        "functions": _rows(*(_signatures(archive) for archive in archives)),
        "executables": _rows(*(_executables(archive) for archive in archives)),
        "members": _rows(left["members"], right["members"]),
        "weights": _rows(*(index["weights_files"] for index in (left, right))),
    }
    components = explanation.explain(first, second, (), ())["differences"]  # nothing is traced for bundles
    equal = archives[0].sha256() == archives[1].sha256()
    # The order of targets, for example, is in no section, and it changes what a loader chooses.
    if not equal and not components and not any(sections.values()):
        texts = [archive.encoded_index for archive in archives]
        changed = {"sha256": dict(zip(("first", "second"), map(digest, texts), strict=True))}
        where = difference(left, right)
        sections["bundle"] = [{"name": f"{INDEX}: {where}", "change": "changed", **changed}]
    return {
        "kind": "comparison",
        "equal": equal,
        "first": first,
        "second": second,
        **sections,
        "components": components,
    }


def _index(archive: Archive) -> dict[str, Any]:
    """Return the index of a bundle with all functions, and without the member that has them."""
    # It changes with every function, whose change has a row already.
    members = {name: entry for name, entry in archive.index["members"].items() if name != FUNCTIONS}
    return {**archive.index, "functions": dict(archive.index["functions"]), "members": members}


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
            lines += [f"      {line}" for key, value in values for line in _lines(key, value["first"], value["second"])]
    # Items of only one of them are reported above.
    both = [row for row in report["components"] if "change" not in row]
    if both:
        lines += ["made from", *(f"  {line}" for line in explanation.lines(both))]
    return "\n".join(lines) + "\n"


_SIGNS = {"added": "+", "removed": "-", "changed": "~"}


def _signatures(archive: Archive) -> dict[str, Row]:
    functions = archive.index["functions"]
    return {name: {key: entry[key] for key in SIGNATURE} for name, entry in functions.items()}


def _executables(archive: Archive) -> dict[str, Row]:
    """Return the metrics of each executable, by the name of its description without `.json`."""
    rows = {}
    for function in archive.index["functions"].values():
        for entry in function["executables"]:
            description = measurements.description_of(archive, entry)
            metrics = {"bytes": description.executable_bytes, **description.analysis}
            name = entry["description"].removesuffix(".json")
            rows[name] = {key: metrics[key] for key in METRICS}
            rows[name] |= {"avoided": dict(description.avoided)} if description.avoided else {}
            if description.target.platform in GPUS:
                rows[name]["kernels"] = kernels.figures(kernels.in_bundle(archive, entry, description))
    return rows


def _rows(first: Mapping[str, Row], second: Mapping[str, Row]) -> list[Row]:
    rows: list[Row] = []
    for name in sorted({*first, *second}):
        before, after = first.get(name), second.get(name)
        if before is None or after is None:
            rows.append({"name": name, "change": "removed" if after is None else "added"})
        elif difference(before, after) is not None:
            keys = [key for key in {**before, **after} if difference(before.get(key), after.get(key)) is not None]
            changed = {key: {"first": before.get(key), "second": after.get(key)} for key in keys}
            rows.append({"name": name, "change": "changed", **changed})
    return rows


def _lines(key: str, first: Any, second: Any) -> list[str]:
    """Describe the change of a value for a person: for tables, each changed key; for trees, the changed leaves."""
    if key in ("in_tree", "out_tree"):
        return [f"{key}: {text}" for text in _trees(key, Tree.from_json(first), Tree.from_json(second))]
    if isinstance(first, dict) and isinstance(second, dict):
        pairs = ((name, first.get(name), second.get(name)) for name in {**first, **second})
        return [
            line for name, *pair in pairs if repr(pair[0]) != repr(pair[1]) for line in _lines(f"{key}.{name}", *pair)
        ]
    change = f"{_short(first)} -> {_short(second)}"
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in (first, second)) and first:
        change = f"{change} ({(second - first) / first:+.1%})"
    return [f"{key}: {change}"]


def _trees(key: str, first: Tree, second: Tree) -> list[str]:
    """Return the leaves of only one of two structures; if there are none, the first node with another container."""
    written = argument_path if key == "in_tree" else "result{}".format
    before, after = ({written(path): None for path in tree.paths()} for tree in (first, second))
    changed = [f"- {path}" for path in before if path not in after] + [
        f"+ {path}" for path in after if path not in before
    ]
    if not changed:
        return [_containers(first, second, written)]
    return changed[:_MOST_LEAVES] + ([f"{len(changed) - _MOST_LEAVES} more"] if len(changed) > _MOST_LEAVES else [])


def _containers(first: Tree, second: Tree, written: Callable[[str], str], path: str = "") -> str:
    """Describe the first different node of two structures with the same leaves."""
    same = first._replace(children=()) == second._replace(children=())
    for name, child, other in zip(first.child_names(), first.children, second.children, strict=False):
        if same and child != other:
            return _containers(child, other, written, f"{path}{f'.{name}' if name.isidentifier() else f'[{name}]'}")
    where = written(path) if path else "the whole"
    kinds = [what_it_is(tree) for tree in (first, second)]
    if kinds[0] == kinds[1]:
        kinds = [f"{kinds[0]} of {', '.join(tree.child_names())}" for tree in (first, second)]
    return f"{where}: {' -> '.join(dict.fromkeys(kinds))}"


def _short(value: object) -> str:
    match value:
        case None:
            return "(none)"
        case bool():
            return str(value).lower()
        case int() | float():
            return f"{value:,}"
        case [*values]:
            return f"({', '.join(map(_short, values))})"
        case dict():
            return f"{{ {', '.join(f'{name} = {_short(item)}' for name, item in value.items())} }}" if value else "{}"
    text = str(value)
    return text[:12] if len(text) == 64 and not text.strip("0123456789abcdef") else text
