"""CPUs: the instruction sets that are checked in, by short names."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from stagec.core.builds.specs import CpuTarget
from stagec.hardware import tables
from stagec.hardware.tables import Entry

PARALLELISM = 8
"""Into how many partitions XLA may split an operation, where a target does not say."""


@functools.cache
def isas() -> Mapping[str, str]:
    """Return XLA's names of the instruction sets by the short names of CPUs."""
    return {name: table["isa"] for name, table in tables.read("cpu").items()}


def entries() -> list[Entry]:
    """Return what is checked in."""
    return [
        Entry(name, "cpu", table["doc"], table["source"], None, None, None, None, (name,), (1,))
        for name, table in tables.read("cpu").items()
    ]


def target(name: str) -> CpuTarget | None:
    """Return the target of a short name; None when it is not the name of a CPU."""
    return CpuTarget(name, isas()[name], PARALLELISM, {}) if name in isas() else None


def names() -> list[str]:
    """Return the short names."""
    return list(isas())


def advice(name: str) -> str:
    """Return what to write for a name that is not a target, where it is nearly one; "" otherwise."""
    return ""


def num_devices(target: CpuTarget) -> int | None:
    """Return None: one CPU is as many devices as a process wants."""
    return None


def topologies_with(count: int, target: CpuTarget) -> list[str]:
    """Return nothing: CPUs have no topology."""
    return []


def mesh_problem(target: CpuTarget, name: str, mesh: Mapping[str, int]) -> tuple[str, str] | None:
    """Return None: every mesh lies on them."""
    return None
