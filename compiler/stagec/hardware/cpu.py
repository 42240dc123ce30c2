"""CPUs: the instruction sets and cores that are checked in, by short names."""

from __future__ import annotations

from stagec.core.builds.specs import Aarch64Target, AnyCpuTarget, CpuTarget
from stagec.hardware import tables
from stagec.hardware.tables import Entry, Hardware

PARALLELISM = 8
"""The default number of partitions into which XLA may split an operation."""


class _Cpus(Hardware):
    def entries(self) -> list[Entry]:
        return [
            Entry(name, "cpu", table["doc"], table["source"], None, None, None, None, (name,), (1,))
            for name, table in tables.read("cpu").items()
        ]

    def target(self, name: str) -> AnyCpuTarget | None:
        table = tables.read("cpu").get(name, {})
        if "core" in table:
            return Aarch64Target(name, table["core"], PARALLELISM, {})
        return CpuTarget(name, table["isa"], PARALLELISM, {}) if table else None

    def names(self) -> list[str]:
        return list(tables.read("cpu"))


HARDWARE = _Cpus()
