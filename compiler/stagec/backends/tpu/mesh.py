"""Place the chips of a TPU topology in a mesh: in the order of `jax.make_mesh`, without JAX and without devices.

Neighbours along a mesh axis should be neighbours in the torus. JAX has rings for small slices, and else gives each mesh
axis whole axes of the torus, the last mesh axis first (`jax.experimental.mesh_utils.create_device_mesh`). Where whole
axes do not fit, JAX refuses on most generations and splits axes on v5e; here they are split on all. Several slices are
joined along the first mesh axis, as `create_hybrid_device_mesh` does for a data-center mesh of (slices, 1, ...).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from stagec.backends.compilation import CannotCompile
from stagec.costs.collectives import transposed

_RING_OF_8 = (0, 1, 2, 3, 6, 7, 4, 5)
_RING_OF_2X2 = (0, 1, 3, 2)
_RING_OF_2X4 = (0, 1, 2, 3, 7, 6, 5, 4)
_RING_OF_4X4 = (0, 1, 2, 3, 7, 6, 5, 9, 10, 11, 15, 14, 13, 12, 8, 4)


def order(devices: Sequence[Any], mesh: Sequence[int]) -> tuple[int, ...]:
    """Return for each position of the mesh, row by row, the index of its device in `devices`.

    devices: all of a topology, in XLA's order. mesh: sizes of its axes; their product is the number of devices.
    Raises CannotCompile when the axes cannot be laid on the topology.
    """
    slices = sorted({device.slice_index for device in devices if hasattr(device, "slice_index")})
    if len(slices) <= 1:
        return _slice_order(devices, tuple(range(len(devices))), mesh)
    if mesh[0] % len(slices):
        what = f"the first axis of the mesh, {mesh[0]}, is not a multiple of the {len(slices)} slices"
        raise CannotCompile(what, "slices", "make the first axis of the mesh the one that goes over slices")
    inner = (mesh[0] // len(slices), *mesh[1:])
    members = {s: tuple(i for i, device in enumerate(devices) if device.slice_index == s) for s in slices}
    return tuple(i for s in slices for i in _slice_order([devices[i] for i in members[s]], members[s], inner))


def _slice_order(devices: Sequence[Any], indices: Sequence[int], mesh: Sequence[int]) -> tuple[int, ...]:
    local = _ring(devices, mesh) or _torus(devices, mesh)
    return tuple(indices[i] for i in local)


def _ring(devices: Sequence[Any], mesh: Sequence[int]) -> list[int]:
    """Return JAX's order for a small slice; empty if it has none."""
    kind, count = devices[-1].device_kind, len(devices)
    if kind in ("TPU v2", "TPU v3"):
        eights = count == 8 or mesh[-1] == 8
        return [start + i for start in range(0, count, 8) for i in _RING_OF_8] if eights else list(range(count))
    if kind == "TPU7x":
        x, y = (1 + max(device.coords[axis] for device in devices) for axis in (0, 1))
        fits = count % 8 == 0 and count <= 32 and x <= 2 and y <= 2
        return [start + i for start in range(0, count, 8) for i in _RING_OF_8] if fits else []
    if kind not in ("TPU v5 lite", "TPU v6 lite"):
        return []
    by_row = sorted(range(count), key=lambda i: tuple(reversed(devices[i].coords)))
    bounds = tuple(1 + size for size in devices[by_row[-1]].coords)
    if bounds == (2, 2, 1):
        return [by_row[i] for i in _RING_OF_2X2]
    if count == 8:
        return [by_row[i] for i in _RING_OF_2X4]
    if bounds == (4, 4, 1) and max(mesh) == count:
        return [by_row[i] for i in _RING_OF_4X4]
    return []


def _torus(devices: Sequence[Any], mesh: Sequence[int]) -> list[int]:
    """Return the order that gives each mesh axis whole axes of the torus, or parts of axes if those do not fit."""
    coords = [(*device.coords, device.core_on_chip) for device in devices]
    dims = [1 + max(chip[axis] for chip in coords) for axis in range(4)]
    at = {chip: i for i, chip in enumerate(coords)}
    if math.prod(dims) != len(devices):
        raise CannotCompile("the devices of the topology are not a cuboid", "topology")
    if dims[3] == 1:
        dims = dims[:3]
    physical = [at[(*chip, 0)[:4]] for chip in itertools.product(*map(range, dims))]
    factors = _split_axes(dims, mesh)
    flat = [factor for row in factors for factor in row]
    axes = sorted(range(len(flat)), key=lambda i: (i % len(mesh), i // len(mesh)))
    return transposed(physical, flat, axes)


def _split_axes(dims: Sequence[int], mesh: Sequence[int]) -> list[list[int]]:
    """Return for each axis of the torus the factor of it that each mesh axis gets, the last one first.

    That is whole axes where their sizes multiply to it: as many as can be, and the first of those, as in JAX.
    """
    factors = [[1] * len(mesh) for _ in dims]
    for axis in reversed(range(len(mesh))):
        used = [math.prod(row) for row in factors]

        def rank(share: tuple[int, ...], used: Sequence[int] = used) -> tuple[int, int, int, tuple[int, ...]]:
            complete = [size for size, dim in zip(share, dims, strict=True) if size == dim]
            shared = math.prod(size for size, before in zip(share, used, strict=True) if before > 1)
            return math.prod(complete), len([size for size in complete if size > 1]), shared, share

        best = max(_shares([dim // u for dim, u in zip(dims, used, strict=True)], mesh[axis]), key=rank, default=None)
        if best is None:
            torus, wanted = "x".join(map(str, dims)), "x".join(map(str, mesh))
            raise CannotCompile(f"a mesh of {wanted} cannot be laid on a torus of {torus}", "topology")
        for row, size in zip(factors, best, strict=True):
            row[axis] = size
    return factors


def _shares(left: Sequence[int], size: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to take a factor from each of `left` such that their product is `size`."""
    if not left:
        yield from [()] if size == 1 else []
        return
    for factor in range(1, min(left[0], size) + 1):
        if left[0] % factor == size % factor == 0:
            yield from ((factor, *others) for others in _shares(left[1:], size // factor))
