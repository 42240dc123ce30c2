"""The mesh that a function is traced over: its axes and their sizes, and those along which a `shard_map` splits.

A mesh is data in an equation here. `stages.shardings` has the classes for users.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Hashable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeAlias

from stagec.core.messages.errors import nearest
from stagec.core.sizes.partitions import Partition
from stagec_arrays.dims import Shape
from stagec_arrays.program import Program, subprograms
from stagec_arrays.values import shown

Axes: TypeAlias = tuple[tuple[str, int], ...]
"""Name and size of each axis of a mesh, in order; empty: no mesh."""


class _Around(NamedTuple):
    mesh: Axes = ()
    manual: tuple[str, ...] = ()


_NOWHERE = _Around()
_CURRENT: ContextVar[_Around] = ContextVar("stagec_mesh", default=_NOWHERE)


@contextlib.contextmanager
def use(mesh: Axes, manual: Sequence[str] = ()) -> Iterator[None]:
    """Use a mesh inside a `with` statement. manual: its axes along which the code sees one device's part."""
    before = _CURRENT.set(_Around(mesh, tuple(manual)))
    try:
        yield
    finally:
        _CURRENT.reset(before)


def current() -> Axes:
    """Return the mesh of the code that is running."""
    return _CURRENT.get().mesh


def around() -> Hashable:
    """Return the mesh of the code that is running, and along which of its axes a `shard_map` splits arrays."""
    return _CURRENT.get()


def manual(names: Sequence[str]) -> Axes:
    """Return the mesh. Raises NameError if the running code is not in a `shard_map` along these axes."""
    mesh, known = _CURRENT.get()
    for name in names:
        if name not in known:
            hint = nearest(name, known) if known else "it is called outside shard_map"
            raise NameError(f"{name!r} is not an axis along which shard_map splits arrays here: {hint}")
    return mesh


def apart(mesh: Axes) -> tuple[str, ...]:
    """Return the axes of a mesh along which a `shard_map` around the running code splits."""
    around = _CURRENT.get()
    return around.manual if around.mesh == mesh else ()


def size(mesh: Axes, names: Sequence[str]) -> int:
    """Return how many devices there are along axes."""
    return math.prod(dict(mesh)[name] for name in names)


def check(mesh: Axes, partition: Partition, ndim: int) -> None:
    """Raise ValueError if a partition is not one over a mesh, for an array of `ndim` dimensions."""
    names = [name for axes in partition for name in axes]
    for name in names:
        if name not in dict(mesh):
            raise ValueError(f"the mesh has no axis {name!r}; {nearest(name, dict(mesh))}")
    if len(set(names)) < len(names):
        raise ValueError(f"an axis is used twice in {partition}; split one dimension over it")
    if len(partition) > ndim:
        raise ValueError(f"{len(partition)} dimensions are split, and the array has {ndim}")


def part(shape: Shape, mesh: Axes, partition: Partition) -> Shape:
    """Return the shape of the part of an array that one device has. Raises ValueError if parts are not equal."""
    check(mesh, partition, len(shape))
    sizes = list(shape)
    for axis, names in enumerate(partition):
        count = size(mesh, names)
        if count > 1:
            if sizes[axis] % count != 0:
                what = f"dimension {axis} of shape {shown(shape)} does not have {count} equal parts"
                known = type(sizes[axis]) is int
                write = "" if known else f"; write the constraint {sizes[axis]} % {count} == 0, if they always are"
                raise ValueError(f"{what}, which the mesh has along {' and '.join(names)}{write}")
            sizes[axis] = sizes[axis] // count
    return tuple(sizes)


def of_program(program: Program) -> Axes:
    """Return the mesh that equations of a program name; empty if none does. Raises ValueError for two."""
    result: set[Axes] = set()

    def look(current: Program) -> None:
        for equation in current.equations:
            if not equation.params:  # most have none
                continue
            if mesh := equation.params.get("mesh"):
                result.add(mesh)
            for inner in subprograms(equation):
                look(inner)

    look(program)
    return the_one(result)


def the_one(used: set[Axes]) -> Axes:
    """Return the only mesh that is not empty. Raises ValueError for two."""
    some: list[Any] = sorted(used - {()})
    if len(some) > 1:
        raise ValueError(f"a function is for one mesh, not {' and '.join(map(str, map(dict, some)))}")
    return some[0] if some else ()
