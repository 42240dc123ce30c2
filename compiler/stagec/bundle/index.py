"""The index of a bundle: check `index.json` and the functions that it lists key by key.

docs/bundle-format.md describes every key. They are enough to choose an executable, without opening a description. The
time of a check is proportional to the length of what is checked; symbolic dimensions would take more, and have limits.
Standard library only.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from stagec.bundle.description import TARGET, Description
from stagec.core.builds import naming
from stagec.core.builds.version import VERSION
from stagec.core.data import paths
from stagec.core.data.strict_json import shown
from stagec.core.sizes.avals import dimension_variables, num_bytes, parse_aval
from stagec.core.trees import json_shapes
from stagec.core.trees.tree import Tree

FUNCTIONS = "functions.jsonl"
"""The member with the functions of a bundle: a line of JSON for each, in the order of the index."""
LARGEST = 2**24
"""Bytes of the index and of the functions (16 MiB each), enough for some 30,000 executables. docs/security.md says how
long it takes to check them."""
UNKNOWN = "unknown"
"""Stands for an unknown version, or for a date that follows from it."""
UNKNOWN_CALL = "unknown"
"""The class of a custom call that neither XLA nor jaxlib provides (`pjrt/custom_calls.py`)."""

MOST_EXPRESSIONS = 2**18
"""Characters of all avals with expressions for dimensions (`f32[2*batch]`): reading one takes microseconds for each."""
MOST_SIZES = 2**20
"""Characters of a function's symbolic dimensions times its executables: each is evaluated for each of them."""
_SIMPLE = re.compile(r"~?[a-z0-9_<>]+\[(?:[A-Za-z0-9_]+(?:,[A-Za-z0-9_]+)*)?\]")
"""An aval whose dimensions are numbers and names."""

_NAME = json_shapes.matching("[A-Za-z_][A-Za-z0-9_-]*", "a name of letters, digits, _ and -")
_VERSION = json_shapes.matching("[A-Za-z0-9][A-Za-z0-9.+_-]*", "a version of letters, digits and . + _ -")
_VARIANT = json_shapes.either('a name of letters, digits, _ and -, or "",', _NAME, "")
_DATE = json_shapes.matching("unknown|[0-9]{4}-[0-9]{2}-[0-9]{2}", 'a date such as "2026-11-18", or "unknown"')

_FILE = json_shapes.matching(rf"{paths.PLAIN}\.safetensors", "a path of a .safetensors file")
MEMBER = json_shapes.shape({"sha256": json_shapes.sha256, "bytes": int})

NAMES = ("executable", "description", "stablehlo")
"""The keys of an executable's entry that name members."""
_EXECUTABLE = {
    **dict.fromkeys(("target", *NAMES), str),
    "bucket": {...: int},
    "nr_devices": int,
    "custom_calls": {...: str},
    "versions": {"jaxlib": str, ...: str},
}
_ARRAY = {"member": str, "aval": json_shapes.static_aval}
IN_FILE: Mapping[str, Any] = {"start": int, "aval": json_shapes.static_aval}
"""Form of an array in a file beside the bundle."""
INTERFACE: Mapping[str, Any] = {
    "in_tree": json_shapes.tree,
    "in_avals": [json_shapes.aval],
    "out_tree": json_shapes.tree,
    "out_avals": [json_shapes.aval],
    "platforms": [str],
    "nr_devices": int,
    "custom_calls": {...: str},
    "calling_convention_version": int,
}
"""Forms of the fields that come from an exported artifact and its description."""
_FUNCTION = json_shapes.shape(
    {
        **INTERFACE,
        "function": _NAME,
        "variant": _VARIANT,
        "static": {...: object},
        "bind": [{"leaf": int, "weight": str}],
        "padding": {...: {"fill": float, "mask": str}},
        "exported": str,
        "versions": {...: str},
        "readable_until": _DATE,
        "executables": [_EXECUTABLE],
        "description": str,
        "golden?": {
            "bucket": {...: int},
            "inputs": {...: _ARRAY},
            "outputs": {...: {**_ARRAY, "rtol?": float, "atol?": float}},
        },
    }
)
_INSIDE = json_shapes.shape(_ARRAY)
_OUTSIDE = json_shapes.shape({"file": str, **IN_FILE})


def _weight(value: Any) -> None:
    """Shape of an array: of a member, or of a file beside the bundle."""
    outside = isinstance(value, dict) and "file" in value
    (_OUTSIDE if outside else _INSIDE)(value)


_LISTED = {"function": _NAME, "variant": _VARIANT, "start": int, "sha256": json_shapes.sha256}
_BUNDLE = json_shapes.shape(
    {
        "format": int,
        "kind": "bundle",
        "name": _NAME,
        "version": _VERSION,
        "versions": {...: str},
        "targets": json_shapes.table(TARGET, _NAME),
        "functions": json_shapes.table(_LISTED, _NAME),
        "weights": {...: _weight},
        "weights_files": json_shapes.table(MEMBER, _FILE),
        "members": object,
        "base?": {"index": str, "functions": str, "sha256": json_shapes.sha256},
    }
)


def key_of(executable: Mapping[str, Any]) -> tuple[str, tuple[tuple[str, int], ...], str]:
    """Return the unique key of an executable of a function: target, bucket, and the jaxlib that made it.

    executable: its entry in the index.
    """
    return executable["target"], tuple(sorted(executable["bucket"].items())), executable["versions"]["jaxlib"]


def numbers(release: str) -> list[int]:
    """Return a release as numbers, to compare it with others: [0, 12, 0, 1]."""
    return [int(part) for part in re.findall(r"\d+", release)]


def check(index: Any) -> None:
    """Check the index of a bundle: keys, types, and that the names in each entry exist.

    `check_function` checks each function before its use: a process calls few of those of a large bundle.
    Raises ValueError, naming the key at fault.
    """
    _BUNDLE(index)
    _check_writer(index["versions"].get("stagec", ""))
    _check_lines(index)
    for key in ("index", "functions") if "base" in index else ():
        _check_named(f"base.{key}", index["base"][key], index["members"], "member")
    files = index["weights_files"]
    for name, weight in index["weights"].items():
        if "file" in weight:
            _check_range(f"weights.{name}", weight, files)
        else:
            _check_array(f"weights.{name}", weight, index["members"])
    # A file that no array comes from would still have to lie beside the bundle, and be read.
    unused = sorted(files.keys() - {weight.get("file") for weight in index["weights"].values()})
    if unused:
        raise ValueError(f"weights_files: no array comes from {unused[0]}")
    for name, listed in index["functions"].items():
        artifact = naming.artifact(listed["function"], listed["variant"])
        if artifact != name:
            raise ValueError(f"functions.{name}: it belongs to {artifact}")


def _check_lines(index: Mapping[str, Any]) -> None:
    """Raise ValueError unless the lines of the functions are all of their member, one after the other."""
    _check_named("functions", FUNCTIONS, index["members"], "member")
    size = index["members"][FUNCTIONS]["bytes"]
    if size > LARGEST:
        raise ValueError(f"functions: {FUNCTIONS} has {size:,} bytes, over the limit of {LARGEST:,}")
    if any([*listed] != [*_LISTED] for listed in index["functions"].values()):
        raise ValueError(f"functions: expected {', '.join(_LISTED)} of each, in this order")
    starts = [*(listed["start"] for listed in index["functions"].values()), size]
    if starts[0] != 0 or any(at >= end for at, end in itertools.pairwise(starts)):
        raise ValueError(f"functions: expected their lines one after the other, from 0 to the {size:,} bytes there are")


def check_function(index: Mapping[str, Any], name: str, function: Mapping[str, Any], before: int = 0) -> int:
    """Check a function's entry against an index that was checked; return how many characters its expressions have.

    before: those of other functions of the bundle. Raises ValueError, naming the key at fault.
    """
    where = f"functions.{name}"
    expressions = sum(map(len, _expressions(function)))
    if before + expressions > MOST_EXPRESSIONS:
        raise ValueError(f"{where}: avals with expressions for dimensions have over {MOST_EXPRESSIONS:,} characters")
    try:
        _FUNCTION(function)
    except json_shapes.Mismatch as error:
        raise error.below(f".{where}") from None
    for which in ("in", "out"):
        if Tree.from_json(function[f"{which}_tree"]).num_leaves != len(function[f"{which}_avals"]):
            raise ValueError(f"{where}.{which}_avals: the tree has a different number of leaves")
    for key in ("exported", "description"):
        _check_named(f"{where}.{key}", function[key], index["members"], "member")
    for key in ("inputs", "outputs"):
        for path, array in function.get("golden", {}).get(key, {}).items():
            _check_array(f"{where}.golden.{key}.{path}", array, index["members"])
    _check_bound(f"{where}.bind", function, index["weights"])
    _check_executables(f"{where}.executables", function, index)
    return expressions


def _check_executables(where: str, function: Mapping[str, Any], index: Mapping[str, Any]) -> None:
    seen = set()
    dims = {dim for aval in map(parse_aval, function["in_avals"]) for dim in aval.shape if isinstance(dim, str)}
    names = {*dimension_variables(dims)}
    if sum(map(len, dims)) * len(function["executables"]) > MOST_SIZES:
        raise ValueError(f"{where}: more than are checked of a function with so many dimensions")
    expressions = {}
    if dims - names:
        from stagec.core.sizes.size import parse  # most functions have none

        expressions = {dim: parse(dim).compute for dim in dims - names}
    for i, executable in enumerate(function["executables"]):
        at = f"{where}[{i}]"
        _check_named(f"{at}.target", executable["target"], index["targets"], "target")
        for key in NAMES:
            _check_named(f"{at}.{key}", executable[key], index["members"], "member")
        missing = sorted(names - executable["bucket"].keys())
        if missing:
            raise ValueError(f"{at}.bucket: the size of {missing[0]} is missing")
        for dim, evaluate in expressions.items():
            try:
                size = evaluate(executable["bucket"])
            except ValueError as error:
                raise ValueError(f"{at}.bucket: {dim}: {error}") from None
            if size < 0:
                raise ValueError(f"{at}.bucket: {dim} is {size}, and a dimension is 0 or more")
        which_one = key_of(executable)
        if which_one in seen:
            raise ValueError(f"{at}: there is another one for this target, bucket and jaxlib")
        seen.add(which_one)


def _check_writer(version: str) -> None:
    """Raise ValueError for a bundle of a later major version: it may mean something else by the same keys."""
    major = re.match(r"(\d{1,9})\.\d+\.\d+", version)
    if not major:
        raise ValueError(f"versions.stagec: expected a version such as 1.2.3, not {shown(version)!r}")
    ours = int(VERSION.partition(".")[0])
    if int(major[1]) > ours:
        what = f"stagec {shown(version)} wrote it, and this is {VERSION}, which reads what {ours} and older wrote"
        raise ValueError(f"versions.stagec: {what}")


def _expressions(function: Mapping[str, Any]) -> Iterator[str]:
    """Yield the avals with expressions for dimensions, from an unchecked entry."""
    for key in ("in_avals", "out_avals"):
        avals = function.get(key)
        written = (aval for aval in (avals if isinstance(avals, list) else ()) if isinstance(aval, str))
        yield from (aval for aval in written if not _SIMPLE.fullmatch(aval))


def _check_array(where: str, array: Mapping[str, Any], members: Mapping[str, Any]) -> None:
    _check_named(f"{where}.member", array["member"], members, "member")
    count = num_bytes(parse_aval(array["aval"]))
    if members[array["member"]]["bytes"] != count:
        raise ValueError(f"{where}: {array['aval']} takes {count:,} bytes, and the member has others")


def _check_range(where: str, array: Mapping[str, Any], files: Mapping[str, Any]) -> None:
    _check_named(f"{where}.file", array["file"], files, "file")
    end = array["start"] + num_bytes(parse_aval(array["aval"]))
    if end > files[array["file"]]["bytes"]:
        raise ValueError(f"{where}: {array['aval']} ends after {end:,} bytes, behind the end of {array['file']}")


def _check_bound(where: str, function: Mapping[str, Any], weights: Mapping[str, Any]) -> None:
    leaves = [entry["leaf"] for entry in function["bind"]]
    if leaves != sorted(set(leaves)) or any(leaf >= len(function["in_avals"]) for leaf in leaves):
        raise ValueError(f"{where}: expected sorted numbers of {len(function['in_avals'])} arguments")
    if not leaves:
        return
    tree = Tree.from_json(function["in_tree"])
    if tree.kind != "tuple" or [child.kind for child in tree.children] != ["tuple", "dict"]:
        raise ValueError(f"{where}: in_tree is not of (args, kwargs)")
    from bisect import bisect_left  # few functions have weights

    first = 0
    for top in tree.children:
        for argument in top.children:
            end = first + argument.num_leaves
            # A caller passes an argument or leaves it out: there is no way to pass half of one.
            if bisect_left(leaves, end) - bisect_left(leaves, first) not in (0, end - first):
                raise ValueError(f"{where}: an argument is bound in part")
            first = end
    for i, entry in enumerate(function["bind"]):
        _check_named(f"{where}[{i}].weight", entry["weight"], weights, "weight")
        wanted, given = function["in_avals"][entry["leaf"]].removeprefix("~"), weights[entry["weight"]]["aval"]
        if wanted != given:
            raise ValueError(f"{where}[{i}]: the argument is {wanted}, the weight {given}")


def executable_entry(description: Description) -> dict[str, Any]:
    """Return the index's entry of an executable, without `NAMES`: all that decides whether a process can run it."""
    return {
        "target": description.target.name,
        "bucket": dict(description.bucket),
        "nr_devices": description.nr_devices,
        "custom_calls": dict(description.custom_calls),
        "versions": dict(description.versions),
    }


def target_entry(description: Description) -> dict[str, Any]:
    """Return the index's entry of an executable's target: its hardware, but no compiler settings."""
    plain = description.target.to_plain()
    return {key: value for key, value in plain.items() if key not in ("name", "compiler_options")}


def describe(index: Mapping[str, Any], artifact: str, entry: Mapping[str, Any], text: bytes) -> Description:
    """Return the description `text` of the executable that `entry` of signature `artifact` names.

    Raises ValueError when it is not a description, or differs from the index, because the index chose the executable.
    """
    description = Description.from_json(text)
    members = index["members"]
    exported = index["functions"][artifact]["exported"]
    pairs = (
        ("the function", artifact, description.artifact),
        ("the entry", entry, executable_entry(description) | {key: entry[key] for key in NAMES}),
        ("the target", index["targets"][entry["target"]], target_entry(description)),
        ("the executable", members[entry["executable"]]["sha256"], description.executable_sha256),
        ("the StableHLO module", members[entry["stablehlo"]]["sha256"], description.stablehlo_sha256),
        ("the exported artifact", members[exported]["sha256"], description.exported_sha256),
    )
    for what, listed, described in pairs:
        if listed != described:
            raise ValueError(f"it is not of {what} that the index has")
    return description


def _check_named(where: str, name: str, table: Mapping[str, Any], what: str) -> None:
    if name not in table:
        raise ValueError(f"{where}: there is no {what} {name!r}")
