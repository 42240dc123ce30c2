"""What `stagec extract` does: members of a bundle as files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stagec.bundle.archive import INDEX, Archive
from stagec.core.telling.errors import Problem, StagecError, nearest


def select(archive: Archive, wanted: Sequence[str]) -> dict[str, Iterable[bytes]]:
    """Return the pieces of members by name: those `wanted`, or all and the index where that is empty.

    All were checked, and are again while they are read. Their names are paths below a folder (`bundle.archive`).
    Raises StagecError for a member that is not there, LoadError for one that is damaged.
    """
    members = [INDEX, *archive.index["members"]]
    problems = [
        Problem(archive.path, "", f"there is no member {name!r}", nearest(name, members))
        for name in wanted
        if name not in members
    ]
    if problems:
        raise StagecError(*problems)
    names = [name for name in wanted or members if name != INDEX]
    for name in names:
        archive.check(name)
    pieces: dict[str, Iterable[bytes]] = {name: archive.pieces(name) for name in names}
    return {INDEX: [archive[INDEX]], **pieces} if len(names) < len(wanted or members) else pieces
