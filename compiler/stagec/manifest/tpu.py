"""Targets for TPUs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from stagec.core.builds import specs
from stagec.hardware.tpu import generations
from stagec.hardware.tpu_topologies import TOPOLOGY, parse_topology
from stagec.manifest.tables import SHAPE, CompilerOptions, Jaxlib, Table


class TpuTarget(Table):
    """TPUs to compile for. You need no TPU to build."""

    platform: Literal["tpu"] = Field(description="Kind of hardware.", examples=["tpu"])
    topology: Annotated[str, StringConstraints(pattern=TOPOLOGY)] = Field(
        description="Generation, and chips along each axis of the slice.", examples=["v5e:2x2"]
    )
    chips_per_host: Annotated[str, StringConstraints(pattern=SHAPE)] = Field(
        "", description="Chips of one host along each axis, if that is not 2x2.", examples=["2x4"]
    )
    slices: int = Field(1, ge=1, description="Number of such slices, connected by a data-center network.", examples=[2])
    jaxlib: Jaxlib = None
    compiler_options: CompilerOptions = {}

    def describe(self, name: str, file: str, folder: Path) -> specs.TpuTarget:
        """Return the target in full. file: the manifest's name in messages; folder: its folder.

        Raises StagecError with keys of this table.
        """
        topology = parse_topology(self.topology, generations(), self.chips_per_host, self.slices)
        figures = asdict(topology.generation)
        return specs.TpuTarget(name, str(topology), self.chips_per_host, self.slices, figures, self.compiler_options)
