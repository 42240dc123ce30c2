"""How arrays lie on devices, as data: `Mesh`, `PartitionSpec`, `NamedSharding`, `Layout` and `Format`.

The names and meanings are those of https://docs.jax.dev/en/latest/jax.sharding.html, without devices: a mesh is axes
and their sizes, and the devices of a mesh are numbered in the order of its axes, the last one fastest.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from jaxlib import xla_client

from stagec.core.sizes import partitions

_UNREDUCED = xla_client.OpSharding.Type.UNREDUCED
AXIS_TYPES = ("Auto", "Explicit", "Manual")
"""Types of a mesh axis (https://docs.jax.dev/en/latest/notebooks/explicit-sharding.html)."""


@dataclass(frozen=True)
class AbstractDevice:
    """The facts about the devices of a mesh: their kind by PJRT's name, cores of each if known, platform."""

    device_kind: str
    num_cores: int | None = None
    platform: str = ""


@dataclass(frozen=True)
class Mesh:
    """Named axes of a grid of devices, without the devices: `Mesh((2, 2), ("data", "model"))`.

    As `jax.sharding.AbstractMesh` (https://docs.jax.dev/en/latest/jax.sharding.html).

    axis_sizes: number of devices along each axis.
    axis_names: name of each axis.
    axis_types: for each axis one of AXIS_TYPES. Empty stands for "Auto" for all axes.
    abstract_device: the kind of devices. None if any will do.

    Raises ValueError unless there is a size, a name and a type for each axis.
    """

    axis_sizes: tuple[int, ...]
    axis_names: tuple[str, ...]
    axis_types: tuple[str, ...] = ()
    abstract_device: AbstractDevice | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "axis_types", self.axis_types or ("Auto",) * len(self.axis_names))
        if not len(self.axis_sizes) == len(self.axis_names) == len(self.axis_types):
            what = f"{self.axis_sizes}, {self.axis_names}, {self.axis_types}"
            raise ValueError(f"a mesh has a size, a name and a type for each axis, not {what}")

    @property
    def shape(self) -> Mapping[str, int]:
        """The size of each axis by name, in order."""
        return dict(zip(self.axis_names, self.axis_sizes, strict=True))

    @property
    def size(self) -> int:
        """How many devices there are."""
        return math.prod(self.axis_sizes)

    def __str__(self) -> str:
        axes = "".join(f"'{name}': {size}, " for name, size in self.shape.items())
        return f"Mesh({axes}axis_types=({', '.join(self.axis_types)}{',' * (len(self.axis_types) == 1)}))"

    @staticmethod
    def from_jax(mesh: Any) -> Mesh:
        """Return `mesh`, or the description of one of JAX's meshes (`jax.sharding.Mesh`, `AbstractMesh`)."""
        if isinstance(mesh, Mesh):
            return mesh
        mesh = mesh.abstract_mesh
        types = tuple(axis_type.name for axis_type in mesh.axis_types)
        return Mesh(tuple(mesh.axis_sizes), tuple(mesh.axis_names), types)


@dataclass(frozen=True, init=False)
class PartitionSpec:
    """The mesh axes over which each dimension of an array is split: `PartitionSpec("data", None, ("x", "y"))`.

    As `jax.sharding.PartitionSpec` (https://docs.jax.dev/en/latest/jax.sharding.html#jax.sharding.PartitionSpec).

    partitions: the axes of each dimension, outermost first; () for a dimension that is whole. You may leave out whole
        dimensions at the end.
    unreduced, reduced: axes over which a sum is pending, or its gradient; sorted.
    """

    partitions: partitions.Partition
    unreduced: tuple[str, ...]
    reduced: tuple[str, ...]

    def __init__(
        self, *entries: str | Iterable[str] | None, unreduced: Iterable[str] = (), reduced: Iterable[str] = ()
    ) -> None:
        """Each entry is an axis, several axes, or None."""
        axes = tuple((e,) if isinstance(e, str) else tuple(e or ()) for e in entries)
        object.__setattr__(self, "partitions", axes)
        object.__setattr__(self, "unreduced", tuple(sorted(unreduced)))
        object.__setattr__(self, "reduced", tuple(sorted(reduced)))

    def __str__(self) -> str:
        extra = [f"{name}={axes}" for name in ("unreduced", "reduced") if (axes := getattr(self, name))]
        return ", ".join([partitions.write(self.partitions), *extra])


@dataclass(frozen=True)
class NamedSharding:
    """A mesh, and how an array is split over it.

    As `jax.sharding.NamedSharding` (https://docs.jax.dev/en/latest/jax.sharding.html#jax.sharding.NamedSharding).

    mesh: axes and their sizes.
    spec: the axes that split each dimension.
    memory_kind: "device", "pinned_host" or "unpinned_host"; None is the platform's default.
    """

    mesh: Mesh
    spec: PartitionSpec
    memory_kind: str | None = None

    def to_hlo(self, ndim: int) -> xla_client.HloSharding:
        """Return XLA's form for an array of `ndim` dimensions. It numbers devices, and does not know axis names."""
        # XLA's form has no axes of size 1.
        axes = [
            (name, size, kind)
            for name, size, kind in zip(self.mesh.axis_names, self.mesh.axis_sizes, self.mesh.axis_types, strict=True)
            if size != 1
        ]
        position = {name: i for i, (name, _, _) in enumerate(axes)}
        order = [position[name] for names in self.spec.partitions for name in names if name in position]
        kinds = xla_client.OpSharding.Type
        rest: dict[Any, list[int]] = {}
        for i, (name, _, kind) in enumerate(axes):
            if i not in order:
                of_axis = kinds.REPLICATED
                if kind == "Manual":
                    of_axis = kinds.MANUAL
                elif name in self.spec.unreduced:
                    of_axis = kinds.UNREDUCED
                rest.setdefault(of_axis, []).append(i)
        if not order and set(rest) <= {kinds.REPLICATED}:
            return xla_client.HloSharding.replicate()
        dims = [
            math.prod(axes[position[name]][1] for name in names if name in position) for names in self.spec.partitions
        ]
        dims += [1] * (ndim - len(dims))
        subgroups = sorted(rest.items(), key=lambda item: item[0].value)
        for _, indices in subgroups:
            dims.append(math.prod(axes[i][1] for i in indices))
            order += indices
        return xla_client.HloSharding.iota_tile(
            dims=dims,
            reshape_dims=[size for _, size, _ in axes],
            transpose_perm=order,
            subgroup_types=[kind for kind, _ in subgroups],
        )

    def with_mesh(self, mesh: Any) -> NamedSharding:
        """Return the same sharding over `mesh`. Raises ValueError when its axes are not those of this mesh."""
        new, old = Mesh.from_jax(mesh), self.mesh
        if (new.axis_sizes, new.axis_names, new.axis_types) != (old.axis_sizes, old.axis_names, old.axis_types):
            raise ValueError(f"NamedSharding new mesh {new} does not match the mesh used for export {old}.")
        return NamedSharding(new, self.spec, self.memory_kind)


OneSharding: TypeAlias = NamedSharding | xla_client.HloSharding | None
"""How one array is split; None: not specified. Bytes from before January 2026 have XLA's form, without axis names."""


@dataclass(frozen=True)
class SingleDeviceSharding:
    """All of an array on one device; memory_kind as of NamedSharding."""

    memory_kind: str | None = None


@dataclass(frozen=True)
class GSPMDSharding:
    """A sharding that XLA chose, and that is not a NamedSharding of a known mesh: XLA's own form, as a string.

    memory_kind: as of NamedSharding.
    """

    hlo_sharding: str
    memory_kind: str | None = None


Sharding: TypeAlias = NamedSharding | SingleDeviceSharding | GSPMDSharding


@dataclass(frozen=True)
class Layout:
    """The order of an array's dimensions in memory; fields as https://docs.jax.dev/en/latest/jax.experimental.layout.html.

    major_to_minor: dimensions from the slowest to the fastest.
    tiling: tiles of the fastest dimensions; empty on CPUs.
    sub_byte_element_size_in_bits: of packed elements such as int4; 0 if elements are whole bytes.
    """

    major_to_minor: tuple[int, ...]
    tiling: tuple[tuple[int, ...], ...]
    sub_byte_element_size_in_bits: int


@dataclass(frozen=True)
class Format:
    """Layout and sharding of an array; both None for an argument that the program does not take."""

    layout: Layout | None
    sharding: Sharding | None


def named_sharding(hlo: xla_client.HloSharding, ndim: int, mesh: Any) -> NamedSharding:
    """Return the NamedSharding over `mesh` with the XLA form `hlo`, for an array of `ndim` dimensions.

    Raises ValueError when the mesh has none.
    """
    target = Mesh.from_jax(mesh)
    if hlo.is_replicated() or (hlo.is_maximal() and target.size == 1):
        return NamedSharding(target, PartitionSpec())
    if hlo.is_unreduced():
        every = (name for name, size in target.shape.items() if size > 1)
        return NamedSharding(target, PartitionSpec(unreduced=every))
    if hlo.is_tiled():
        for partition in _partitions(list(hlo.tile_assignment_dimensions())[:ndim], target.shape):
            left = [
                name for name, size in target.shape.items() if size > 1 and not any(name in axes for axes in partition)
            ]
            for unreduced in _subsets(left) if _UNREDUCED in hlo.subgroup_types() else [()]:
                if NamedSharding(target, PartitionSpec(*partition, unreduced=unreduced)).to_hlo(ndim) == hlo:
                    # JAX leaves out dimensions at the end that are whole.
                    kept = max((i + 1 for i, axes in enumerate(partition) if axes), default=0)
                    return NamedSharding(target, PartitionSpec(*partition[:kept], unreduced=unreduced))
    raise ValueError(f"{hlo} is not a sharding over {target}")


def _subsets(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield every choice of one or more names."""
    return itertools.chain.from_iterable(itertools.combinations(names, n + 1) for n in range(len(names)))


def _partitions(sizes: Sequence[int], axes: Mapping[str, int]) -> Iterator[partitions.Partition]:
    """Yield every way to split dimensions into `sizes` parts over `axes`, each axis at most once."""
    if not sizes:
        yield ()
        return
    for names in _products(sizes[0], axes):
        left = {name: size for name, size in axes.items() if name not in names}
        for others in _partitions(sizes[1:], left):
            yield (names, *others)


def _products(size: int, axes: Mapping[str, int]) -> Iterator[tuple[str, ...]]:
    """Yield every sequence of axes of more than one device each, with sizes that multiply to `size`."""
    if size == 1:
        yield ()
        return
    for name, length in axes.items():
        if length > 1 and size % length == 0:
            left = {other: n for other, n in axes.items() if other != name}
            for others in _products(size // length, left):
                yield (name, *others)
