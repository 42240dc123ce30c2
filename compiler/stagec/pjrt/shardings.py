"""How arrays lie on devices: the part of an array on each device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from jaxlib import _jax, xla_client

if TYPE_CHECKING:
    from numpy.typing import NDArray

Index: TypeAlias = tuple[slice, ...]
"""Which part of an array a device holds: a slice for each dimension."""

_KINDS = xla_client.OpSharding.Type


class Part(NamedTuple):
    """A device's part of an array.

    slices: the part. addend: of an unreduced array, the number of the addend in the sum that is not made yet; 0 if
    the part is the array's own.
    """

    slices: Index
    addend: int = 0


class Sharding:
    """How an array lies on devices: members are those of `jax.sharding.Sharding`.

    https://docs.jax.dev/en/latest/jax.sharding.html

    devices: in the order of the partitions.
    spec: XLA's form of the parts; None: the array is whole, on the one device.
    memory_kind: the memory of each device that it lies in, such as "pinned_host"; None: the device's own.
    own, own_devices: numbers of the devices of this process, and these devices: all, unless processes run together.
    is_fully_addressable: whether they are all.
    """

    __slots__ = (
        "_holders",
        "_parts",
        "device_list",
        "devices",
        "is_fully_addressable",
        "memory_kind",
        "own",
        "own_devices",
        "spec",
        "xla",
    )

    def __init__(
        self,
        devices: tuple[_jax.Device, ...],
        spec: xla_client.HloSharding | None = None,
        memory_kind: str | None = None,
    ) -> None:
        self.devices = devices
        self.spec = spec
        self.memory_kind = memory_kind
        self.device_list = _jax.DeviceList(devices)
        # Of this class, and no subclass in Python, C++ reads all without calling Python.
        self.xla = _jax.GSPMDSharding(self.device_list, spec or xla_client.HloSharding.replicate(), memory_kind)
        self.own: Sequence[int] = range(len(devices))
        self.own_devices = devices
        self.is_fully_addressable = bool(self.device_list.is_fully_addressable)
        if not self.is_fully_addressable:
            here = devices[0].client.process_index()
            self.own = [number for number, device in enumerate(devices) if device.process_index == here]
            self.own_devices = tuple(devices[number] for number in self.own)
        self._parts: dict[tuple[int, ...], tuple[Part, ...]] = {}
        self._holders: dict[tuple[int, ...], tuple[int, ...] | None] = {}

    @property
    def device_set(self) -> frozenset[_jax.Device]:
        """The devices, in no order."""
        return frozenset(self.devices)

    def parts(self, shape: tuple[int, ...]) -> tuple[Part, ...]:
        """Return the part of an array of `shape` on each of `devices`. Raises ValueError as `placement`."""
        held = self._parts.get(shape)
        if held is None:
            spec = self.spec or xla_client.HloSharding.replicate()
            held = self._parts[shape] = placement(spec, shape, len(self.devices))
        return held

    def own_parts(self, shape: tuple[int, ...]) -> Sequence[Part]:
        """Return the parts that the devices of this process hold, in their order. Raises ValueError as `placement`."""
        parts = self.parts(shape)
        return parts if self.is_fully_addressable else [parts[number] for number in self.own]

    def pieces(self, values: NDArray[Any]) -> list[NDArray[Any]]:
        """Return the part of the whole `values` for each own device; for addends, the first device gets everything.

        Raises ValueError.
        """
        if self.spec is None:
            return [values]
        held = [(values[part.slices], part.addend) for part in self.own_parts(values.shape)]
        return [
            np.zeros(piece.shape, piece.dtype) if addend else np.ascontiguousarray(piece).reshape(piece.shape)
            for piece, addend in held
        ]

    def holders(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return numbers among the own devices that together hold an array of `shape`, each part once.

        Addends come in order. None if only devices of other processes hold a part.
        """
        if shape not in self._holders:
            parts = self.own_parts(shape)
            first = [number for number, part in enumerate(parts) if parts.index(part) == number]
            held = tuple(sorted(first, key=lambda number: parts[number].addend))
            complete = self.is_fully_addressable or len(first) == len({repr(part) for part in self.parts(shape)})
            self._holders[shape] = held if complete else None
        return self._holders[shape]

    def devices_indices_map(self, global_shape: tuple[int, ...]) -> Mapping[_jax.Device, Index]:
        """Return the part of an array of `global_shape` that each device holds."""
        return {device: part.slices for device, part in zip(self.devices, self.parts(global_shape), strict=True)}

    def shard_shape(self, global_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the part that each device holds."""
        if self.spec is None:
            return global_shape
        return tuple(part.stop - part.start for part in self.parts(global_shape)[0].slices)

    def same(self, other: Sharding, shape: tuple[int, ...]) -> bool:
        """Whether an array of `shape` lies in the same memory of the same devices in the same parts."""
        if self is other:
            return True
        same = (self.devices, self.memory_kind) == (other.devices, other.memory_kind)
        return same and self.parts(shape) == other.parts(shape)

    def __repr__(self) -> str:
        where = ", ".join(str(device.id) for device in self.devices)
        spec = f", {self.spec}" if self.spec else ""
        return f"Sharding(devices {where}{spec}{f', {self.memory_kind}' if self.memory_kind else ''})"


def placement(sharding: xla_client.HloSharding, shape: Sequence[int], num_devices: int) -> tuple[Part, ...]:
    """Return the part of an array of `shape` on each device.

    Raises ValueError when a dimension is not a multiple of the number of its parts: XLA would pad it. Also if devices
    hold data that is not a part of one array: over axes that are manual at the program's border, or on one device
    alone.
    """
    whole = tuple(slice(0, size) for size in shape)
    if sharding.is_replicated():
        return (Part(whole),) * num_devices
    if sharding.is_unreduced():
        return tuple(Part(whole, device) for device in range(num_devices))
    # Dimensions beyond the array's count the devices that hold the same part, or the addends of it.
    tiles = sharding.tile_assignment_dimensions()
    kinds = [_KINDS.REPLICATED] if sharding.replicate_on_last_tile_dim() else sharding.subgroup_types()
    counts, more = tiles[: len(shape)], tiles[len(shape) :]
    if not sharding.is_tiled() or len(more) != len(kinds) or {*kinds} - {_KINDS.REPLICATED, _KINDS.UNREDUCED}:
        raise ValueError(f"an array that lies on devices by {sharding} has no parts that can be put together")
    if any(size % count for size, count in zip(shape, counts, strict=True)):
        raise ValueError(f"shape {tuple(shape)} does not divide into {'x'.join(map(str, counts))} parts")
    parts = [Part(whole)] * num_devices
    for position, device in enumerate(sharding.tile_assignment_devices()):
        tile = [int(i) for i in np.unravel_index(position, tiles)]
        slices = tuple(
            slice(i * size // count, (i + 1) * size // count)
            for i, size, count in zip(tile, shape, counts, strict=False)
        )
        addend = 0
        for i, count, kind in zip(tile[len(shape) :], more, kinds, strict=True):
            addend = addend * count + i if kind == _KINDS.UNREDUCED else addend
        parts[device] = Part(slices, addend)
    return tuple(parts)
