"""What the functions of a loaded bundle share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from jaxlib import _jax

from stagec.bundle.archive import Archive
from stagec.core.trees.node_types import NodeTypes
from stagec.loader.selection import Asked, Shapes
from stagec.pjrt import clients
from stagec.pjrt.calling_convention import Convention
from stagec.pjrt.executable import Executable
from stagec.pjrt.host import Host
from stagec.pjrt.weights import Weights

Compile: TypeAlias = Callable[[bytes, str, Shapes, Sequence[_jax.Device]], tuple[Convention, Executable]]
"""Compiles a serialized `Exported` for a platform and for shapes of its arguments, on devices."""


@dataclass
class Loaded:
    """What the functions of a loaded bundle share.

    archive: None when the bundle was closed. path, name: of the bundle.
    devices: that the caller names, in order; empty: those of the platform. compile: None where nothing may be compiled.
    locations: whether the files with source locations beside the bundle are read.
    """

    archive: Archive | None
    path: str
    name: str
    host: Host
    asked: Asked
    types: NodeTypes
    weights: Weights
    devices: tuple[_jax.Device, ...] = ()
    compile: Compile | None = None
    locations: bool = True
    lock: threading.RLock = field(default_factory=threading.RLock)

    def devices_for(self, platform: str, count: int) -> Sequence[_jax.Device]:
        """Return the devices that run what is for `count` of them. Raises LoadError ("platform", "device-count")."""
        return self.devices[:count] if self.devices else clients.devices(platform, count)
