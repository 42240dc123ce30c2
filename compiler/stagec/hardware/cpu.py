"""CPUs: the instruction sets and cores that are checked in, by short names."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from stagec.core.builds.specs import Aarch64Target, AnyCpuTarget, CpuTarget
from stagec.hardware import tables
from stagec.hardware.tables import Entry, Hardware

PARALLELISM = 8
"""The default number of partitions into which XLA may split an operation."""


@functools.cache
def isas() -> Mapping[str, str]:
    """Return XLA's names of the instruction sets by the short names of x86-64 CPUs."""
    return {name: table["isa"] for name, table in tables.read("cpu").items() if "isa" in table}


@functools.cache
def cores() -> Mapping[str, str]:
    """Return LLVM's names of the cores by the short names of aarch64 CPUs."""
    return {name: table["core"] for name, table in tables.read("cpu").items() if "core" in table}


class _Cpus(Hardware):
    def entries(self) -> list[Entry]:
        return [
            Entry(name, "cpu", table["doc"], table["source"], None, None, None, None, (name,), (1,))
            for name, table in tables.read("cpu").items()
        ]

    def target(self, name: str) -> AnyCpuTarget | None:
        if name in cores():
            return Aarch64Target(name, cores()[name], PARALLELISM, {})
        return CpuTarget(name, isas()[name], PARALLELISM, {}) if name in isas() else None

    def names(self) -> list[str]:
        return list(tables.read("cpu"))


HARDWARE = _Cpus()
