"""`stagec strip`: make a bundle without the golden inputs and outputs of its functions."""

from __future__ import annotations

import copy

from stagec.bundle.archive import INDEX, Archive, Content, Stored, encode_index

_NAMES = ("exported", "executable", "description", "stablehlo")
"""Keys of the index's functions and executables that name members."""


def strip(archive: Archive) -> dict[str, Content]:
    """Return the members of the bundle as if its manifest asked for no golden inputs and outputs.

    The states before `stagec add-jaxlib` go too, because their signatures do not cover the rest. Writing the members
    reads and checks them: the new bundle is good if this raised no LoadError.
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
