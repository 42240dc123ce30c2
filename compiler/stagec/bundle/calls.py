"""How the functions of a bundle are called, from its index and from what lies beside their exported artifacts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from stagec.bundle.archive import Archive
from stagec.bundle.description import LARGEST
from stagec.core.data import strict_json
from stagec.core.messages.calls import Call
from stagec.core.sizes.avals import parse_aval
from stagec.core.trees import json_shapes
from stagec.core.trees.tree import Tree

_DESCRIPTION = json_shapes.shape(
    {
        "parameters": [str],
        "donated": [str],
        "constants": [{"name": str, "aval": str, "bytes": int}],
        "serve": {
            "inputs?": {...: str},
            "outputs?": {...: str},
            "state?": {...: {"argument?": str, "result?": str, "idle?": float}},
            "rows?": json_shapes.matching("independent", "independent"),
        },
        "components": {...: {"value": str, "sha256": json_shapes.sha256}},
        "premises?": {
            "function": str,
            "jitted": bool,
            "weak": bool,
            "sources": {...: json_shapes.sha256},
            "settings": {...: str},
            "values": str,
            "unknown": str,
        },
        ...: object,
    }
)


def call_of(archive: Archive, artifact: str, names: bool = True) -> Call:
    """Return how a signature of a bundle is called. artifact: its name in the index.

    names: whether to read the description of the exported artifact: it has the names of parameters, and says which
        arguments are donated.
    Raises LoadError ("digest", "format") or ValueError if that is damaged.
    """
    entry = archive.index["functions"][artifact]
    described = description_of(archive, artifact) if names else {}
    call = of_interface(entry["function"], entry, described.get("parameters", ()))
    return replace(
        call,
        static={name: _hashable(value) for name, value in entry["static"].items()},
        donated=call.leaves_of(described.get("donated", ())),
        bound={bound["leaf"]: bound["weight"] for bound in entry["bind"]},
        serve=described.get("serve", {}),
        filled=[table["mask"] for table in entry["padding"].values() if table["mask"]],
    )


def of_interface(name: str, interface: Mapping[str, Any], parameters: Sequence[str] = ()) -> Call:
    """Return how to call a function, from the result of `Exported.interface` or from an index."""
    in_tree, out_tree = (Tree.from_json(interface[key]) for key in ("in_tree", "out_tree"))
    in_avals, out_avals = ([parse_aval(aval) for aval in interface[key]] for key in ("in_avals", "out_avals"))
    return Call(name, in_tree, in_avals, out_tree, out_avals, parameters)


def description_of(archive: Archive, artifact: str) -> Mapping[str, Any]:
    """Return the description beside an exported artifact. Raises the errors of `call_of`."""
    member = archive.index["functions"][artifact]["description"]
    described: Mapping[str, Any] = strict_json.parse(archive.read(member, LARGEST), LARGEST)
    _DESCRIPTION(described)
    return described


def _hashable(value: Any) -> Any:
    """Return a static argument as it is passed: JSON has lists for tuples."""
    return tuple(map(_hashable, value)) if isinstance(value, list) else value
