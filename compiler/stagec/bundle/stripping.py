"""`stagec strip`: make a bundle without the golden inputs and outputs of its functions."""

from __future__ import annotations

from stagec.bundle.archive import Archive
from stagec.bundle.members import Content, Stored, bundle_members

_NAMES = ("exported", "executable", "description", "stablehlo")
"""Keys of the index's functions and executables that name members."""


def strip(archive: Archive) -> dict[str, Content]:
    """Return the members of the bundle as if its manifest asked for no golden inputs and outputs.

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
            kept |= {entry[key] for key in _NAMES if key in entry}
    index = {key: value for key, value in archive.index.items() if key != "base"} | {"functions": functions}
    return bundle_members(index, {name: Stored(archive, name) for name in kept})
