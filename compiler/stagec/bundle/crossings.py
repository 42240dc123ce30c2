"""Executables that an older jaxlib made: which of them this one was measured to run with the same bits.

crossings.json is what `tools/crossing.py` measured, each time on one machine: the kinds of operations in what a jaxlib
made (`core/data/thunks.py`), and for each other jaxlib those with other results, and those that failed. XLA itself
promises nothing. Standard library only.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from stagec.bundle.index import numbers

TABLE = Path(__file__).with_suffix(".json")
"""The rows, one for each machine."""
OWN = frozenset({"kernel", "copy", "call", "while", "conditional", "partition-id", "replica-id"})
"""The kinds that an executable brings with it, and what only moves data: no routine of the jaxlib that runs it."""
_SHOWN = 3
"""How many kinds a sentence names."""


def vectors(flags: Collection[str]) -> frozenset[str]:
    """Return the flags of a CPU by which jaxlib's routines choose their code."""
    return frozenset(flag for flag in flags if re.match(r"sse4|avx|fma|f16c|amx|asimd|sve", flag))


def refusal(
    kinds: Callable[[], Collection[str]], writer: str, reader: str, architecture: str, flags: Collection[str] | None
) -> str:
    """Return why jaxlib `reader` was not measured to run an executable as `writer`, which made it; "" if it was.

    kinds: returns those of the executable; it may raise ValueError, and is called only where the pair was measured.
    architecture: of its machine code. flags: of the CPU that runs it; None: of any CPU that was measured.
    """
    if numbers(writer) >= numbers(reader):
        return "only an older jaxlib's may run"
    pair = f"{writer} {reader}"
    rows = [row for row in _table() if row["architecture"] == architecture and pair in row["pairs"]]
    if not rows:
        return f"nobody has measured what jaxlib {writer} made with jaxlib {reader} on {architecture}"
    try:
        listed = kinds()
    except ValueError as error:
        return f"its kinds of operations cannot be read: {error}"
    of_cpu = [row for row in rows if flags is None or row["cpu"] == sorted(vectors(flags))]
    reasons = [_of_row(row, writer, pair, listed) for row in of_cpu]
    if not of_cpu:
        # What it brings with it is the same on each CPU that has its instructions.
        others = sorted({*listed} - OWN)
        what = f"{_named(others)} {'was' if len(others) == 1 else 'were'} measured on CPUs with other vectors than this"
        reasons = [what] if others else [_of_row(row, writer, pair, listed) for row in rows]
    return "" if "" in reasons else reasons[0]


def _of_row(row: Mapping[str, Any], writer: str, pair: str, kinds: Collection[str]) -> str:
    measured = row["pairs"][pair]
    unknown = sorted({*kinds} - {*row["kinds"][writer]})
    if unknown:
        return f"nobody has measured {_named(unknown)} of jaxlib {writer}"
    failing = sorted({*kinds} & measured["fails"].keys())
    if failing:
        return f"{_named(failing)} failed when that was measured: {measured['fails'][failing[0]]}"
    differing = sorted({*kinds} & measured["differs"].keys())
    if differing:
        largest = max(measured["differs"][kind] for kind in differing)
        return f"{_named(differing)} had other bits when that was measured, by {largest:.2g} of the largest number"
    # Sums of squares differ where plain sums do, and have a kind of their own: what was equal beside routines that
    # differ proves nothing. So routines of a pair count where all of them were equal.
    routines = sorted({*kinds} - OWN) if measured["differs"] else []
    if routines:
        return (
            f"{_named(routines)}: other routines had other bits when that was measured, so none of them counts as equal"
        )
    return ""


def _named(kinds: Collection[str]) -> str:
    more = len(kinds) - _SHOWN
    return ", ".join([*kinds][:_SHOWN]) + (f" and {more} more" if more > 0 else "")


@functools.cache
def _table() -> list[dict[str, Any]]:
    return list(json.loads(TABLE.read_text("utf-8")))


def readers(kinds: Collection[str], writer: str, architecture: str) -> dict[str, str]:
    """Return the newer jaxlibs for which an executable of these kinds was measured, and of each its `refusal`."""
    pairs = [pair.split() for row in _table() if row["architecture"] == architecture for pair in row["pairs"]]
    newer = {reader for made_with, reader in pairs if made_with == writer and numbers(reader) > numbers(writer)}
    return {reader: refusal(lambda: kinds, writer, reader, architecture, None) for reader in sorted(newer, key=numbers)}
