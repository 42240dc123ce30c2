"""Read the checked-in hardware, manifests/targets/*.toml, and define the interface of a platform's hardware."""

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
    """The facts about a checked-in target for a person.

    name: its short name; of a TPU generation, its name in topologies. platform: "cpu", "cuda", "rocm" or "tpu".
    doc: one line. source: the origin of the numbers.
    memory: bytes; flops: peak bfloat16 operations a second; bandwidth: bytes a second from memory; links: bytes a
        second of all links to other devices, in one direction. All are for one device or chip. They are None for CPUs,
        because an instruction set does not say them. links is None without links.
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
    """The checked-in devices of a platform, as HARDWARE of its module; `target` is one of that platform.

    The methods that are not abstract fit devices that a target may have in any number and arrangement.
    """

    @abstractmethod
    def entries(self) -> list[Entry]:
        """Return the checked-in entries."""

    @abstractmethod
    def target(self, name: str) -> TargetSpec | None:
        """Return the target of a name; None for another name. Raises StagecError for a name that is nearly a target."""

    def names(self) -> list[str]:
        """Return the names that `target` takes, if they can be listed."""
        return []

    def advice(self, name: str) -> str:
        """Return the advice for a name that is nearly one of a target; "" otherwise."""
        return ""

    def num_devices(self, target: Any) -> int | None:
        """Return the number of a target's devices; None if it may be any number."""
        return None

    def topologies_with(self, count: int, target: Any) -> list[str]:
        """Return usual topologies of the hardware of `target` that have `count` devices, at most three."""
        return []

    def mesh_problem(self, target: Any, name: str, mesh: Mapping[str, int]) -> tuple[str, str] | None:
        """Return why a mesh of as many devices as `target` has cannot lie on them, and what to write; None if it can.

        name: of the mesh. mesh: size of each axis, in order.
        """
        return None
