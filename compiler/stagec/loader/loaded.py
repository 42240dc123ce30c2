"""The state that the functions of a loaded bundle share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from jaxlib import _jax

from stagec.bundle.archive import Archive
from stagec.core.messages.refusal import LoadError
from stagec.loader.once import Once
from stagec.loader.selection import MEASURED, POLICIES, Asked, Policy, Shapes
from stagec.pjrt import clients, host, probe
from stagec.pjrt.calling_convention import Convention
from stagec.pjrt.executable import Executable
from stagec.pjrt.weights import Weights

if TYPE_CHECKING:
    from stagec.bundle.external import Files
    from stagec.core.trees.node_types import NodeTypes, Types
    from stagec.loader.crossings import Crossings

Compile: TypeAlias = Callable[[bytes, str, Shapes, Sequence[_jax.Device]], tuple[Convention, Executable]]
"""Compiles a serialized `Exported` for a platform and for shapes of its arguments, on devices."""


class Settings(NamedTuple):
    """How a bundle is loaded. target, types, policy, devices, map_weights: as of `stagec.load`.

    compiler: compiles an exported artifact; None: nothing is compiled.
    selected_only: whether to refuse a bundle if nothing in it runs here.
    locations: whether to read the files with source locations beside the bundle. Nobody signs these files.
    files: the weights beside the bundle; None: those in its folder, when a call uses them.
    """

    target: str | None = None
    types: Types | None = None
    policy: Policy = "allow_compile"
    devices: Sequence[_jax.Device] = ()
    compiler: Compile | None = None
    selected_only: bool = True
    locations: bool = True
    map_weights: bool = True
    files: Files | None = None

    def asked(self, archive: Archive) -> Asked:
        """Return the request to the selection. Raises ValueError for another policy, LoadError ("no-target")."""
        if self.policy not in POLICIES:
            raise ValueError(f"policy is {self.policy!r}; write {' or '.join(map(repr, POLICIES))}")
        targets = archive.index["targets"]
        if self.target is not None and self.target not in targets:
            what = f"no target {self.target!r}; the bundle has {', '.join(targets) or 'none'}"
            raise LoadError("no-target", f"{archive.path}: {what}")
        platform = targets[self.target]["platform"] if self.target else None
        policy = self.policy
        if not self.compiler:
            policy = "measured_only" if policy in MEASURED else "executable_only"
        return Asked(self.target, platform, policy, num_devices=len(self.devices) or None)


class Loaded:
    """The state that the functions of a loaded bundle share.

    archive: None when the bundle was closed. path, name: of the bundle.
    crossings: the executables of older jaxlibs that the policy takes; None: it takes none.
    lock: held for an instant, to remember a call or to close the bundle; never while XLA works.
    """

    def __init__(self, archive: Archive, settings: Settings) -> None:
        """Raises LoadError ("jaxlib-version"), and the errors of `Settings.asked`."""
        if refusal := probe.refusal():
            raise LoadError("jaxlib-version", refusal)
        self.archive: Archive | None = archive
        self.path = archive.path
        self.name: str = archive.index["name"]
        self.settings = settings
        self.asked = settings.asked(archive)
        self.host = host.describe(settings.devices)
        self.crossings: Crossings | None = None
        if settings.policy in MEASURED:
            from stagec.loader.crossings import Crossings  # most processes run what their own jaxlib made

            self.crossings = Crossings(self.host)
        self._once = Once()
        if settings.types is not None:
            self.types()  # what is wrong with them, nobody wants to hear from a call
        self.weights = Weights.from_archive(archive, settings.map_weights, settings.files)
        self.lock = threading.Lock()

    def types(self) -> NodeTypes:
        """Return the types of nodes that results may have, and arguments."""

        def made() -> NodeTypes:
            from stagec.core.trees.node_types import NodeTypes  # most functions take and give plain containers

            return NodeTypes(self.settings.types)

        return self._once.get("types", made)

    def devices_for(self, platform: str, count: int, of_jax: bool = False) -> Sequence[_jax.Device]:
        """Return the devices that run an executable for `count` devices. Raises LoadError ("platform", "device-count").

        of_jax: for JAX's arrays: JAX's devices, which may be fewer, unless the caller of `load` has named others.
        """
        if self.settings.devices:
            return self.settings.devices[:count]
        if not of_jax:
            return clients.devices(platform, count)
        return clients.of_jax(platform)[:count]
