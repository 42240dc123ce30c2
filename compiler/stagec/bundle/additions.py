"""Restore the earlier states of a bundle, before `stagec add-jaxlib` added executables of another jaxlib.

A bundle is a function of its index and its members. A bundle with an addition keeps all earlier members, and the
earlier index as one more member (`base` in the new index). So stagec can write the earlier file again byte for byte,
and check a signature of it.
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
"""The most additions to one bundle, one after the other: stagec reads the index of each."""


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
        """Return its members, to write its file again."""
        stored = {name: Stored(self.archive, name) for name in self.index["members"]}
        return {INDEX: self.encoded_index, **stored}

    def check(self) -> None:
        """Write it again, and compare. Raises LoadError ("digest") if it is not the file that the addition extended."""
        state = hashlib.sha256()
        for piece in pieces(self.members()):
            state.update(piece)
        if state.hexdigest() != self.sha256:
            what = f"the bundle that it was added to has the sha256 {self.sha256}, and not {state.hexdigest()}"
            raise LoadError("digest", f"{self.path}: {what}")


def bases(archive: Archive) -> list[Base]:
    """Return the state of a bundle before each addition, the latest first; empty if there is none.

    Raises LoadError ("format", "digest") if an addition changed or removed something.
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
    """Return the first key that an addition changed against the rules; "" if there is none."""
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
