"""Read the costs of a bundle's executables: their descriptions, and the inventories that a build leaves beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from stagec.building import inventory
from stagec.building.inventory import Inventory
from stagec.bundle.additions import jaxlibs
from stagec.bundle.archive import Archive
from stagec.bundle.description import LARGEST, Description
from stagec.core.builds.specs import NOT_EXAMINED
from stagec.core.data import reading
from stagec.core.messages.errors import blaming

ENDING = ".inventory.json"


class Executable(NamedTuple):
    """An executable of a bundle.

    name: `FUNCTION.TARGET`, or `FUNCTION.TARGET.BUCKET`, as its artifacts are called after the manifest's name; with
        `.jaxlib-RELEASE` if it is for another jaxlib than the build's own.
    signature: the name in the bundle's index: that of the function, or FUNCTION-VARIANT.
    inventory: None if none is known.
    """

    name: str
    signature: str
    description: Description
    inventory: Inventory | None


def open_bundle(path: str) -> Archive:
    """Open a bundle, with all digests checked. Raises StagecError, naming it, if it is damaged or not a bundle."""
    with blaming(path, "give a bundle (.aot)"):
        archive = Archive(path)
        archive.check_all()
    return archive


def description_of(archive: Archive, executable: Mapping[str, Any]) -> Description:
    """Return the description of an executable, an entry of a bundle's index. Raises StagecError."""
    with blaming(archive.path, what=f"{executable['description']}: "):
        return Description.from_json(archive.read(executable["description"], LARGEST))


def hardware(target: Mapping[str, Any]) -> str:
    """Return a short form of a target from an index or a description, for a person."""
    shown = (target.get(key) for key in ("architecture", "isa", "core", "device", "topology"))
    return " ".join(map(str, filter(None, [target["platform"], *shown])))


def unpromised(target: Mapping[str, Any]) -> list[str]:
    """Return a line if nobody promises that the bytes for a target of an index or a description can be made again."""
    if target.get("examined") != NOT_EXAMINED:
        return []
    return ['examined = "none": XLA ran as it is; another machine, or another run, may make other bytes']


def avoided(defects: Mapping[str, str]) -> list[str]:
    """Return a line for each defect that a description says is avoided."""
    return [f"{issue} is avoided, with the compiler option {option}" for issue, option in defects.items()]


def executables(path: str, archive: Archive, inventories: Sequence[str] = ()) -> Iterator[Executable]:
    """Yield the executables of a bundle, in the order of its index.

    inventories: files; none: those beside the bundle at `path`. It skips one of another executable. Raises StagecError.
    """
    beside = sorted(str(file) for file in Path(path).parent.glob(f"*{ENDING}"))
    inventory_of = {}
    for file in inventories or beside:
        with blaming(file, "build the executable again", "not an inventory: "):
            read = inventory.from_json(reading.whole(file, LARGEST))
            inventory_of[read["executable_sha256"]] = read
    for signature, function in archive.index["functions"].items():
        for entry in function["executables"]:
            description = description_of(archive, entry)
            name = entry["description"].removesuffix(".json")
            yield Executable(name, signature, description, inventory_of.get(description.executable_sha256))


def sizes(archive: Archive, size: int, most: int | None) -> Iterator[list[Any]]:
    """Yield rows of a kind, its owner, and bytes: the parts of the file, the largest first, the rest last.

    size: of the file. A member that several share counts once. most: the number of rows before the rest; None: all.
    """
    members = {name: entry["bytes"] for name, entry in archive.index["members"].items()}
    aligned = size - sum(members.values())
    rows: list[list[Any]] = []
    releases = jaxlibs(archive.index)
    several = len(releases) > 1
    for name, function in archive.index["functions"].items():
        of: dict[str, list[str]] = {
            **{
                "executables" + (f" (jaxlib {release})" if several else ""): [
                    executable["executable"]
                    for executable in function["executables"]
                    if executable["versions"]["jaxlib"] == release
                ]
                for release in releases
            },
            "StableHLO": [executable["stablehlo"] for executable in function["executables"]],
            "exported": [function["exported"]],
        }
        for kind, names in of.items():
            rows.append([kind, name, sum(members.pop(member, 0) for member in names)])
    weights = archive.index["weights"].values()
    rows.append(
        ["weights", "all weights", sum(members.pop(weight["member"], 0) for weight in weights if "member" in weight)]
    )
    rows.sort(key=lambda row: -row[2])
    rows, rest = (rows, []) if most is None else (rows[:most], rows[most:])
    rows.append(["descriptions and the rest", "", sum(members.values()) + sum(row[2] for row in rest)])
    rows.append(["the index, and members that begin on pages", "", aligned])
    yield from (row for row in rows if row[2])
