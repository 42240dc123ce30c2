"""Executables that an older jaxlib made: which of them this one was measured to run with the same bits.

crossings.json is what `tools/crossing.py` measured, each time on one machine: the build-ids of each jaxlib, the kinds
of operations in what it made (`core/data/thunks.py`), and for each other jaxlib those with other results, those that
failed, and those that no program with equal results had. XLA itself promises nothing. Standard library only.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from stagec.bundle.index import numbers
from stagec.core.builds.platforms import PLATFORMS

TABLE = Path(__file__).with_suffix(".json")
"""The rows, one for each machine."""
OWN = frozenset({"kernel", "copy", "call", "while", "conditional", "partition-id", "replica-id"})
"""The kinds that an executable brings with it, and what only moves data: no routine of the jaxlib that runs it."""
_SHOWN = 3
"""How many kinds a sentence names."""


class Jaxlib(NamedTuple):
    """A jaxlib. build_id: of its library; "" for the wheels of that version that the project knows, those on PyPI."""

    version: str
    build_id: str = ""


def maker(function: Mapping[str, Any], member: str) -> Jaxlib:
    """Return the jaxlib that made an executable: the oldest that has it, as others took it over (`runs_on`, `--reuse`).

    function: its entry in the index. member: its name in the bundle.
    """
    rows = [row["versions"] for row in function["executables"] if row["executable"] == member]
    return described(min(rows, key=lambda versions: numbers(versions["jaxlib"])))


def described(versions: Mapping[str, str]) -> Jaxlib:
    """Return the jaxlib of an executable's versions, as its description has them."""
    # Only of a build that the project does not know, a description names the build-id.
    return Jaxlib(versions["jaxlib"], versions.get(Path(PLATFORMS["cpu"].files[0]).name, "").partition(" ")[0])


def within(function: Mapping[str, Any], bucket: Mapping[str, int]) -> float:
    """Return how far the results of a function may differ, of their largest number; 0: in no bit.

    That is the smallest relative tolerance that the manifest states for its results, where a first call can compare
    them with golden outputs. function: its entry in the index. bucket: of an executable.
    """
    golden = function.get("golden")
    if not golden or golden["bucket"] != bucket or function["bind"]:
        return 0.0
    return min((row.get("rtol", 0.0) for row in golden["outputs"].values()), default=0.0)


def vectors(flags: Collection[str]) -> frozenset[str]:
    """Return the flags of a CPU by which jaxlib's routines choose their code."""
    return frozenset(flag for flag in flags if re.match(r"sse4|avx|fma|f16c|amx|asimd|sve", flag))


def refusal(
    kinds: Callable[[], Collection[str]],
    writer: Jaxlib,
    reader: Jaxlib,
    architecture: str,
    flags: Collection[str] | None,
    tolerance: float = 0.0,
) -> str:
    """Return why jaxlib `reader` was not measured to run an executable as `writer`, which made it; "" if it was.

    kinds: returns those of the executable; it may raise ValueError, and is called only where the pair was measured.
    architecture: of its machine code; for a device, its kind. flags: of the CPU that runs it; None: of any that was
    measured.
    tolerance: how far results may differ, of their largest number; 0: in no bit.
    """
    if numbers(writer.version) >= numbers(reader.version):
        return "only an older jaxlib's may run"
    pair = f"{writer.version} {reader.version}"
    rows = [row for row in _table() if row["architecture"] == architecture and pair in row["pairs"]]
    if not rows:
        made = f"what jaxlib {writer.version} made with jaxlib {reader.version}"
        return f"nobody has measured {made} on {architecture}"
    for jaxlib in (writer, reader):
        rows = [row for row in rows if jaxlib.build_id in ("", *row["builds"][jaxlib.version])]
        if not rows:
            return f"nobody has measured jaxlib {jaxlib.version} of build-id {jaxlib.build_id}"
    try:
        listed = kinds()
    except ValueError as error:
        return f"its kinds of operations cannot be read: {error}"
    of_cpu = [row for row in rows if flags is None or row["cpu"] == sorted(vectors(flags))]
    reasons = [_of_row(row, writer.version, pair, listed, tolerance) for row in of_cpu]
    if not of_cpu:
        # What it brings with it is the same on each CPU that has its instructions.
        others = sorted({*listed} - OWN)
        what = f"{_named(others)} {'was' if len(others) == 1 else 'were'} measured on CPUs with other vectors than this"
        reasons = [what] if others else [_of_row(row, writer.version, pair, listed, tolerance) for row in rows]
    return "" if "" in reasons else reasons[0]


def _of_row(row: Mapping[str, Any], writer: str, pair: str, kinds: Collection[str], tolerance: float) -> str:
    measured = row["pairs"][pair]
    failing = sorted({*kinds} & measured["fails"].keys())
    if failing:
        return f"{_named(failing)} failed when that was measured: {measured['fails'][failing[0]]}"
    unknown = sorted({*kinds} - {*row["kinds"][writer]}) or sorted({*kinds} & {*measured["unproven"]})
    if unknown:
        return f"nobody has measured {_named(unknown)} of jaxlib {writer}"
    differs = measured["differs"]
    differing = sorted(kind for kind in {*kinds} & differs.keys() if _beyond(differs[kind], tolerance))
    if differing:
        largest = max(differs[kind] for kind in differing)
        return f"{_named(differing)} had other bits when that was measured, by {largest:.2g} of the largest number"
    # Sums of squares differ where plain sums do, and have a kind of their own: what was equal beside routines that
    # differ proves nothing. So routines of a pair count where all of them were equal, or near enough.
    routines = sorted({*kinds} - OWN) if any(_beyond(error, tolerance) for error in differs.values()) else []
    if routines:
        return (
            f"{_named(routines)}: other routines had other bits when that was measured, so none of them counts as equal"
        )
    return ""


def _beyond(error: float, tolerance: float) -> bool:
    return not tolerance or error > tolerance  # other bits of the same numbers, such as -0.0, have an error of 0


def _named(kinds: Collection[str]) -> str:
    more = len(kinds) - _SHOWN
    return ", ".join([*kinds][:_SHOWN]) + (f" and {more} more" if more > 0 else "")


@functools.cache
def _table() -> list[dict[str, Any]]:
    return list(json.loads(TABLE.read_text("utf-8")))


def readers(kinds: Collection[str], writer: Jaxlib, architecture: str) -> dict[str, str]:
    """Return the newer jaxlibs for which an executable of these kinds was measured, and of each its `refusal`."""
    pairs = [pair.split() for row in _table() if row["architecture"] == architecture for pair in row["pairs"]]
    newer = {reader for made_with, reader in pairs if made_with == writer.version}
    newer = {reader for reader in newer if numbers(reader) > numbers(writer.version)}
    return {
        reader: refusal(lambda: kinds, writer, Jaxlib(reader), architecture, None)
        for reader in sorted(newer, key=numbers)
    }
