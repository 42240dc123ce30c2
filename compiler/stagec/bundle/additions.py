"""What a bundle was before executables of another jaxlib were added to it (`stagec add-jaxlib`).

A bundle is a function of its index and its members. One with an addition has all members that were there before, and
the index of before as one more (`base` in its own index). So the file of before can be written again byte for byte, and
a signature of it is checked as ever.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stagec.bundle import index as bundle_index
from stagec.bundle.archive import INDEX, LARGEST_INDEX, Archive, Content, Stored, pieces, read_index
from stagec.core.telling.refusal import LoadError
from stagec.core.trees.same import same

MOST_ADDITIONS = 64
"""Additions to one bundle, each to what the one before it made: the index of each is read."""


@dataclass(frozen=True)
class Base:
    """A bundle as it was before an addition.

    path: of the file that has the addition. index: the content of its index; encoded_index: its bytes. sha256: of its
    file, in hex, as that was written. archive: has its members.
    """

    path: str
    index: Mapping[str, Any]
    encoded_index: bytes
    sha256: str
    archive: Archive

    def members(self) -> dict[str, Content]:
        """Return its members, from which its file is written again."""
        stored = {name: Stored(self.archive, name) for name in self.index["members"]}
        return {INDEX: self.encoded_index, **stored}

    def check(self) -> None:
        """Write it again, and compare. Raises LoadError ("digest") where it is another file than the one added to."""
        state = hashlib.sha256()
        for piece in pieces(self.members()):
            state.update(piece)
        if state.hexdigest() != self.sha256:
            what = f"the bundle that it was added to has the sha256 {self.sha256}, and not {state.hexdigest()}"
            raise LoadError("digest", f"{self.path}: {what}")


def bases(archive: Archive) -> list[Base]:
    """Return what a bundle was before each addition, the latest first; empty where nothing was added.

    Raises LoadError ("format", "digest") where an addition changed what was there, or took something away.
    """
    earlier: list[Base] = []
    index: Mapping[str, Any] = archive.index
    while "base" in index:
        if len(earlier) == MOST_ADDITIONS:
            raise LoadError("format", f"{archive.path}: it has more than {MOST_ADDITIONS} additions")
        data = archive.read(index["base"]["index"], LARGEST_INDEX)
        before = read_index(data, bundle_index.check, f"{archive.path}: {index['base']['index']}")
        changed = _changed(before, index)
        if changed:
            raise LoadError("format", f"{archive.path}: an addition changed what was there: {changed}")
        earlier.append(Base(archive.path, before, data, index["base"]["sha256"], archive))
        index = before
    return earlier


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Return the key of the first thing that an addition may not change and did; "" where there is none."""
    kept = ("kind", "name", "version", "targets", "weights", "weights_files")
    functions, now = before["functions"], after["functions"]
    pairs = [(key, before.get(key), after.get(key)) for key in kept]
    pairs += [("functions", sorted(functions), sorted(now))]
    for name in functions.keys() & now.keys():
        keys = sorted({*functions[name], *now[name]} - {"executables"})
        pairs += [(f"functions.{name}.{key}", functions[name].get(key), now[name].get(key)) for key in keys]
        gone = [entry for entry in functions[name]["executables"] if entry not in now[name]["executables"]]
        pairs += [(f"functions.{name}.executables", gone, [])]
    listed = after["members"]
    pairs += [(f"members.{name}", entry, listed.get(name)) for name, entry in before["members"].items()]
    return next((key for key, was, is_now in pairs if not same(was, is_now)), "")
