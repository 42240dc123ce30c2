"""The state that the functions of a loaded bundle share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias, TypeVar

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

Value = TypeVar("Value")


class Once:
    """Values by key. Each is made once: a thread waits only if another one is making the same value."""

    def __init__(self) -> None:
        self._values: dict[Hashable, Any] = {}
        self._turns: dict[Hashable, threading.Lock] = {}

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """Return the value of `key`; `make` makes it if there is none. If `make` raises, the next thread tries."""
        value: Value | None = self._values.get(key)
        if value is None:
            # A lock for each key: XLA takes tenths of a second to load an executable, and calls of others must not wait
            # for it.
            with self._turns.setdefault(key, threading.Lock()):
                value = self._values.get(key)
                if value is None:
                    value = self._values[key] = make()
        return value

    def made(self) -> list[Any]:
        """Return the values that there are."""
        return list(self._values.values())

    def clear(self) -> None:
        """Forget all values."""
        self._values.clear()


class Loaded:
    """The state that the functions of a loaded bundle share.

    archive: None when the bundle was closed. path, name: of the bundle.
    devices: those that the caller names, in order; empty: those of the platform. compile: None forbids compiling.
    locations: whether to read the files with source locations beside the bundle.
    lock: held for an instant, to remember a call or to close the bundle; never while XLA works.
    """

    def __init__(
        self,
        archive: Archive,
        path: str,
        name: str,
        host: Host,
        asked: Asked,
        types: NodeTypes,
        weights: Weights,
        devices: tuple[_jax.Device, ...],
        compiler: Compile | None,
        locations: bool,
    ) -> None:
        self.archive: Archive | None = archive
        self.path = path
        self.name = name
        self.host = host
        self.asked = asked
        self.types = types
        self.weights = weights
        self.devices = devices
        self.compile = compiler
        self.locations = locations
        self.lock = threading.Lock()

    def devices_for(self, platform: str, count: int, of_jax: bool = False) -> Sequence[_jax.Device]:
        """Return the devices that run an executable for `count` devices. Raises LoadError ("platform", "device-count").

        of_jax: for JAX's arrays: JAX's devices, which may be fewer, unless the caller of `load` has named others.
        """
        if self.devices:
            return self.devices[:count]
        if not of_jax:
            return clients.devices(platform, count)
        return clients.of_jax(platform)[:count]
