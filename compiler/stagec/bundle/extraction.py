"""What `stagec extract` does: members of a bundle as files."""

from __future__ import annotations

from collections.abc import Sequence

from stagec.errors import Problem, StagecError, nearest
from stagec.runtime.archive import INDEX, Archive


def select(archive: Archive, wanted: Sequence[str]) -> dict[str, bytes]:
    """Return members by name: those `wanted`, or all and the index where that is empty; their digests are right.

    Their names are paths below a folder (`runtime.archive`). Raises StagecError for a member that is not there.
    """
    members = [INDEX, *archive.index["members"]]
    problems = [
        Problem(archive.path, "", f"there is no member {name!r}", nearest(name, members))
        for name in wanted
        if name not in members
    ]
    if problems:
        raise StagecError(*problems)
    return {name: archive[name] for name in wanted or members}
