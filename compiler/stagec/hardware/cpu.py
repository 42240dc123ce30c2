"""CPUs: the instruction sets and cores that are checked in, by short names."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from stagec.core.builds.specs import Aarch64Target, AnyCpuTarget, CpuTarget
from stagec.hardware import tables
from stagec.hardware.tables import Entry

PARALLELISM = 8
"""Into how many partitions XLA may split an operation, where a target does not say."""


@functools.cache
def isas() -> Mapping[str, str]:
    """Return XLA's names of the instruction sets by the short names of x86-64 CPUs."""
    return {name: table["isa"] for name, table in tables.read("cpu").items() if "isa" in table}


@functools.cache
def cores() -> Mapping[str, str]:
    """Return LLVM's names of the cores by the short names of aarch64 CPUs."""
    return {name: table["core"] for name, table in tables.read("cpu").items() if "core" in table}


def entries() -> list[Entry]:
    """Return what is checked in."""
    return [
        Entry(name, "cpu", table["doc"], table["source"], None, None, None, None, (name,), (1,))
        for name, table in tables.read("cpu").items()
    ]


def target(name: str) -> AnyCpuTarget | None:
    """Return the target of a short name; None when it is not the name of a CPU."""
    if name in cores():
        return Aarch64Target(name, cores()[name], PARALLELISM, {})
    return CpuTarget(name, isas()[name], PARALLELISM, {}) if name in isas() else None


def names() -> list[str]:
    """Return the short names."""
    return list(tables.read("cpu"))


def advice(name: str) -> str:
    """Return what to write for a name that is not a target, where it is nearly one; "" otherwise."""
    return ""


def num_devices(target: AnyCpuTarget) -> int | None:
    """Return None: one CPU is as many devices as a process wants."""
    return None


def topologies_with(count: int, target: CpuTarget) -> list[str]:
    """Return nothing: CPUs have no topology."""
    return []


def mesh_problem(target: AnyCpuTarget, name: str, mesh: Mapping[str, int]) -> tuple[str, str] | None:
    """Return None: every mesh lies on them."""
    return None
