"""Restore the earlier states of a bundle, before `stagec add-jaxlib` added executables of another jaxlib.

A bundle is a function of its index and its members. A bundle with an addition keeps all earlier members, and the
earlier index and functions as two more (`base` in the new index). So stagec can write the earlier file again byte for
byte, and check a signature of it.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from stagec.bundle import index as bundle_index
from stagec.bundle.archive import INDEX, Archive, encode_index, read_index
from stagec.bundle.index import FUNCTIONS, LARGEST, NAMES
from stagec.bundle.members import Content, Stored, pieces, split
from stagec.core.builds import naming
from stagec.core.data.strict_json import difference, shown
from stagec.core.messages.refusal import LoadError

MOST_ADDITIONS = 64
"""The most additions to one bundle, one after the other: stagec reads the index of each."""


@dataclass(frozen=True)
class Base:
    """A bundle as it was before an addition.

    path: of the file that has the addition. index: the content of its index; encoded_index: its bytes. functions: the
    member that has its functions now. sha256: of its file, in hex, as the addition says. archive: has its members.
    added: the executables of the addition by function, as entries of an index.
    """

    path: str
    index: Mapping[str, Any]
    encoded_index: bytes
    functions: str
    sha256: str
    archive: Archive
    added: Mapping[str, Sequence[Mapping[str, Any]]]

    def members(self) -> dict[str, Content]:
        """Return its members, to write its file again."""
        names = {name: name for name in self.index["members"]} | {FUNCTIONS: self.functions}
        stored = {name: Stored(self.archive, now) for name, now in names.items()}
        return {INDEX: self.encoded_index, **stored}

    def check(self) -> None:
        """Write it again, and compare. Raises LoadError ("digest") if it is not the file that the addition extended."""
        state = hashlib.sha256()
        for piece in pieces(self.members()):
            state.update(piece)
        if state.hexdigest() != self.sha256:
            what = f"the bundle that it was added to has the sha256 {self.sha256}, and not {state.hexdigest()}"
            raise LoadError("digest", f"{self.path}: {what}")


Indexed: TypeAlias = Archive | Base
"""A bundle, or its state before an addition."""


def extended(
    before: Mapping[str, Any],
    added: Mapping[str, Sequence[Mapping[str, Any]]],
    base: Mapping[str, str],
    versions: Mapping[str, str],
) -> dict[str, Any]:
    """Return the index of a bundle with an addition, without "members". The rest of the index stays, in its order.

    before: the index without it. added: as in `Base`. base, versions: these keys of the new index.
    """
    functions = {
        name: {**entry, "executables": sorted([*entry["executables"], *added.get(name, ())], key=order)}
        for name, entry in before["functions"].items()
    }
    kept = {key: value for key, value in before.items() if key not in ("base", "members")}
    return {**kept, "versions": versions, "functions": functions, "base": base}


def bases(archive: Archive) -> list[Base]:
    """Return the state of a bundle before each addition, the latest first; empty if there is none.

    An addition has executables of one jaxlib, for targets and buckets that are there. The first bundle has no
    executable of that jaxlib. So a machine that the first bundle serves runs only what its signature covers.
    Raises LoadError ("format", "digest") if an addition has, changed or removed anything else.
    """
    earlier: list[Base] = []
    index, encoded = archive.index, archive.encoded_index
    while "base" in index:
        if len(earlier) == MOST_ADDITIONS:
            raise LoadError("format", f"{archive.path}: it has more than {MOST_ADDITIONS} additions")
        base = index["base"]
        data, sizes = archive.read(base["index"], LARGEST), {n: entry["bytes"] for n, entry in index["members"].items()}
        sizes[FUNCTIONS] = sizes[base["functions"]]
        before = read_index(data, bundle_index.check, f"{archive.path}: {base['index']}", sizes)
        # The lines of functions then, and not now: each addition writes that member again.
        before = {**before, "functions": archive.functions(before, base["functions"])}
        added = _added(before, index)
        changed = _changed(before, index, encoded, added)
        if changed:
            raise LoadError("format", f"{archive.path}: an addition changed what was there: {changed}")
        earlier.append(Base(archive.path, before, data, base["functions"], base["sha256"], archive, added))
        index, encoded = before, data
    served = jaxlibs(index)
    for base in earlier:
        fault = _fault(base, served)
        if fault:
            raise LoadError("format", f"{archive.path}: an addition has executables of one new jaxlib: {fault}")
    return earlier


def _added(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    """Return the executables of functions of `before` that only `after` has, by function."""
    added = {}
    for name, function in before["functions"].items():
        there = {bundle_index.key_of(entry) for entry in function["executables"]}
        entries = after["functions"].get(name, {"executables": ()})["executables"]
        added[name] = [entry for entry in entries if bundle_index.key_of(entry) not in there]
    return added


def _changed(
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    encoded: bytes,
    added: Mapping[str, Sequence[Mapping[str, Any]]],
) -> str:
    """Return the first key that an addition changed against the rules; "" if there is none.

    It compares encoded bytes: the order of a mapping may mean something, as the order of targets does. encoded: the
    index `after`.
    """
    listed, base = after["members"], after["base"]
    parts = [entry[key] for entry in itertools.chain(*added.values()) for key in NAMES]
    more = {name: listed[name] for name in [*parts, base["index"], base["functions"]]}
    if listed[base["functions"]] != before["members"][FUNCTIONS]:
        return "base.functions"
    versions = {key: value for key, value in after["versions"].items() if key == "stagec"}
    wanted = extended(before, added, base, versions)
    written, _ = split(wanted, {**more, **{name: row for name, row in before["members"].items() if name != FUNCTIONS}})
    if encode_index(written) == encoded:
        return ""
    whole = {**after, "functions": dict(after["functions"])}
    return difference({**wanted, "members": written["members"]}, whole) or "its spelling"


def _fault(base: Base, served: Collection[str]) -> str:
    """Return what is wrong with the executables that were added to `base`; "" if nothing is.

    served: the jaxlibs of the first bundle.
    """
    jaxlibs = {entry["versions"]["jaxlib"] for entry in itertools.chain(*base.added.values())}
    if len(jaxlibs) != 1:
        return f"it has those of {shown(', '.join(sorted(jaxlibs)) or 'none')}"
    for name, entries in base.added.items():
        # Without the jaxlib, the last of three: an addition is for what was there, by another release.
        there = {bundle_index.key_of(entry)[:2] for entry in base.index["functions"][name]["executables"]}
        for entry in entries:
            if bundle_index.key_of(entry)[:2] not in there:
                what = ", ".join(filter(None, [entry["target"], naming.bucket(entry["bucket"])]))
                return f"{name} had no executable for {shown(what)}"
    return f"the first bundle has those of {shown(', '.join(jaxlibs))}" if jaxlibs & {*served} else ""


def order(executable: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the key by which the executables of a function are sorted: as `key_of`, releases as numbers.

    executable: its entry in the index.
    """
    target, bucket, jaxlib = bundle_index.key_of(executable)
    return target, bucket, bundle_index.numbers(jaxlib), jaxlib


def jaxlibs(index: Mapping[str, Any]) -> dict[str, int]:
    """Count the executables of each jaxlib in a bundle, by release."""
    entries = [entry for function in index["functions"].values() for entry in function["executables"]]
    releases = [entry["versions"]["jaxlib"] for entry in sorted(entries, key=lambda entry: order(entry)[2:])]
    return {release: releases.count(release) for release in dict.fromkeys(releases)}
