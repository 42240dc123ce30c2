"""What `stagec extract` does: members of a bundle as files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath

from stagec.errors import Problem, StagecError, nearest
from stagec.runtime.archive import INDEX, Archive


def select(archive: Archive, wanted: Sequence[str]) -> dict[str, bytes]:
    """Return members by name: those `wanted`, or all and the index where that is empty; their digests are right.

    Raises StagecError for a member that is not there, or whose name would be outside of the folder.
    """
    members = [INDEX, *archive.index["members"]]
    problems = [
        Problem(archive.path, "", f"there is no member {name!r}", nearest(name, members))
        for name in wanted
        if name not in members
    ]
    names = [*wanted] or members
    problems += [
        Problem(archive.path, "", f"the member {name!r} is not extracted: its name is no plain path below a folder")
        for name in names
        if name in members and not is_safe(name)
    ]
    if problems:
        raise StagecError(*problems)
    return {name: archive[name] for name in names}


def is_safe(name: str) -> bool:
    """Whether a name is that of a file below a folder, whatever the system that it is extracted on."""
    parts = name.split("/")
    return (
        PurePosixPath(name).as_posix() == name
        and not any(part in ("", ".", "..") for part in parts)
        and not any(character in '\\:*?"<>|' or ord(character) < 32 for character in name)
    )
