"""The checked-in hardware as it is written, manifests/targets/*.toml, and what a platform says of its own."""

from __future__ import annotations

import functools
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stagec.core.builds.platforms import PLATFORMS
from stagec.core.builds.specs import TargetSpec

_FOLDER = Path(__file__).parent.parent / "targets"
"""A link to manifests/targets; in an installed package, the files themselves."""


@dataclass(frozen=True)
class Entry:
    """What a person wants to read of a checked-in target.

    name: its short name; of a TPU generation, its name in topologies. platform: "cpu", "cuda" or "tpu".
    doc: one line. source: where the numbers are from.
    memory: bytes; flops: peak bfloat16 operations a second; bandwidth: bytes a second from memory; links: bytes a
        second of all links to other devices, in one direction. All are of one device or chip, and None for CPUs: an
        instruction set says nothing of them. links is None too where there are none.
    examples: names of targets with it: the short name, or topologies. devices: how many devices each of those has.
    """

    name: str
    platform: str
    doc: str
    source: str
    memory: int | None
    flops: float | None
    bandwidth: float | None
    links: float | None
    examples: tuple[str, ...]
    devices: tuple[int, ...]


@functools.cache
def read(platform: str) -> Mapping[str, Mapping[str, Any]]:
    """Return the tables of a platform's file by their names."""
    return tomllib.loads((_FOLDER / PLATFORMS[platform].catalog).read_text("utf-8"))


class Hardware(ABC):
    """What is checked in of a platform's devices, as HARDWARE of its module; `target` is one of that platform.

    What is not abstract is so for devices of which a target may have any number, in any arrangement.
    """

    @abstractmethod
    def entries(self) -> list[Entry]:
        """Return what is checked in."""

    @abstractmethod
    def target(self, name: str) -> TargetSpec | None:
        """Return the target of a name; None for another name. Raises StagecError for a name that is nearly a target."""

    def names(self) -> list[str]:
        """Return the names that `target` takes, where they can be listed."""
        return []

    def advice(self, name: str) -> str:
        """Return what to write for a name that is not a target, where it is nearly one; "" otherwise."""
        return ""

    def num_devices(self, target: Any) -> int | None:
        """Return how many devices a target has; None where it may be any number."""
        return None

    def topologies_with(self, count: int, target: Any) -> list[str]:
        """Return usual topologies of the hardware of `target` that have `count` devices, at most three."""
        return []

    def mesh_problem(self, target: Any, name: str, mesh: Mapping[str, int]) -> tuple[str, str] | None:
        """Return why a mesh of as many devices as `target` has cannot lie on them, and what to write; None if it can.

        name: of the mesh. mesh: size of each axis, in order.
        """
        return None
