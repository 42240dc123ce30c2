"""TPUs: the generations that are checked in, by their names in topologies."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import asdict

from stagec.core.builds.specs import TpuTarget
from stagec.core.telling.errors import either
from stagec.hardware import tables
from stagec.hardware.cuda_devices import REMARKS
from stagec.hardware.tables import Entry
from stagec.hardware.tpu_topologies import TOPOLOGY, Generation, parse_topology, topologies


@functools.cache
def generations() -> Mapping[str, Generation]:
    """Return the generations by their names, oldest first."""
    return {
        name: Generation(name, **{key: value for key, value in table.items() if key not in REMARKS})
        for name, table in tables.read("tpu").items()
    }


def entries() -> list[Entry]:
    """Return what is checked in."""
    rows = []
    for name, generation in generations().items():
        table = tables.read("tpu")[name]
        usual = topologies(generation)
        examples = (*usual[:3], usual[-1])
        counts = tuple(parse_topology(text, generations()).num_devices for text in examples)
        properties = (
            generation.memory,
            generation.flops,
            generation.bandwidth,
            2 * len(generation.pod) * generation.link_bandwidth,
        )
        rows.append(Entry(name, "tpu", table["doc"], table["source"], *properties, examples, counts))
    return rows


def target(name: str) -> TpuTarget | None:
    """Return the target of a topology ("v5e:2x2"), called with - for the colon: its name is a part of file names.

    None when it is not a topology. Raises StagecError, which names near ones, when there is no such topology.
    """
    # With "_" for the colon, which libtpu takes as well, it may be a name like any other.
    plain = name.removesuffix("_untwisted").removesuffix("_twisted")
    if not re.match(TOPOLOGY, name) or ("_" in plain and plain.split("_", maxsplit=1)[0].lower() not in generations()):
        return None
    topology = parse_topology(name, generations())
    return TpuTarget(str(topology).replace(":", "-"), str(topology), "", 1, asdict(topology.generation), {})


def names() -> list[str]:
    """Return nothing: a target is a topology of any size."""
    return []


def advice(name: str) -> str:
    """Return what to write for a name that is not a target, where it is a generation; "" otherwise."""
    if name.lower() not in generations():
        return ""
    usual = topologies(generations()[name.lower()])
    return f"write the chips of the slice too, for example {either(usual[:3])}"


def num_devices(target: TpuTarget) -> int | None:
    """Return how many devices a target has, over all slices."""
    return parse_topology(target.topology, generations(), target.chips_per_host, target.slices).num_devices


def topologies_with(count: int, target: TpuTarget) -> list[str]:
    """Return usual topologies of the generation of `target` that have `count` devices, at most three."""
    usual = topologies(generations()[str(target.figures["name"])])
    return [text for text in usual if parse_topology(text, generations()).num_devices == count][:3]


def mesh_problem(target: TpuTarget, name: str, mesh: Mapping[str, int]) -> tuple[str, str] | None:
    """Return what to say of a mesh whose first axis cannot go over the slices of `target`; None if it can.

    Slices are joined along the first axis.
    """
    axis, size = next(iter(mesh.items()), ("", 1))
    if size % target.slices == 0:
        return None
    what = f'mesh "{name}" begins with {axis} = {size}, and target "{target.name}" has {target.slices} slices'
    return what, f"write the axis that goes over slices first in meshes.{name}.axes, with a multiple of {target.slices}"
