"""The targets that are checked in, by their short names, of all platforms."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Protocol, cast

from stagec.core.builds.platforms import PLATFORMS
from stagec.core.builds.specs import TargetSpec
from stagec.core.telling.errors import Problem, StagecError, near
from stagec.hardware.tables import Entry


class Hardware(Protocol):
    """What is checked in of a platform's devices: a module of this package. `target` is one of that platform."""

    def entries(self) -> list[Entry]:
        """Return what is checked in."""

    def target(self, name: str) -> TargetSpec | None:
        """Return the target of a name; None for another name. Raises StagecError for a name that is nearly a target."""

    def names(self) -> list[str]:
        """Return the names that `target` takes, where they can be listed."""

    def advice(self, name: str) -> str:
        """Return what to write for a name that is not a target, where it is nearly one; "" otherwise."""

    def num_devices(self, target: Any) -> int | None:
        """Return how many devices a target has; None where it may be any number."""

    def topologies_with(self, count: int, target: Any) -> list[str]:
        """Return usual topologies of the hardware of `target` that have `count` devices, at most three."""

    def mesh_problem(self, target: Any, name: str, mesh: Mapping[str, int]) -> tuple[str, str] | None:
        """Return why a mesh of as many devices as `target` has cannot lie on them, and what to write; None if it can.

        name: of the mesh. mesh: size of each axis, in order.
        """


def hardware(platform: str) -> Hardware:
    """Return what is checked in of a platform."""
    return cast(Hardware, importlib.import_module(f"stagec.hardware.{platform}"))


def entries() -> list[Entry]:
    """Return all that is checked in, by platforms."""
    return [entry for platform in PLATFORMS for entry in hardware(platform).entries()]


def target(name: str, others: tuple[str, ...] = ()) -> TargetSpec:
    """Return the target of a short name ("cpu-avx2", "h100-sxm") or of a TPU topology ("v5e:2x2").

    others: names that are known besides, for the message.
    Raises StagecError, which suggests similar names, when there is no such target.
    """
    everywhere = [hardware(platform) for platform in PLATFORMS]
    for module in everywhere:
        if spec := module.target(name):
            return spec
    kinds = "a short name that stagec targets lists, or a TPU topology such as v5e:2x2"
    listed = f"one of {', '.join(others)}, " if others else ""
    known = [*others, *(short for module in everywhere for short in module.names())]
    nearly = next(filter(None, (module.advice(name) for module in everywhere)), "")
    write = nearly or near(name, known) or f"write {listed}{kinds}"
    raise StagecError(Problem("", "", f'unknown target "{name}"', write))


def num_devices(target: TargetSpec) -> int | None:
    """Return how many devices a target has; None where it may be any number."""
    return hardware(target.platform).num_devices(target)


def topologies_with(count: int, target: TargetSpec) -> list[str]:
    """Return usual topologies of the hardware of `target` that have `count` devices, at most three."""
    return hardware(target.platform).topologies_with(count, target)


def mesh_problem(target: TargetSpec, name: str, mesh: Mapping[str, int]) -> tuple[str, str] | None:
    """Return why a mesh of as many devices as `target` has cannot lie on them, and what to write; None if it can."""
    return hardware(target.platform).mesh_problem(target, name, mesh)
