"""What `stagec strip` does: a bundle without the golden inputs and outputs of its functions."""

from __future__ import annotations

import copy

from stagec.bundle.archive import INDEX, Archive, Content, Stored, encode_index

_NAMES = ("exported", "executable", "description", "stablehlo")
"""Keys of the index's functions and executables that name members."""


def strip(archive: Archive) -> dict[str, Content]:
    """Return the members of the bundle as if its manifest asked for no golden inputs and outputs.

    What it was before executables of another jaxlib were added goes too: no signature of that is of what is left.
    They are read and checked when they are written: what is made of them is good when that raised no LoadError.
    """
    index = copy.deepcopy(archive.index)
    index.pop("base", None)
    for function in index["functions"].values():
        function.pop("golden", None)
    kept = {weight["member"] for weight in index["weights"].values() if "member" in weight}
    for function in index["functions"].values():
        for entry in (function, *function["executables"]):
            kept |= {entry[key] for key in _NAMES if key in entry}
    index["members"] = {name: entry for name, entry in index["members"].items() if name in kept}
    return {INDEX: encode_index(index), **{name: Stored(archive, name) for name in index["members"]}}
