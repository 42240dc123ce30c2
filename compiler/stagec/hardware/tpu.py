"""TPUs: the generations that are checked in, by their names in topologies."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import asdict

from stagec.core.builds.specs import TpuTarget
from stagec.core.messages.errors import either
from stagec.hardware import tables
from stagec.hardware.gpu_devices import REMARKS
from stagec.hardware.tables import Entry, Hardware
from stagec.hardware.tpu_topologies import TOPOLOGY, Generation, parse_topology, topologies


@functools.cache
def generations() -> Mapping[str, Generation]:
    """Return the generations by their names, oldest first."""
    return {
        name: Generation(name, **{key: value for key, value in table.items() if key not in REMARKS})
        for name, table in tables.read("tpu").items()
    }


class _Tpus(Hardware):
    def entries(self) -> list[Entry]:
        rows = []
        for name, chip in generations().items():
            table, usual = tables.read("tpu")[name], topologies(chip)
            examples = (*usual[:3], usual[-1])
            counts = tuple(parse_topology(text, generations()).num_devices for text in examples)
            properties = chip.memory, chip.flops, chip.bandwidth, 2 * len(chip.pod) * chip.link_bandwidth
            rows.append(Entry(name, "tpu", table["doc"], table["source"], *properties, examples, counts))
        return rows

    def target(self, name: str) -> TpuTarget | None:
        """As `Hardware.target`: a topology ("v5e:2x2"), whose name has - for the colon, as a part of file names."""
        # With "_" for the colon, which libtpu takes as well, it may be a name like any other.
        plain = name.removesuffix("_untwisted").removesuffix("_twisted")
        named = "_" in plain and plain.split("_", maxsplit=1)[0].lower() not in generations()
        if not re.match(TOPOLOGY, name) or named:
            return None
        topology = parse_topology(name, generations())
        return TpuTarget(str(topology).replace(":", "-"), str(topology), "", 1, asdict(topology.generation), {})

    def advice(self, name: str) -> str:
        if name.lower() not in generations():
            return ""
        usual = topologies(generations()[name.lower()])
        return f"write the chips of the slice too, for example {either(usual[:3])}"

    def num_devices(self, target: TpuTarget) -> int:
        return parse_topology(target.topology, generations(), target.chips_per_host, target.slices).num_devices

    def topologies_with(self, count: int, target: TpuTarget) -> list[str]:
        usual = topologies(generations()[str(target.figures["name"])])
        return [text for text in usual if parse_topology(text, generations()).num_devices == count][:3]

    def mesh_problem(self, target: TpuTarget, name: str, mesh: Mapping[str, int]) -> tuple[str, str] | None:
        """As `Hardware.mesh_problem`: slices are joined along the first axis."""
        axis, size = next(iter(mesh.items()), ("", 1))
        if size % target.slices == 0:
            return None
        what = f'mesh "{name}" begins with {axis} = {size}, and target "{target.name}" has {target.slices} slices'
        write = f"write the axis that goes over slices first in meshes.{name}.axes, with a multiple of {target.slices}"
        return what, write


HARDWARE = _Tpus()
