"""Functions of arrays that are split over a mesh: `shard_map`, the collectives in it, `with_sharding_constraint`.

Names and meanings are those of JAX (https://docs.jax.dev/en/latest/notebooks/shard_map.html, and the parallel operators
of `jax.lax`). Meshes and partition specs are stagec's or JAX's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from stagec.core.sizes.partitions import Partition
from stagec_arrays import meshes, pytrees, tracing
from stagec_arrays.meshes import Axes
from stagec_arrays.namespace.flat import Flat
from stagec_arrays.namespace.promotion import array_of, inexact, named
from stagec_arrays.primitives import collectives, elementwise, sharding, structural
from stagec_arrays.values import axis_of


@contextmanager
def set_mesh(mesh: Any) -> Iterator[None]:
    """Use a mesh inside a `with` statement, for functions that do not name one. As `jax.set_mesh`.

    mesh: a `Mesh`, or a mesh of JAX.

    >>> import stagec_arrays.numpy as np
    >>> from stagec_arrays import lax
    >>> def doubled(x):
    ...     return lax.with_sharding_constraint(x * 2, stagec.PartitionSpec("data"))
    >>> with stagec_arrays.set_mesh(stagec.Mesh((2,), ("data",))):
    ...     lowered = stagec.jit(doubled, frontend="arrays").lower(np.ones(8))
    >>> lowered.nr_devices
    2
    """
    with meshes.use(axes_of_mesh(mesh)):
        yield


def axes_of_mesh(mesh: Any) -> Axes:
    """Return a mesh of stagec's or JAX's as names and sizes of its axes."""
    return tuple((str(name), int(size)) for name, size in mesh.shape.items())


def partition_of(spec: Any) -> Partition:
    """Return a partition spec, stagec's or JAX's, as data. Raises TypeError for another object."""
    result = getattr(spec, "partitions", None)
    if result is None and type(spec).__name__ == "PartitionSpec":
        result = tuple((e,) if isinstance(e, str) else tuple(e or ()) for e in spec)
    if result is None:
        raise TypeError(f"{spec!r} is not a PartitionSpec; write stagec.PartitionSpec('data', None)")
    return tuple(result)


def over(sharding: Any) -> tuple[Axes, Partition]:
    """Return the mesh and the partition of a NamedSharding, or of a PartitionSpec over the current mesh.

    Raises ValueError without a mesh, TypeError for another object.
    """
    if hasattr(sharding, "mesh") and hasattr(sharding, "spec"):
        return axes_of_mesh(sharding.mesh), partition_of(sharding.spec)
    partition = partition_of(sharding)
    if not meshes.current():
        raise ValueError(f"{sharding} has no mesh: write NamedSharding(mesh, spec), or `with set_mesh(mesh)`")
    return meshes.current(), partition


def is_sharding(value: Any) -> bool:
    """Whether a node of a tree says how arrays are split, or that nobody does: None."""
    return value is None or hasattr(value, "spec") or type(value).__name__ == "PartitionSpec"


def with_sharding_constraint(x: Any, shardings: Any) -> Any:
    """Return a tree of arrays that are split like this, inside a function that runs on several devices.

    shardings: one of these for all, or a tree of them, a prefix of the arrays'; None leaves an array to XLA. As
    `jax.lax.with_sharding_constraint`. Outside a trace there is one device, and it changes nothing.
    Raises ValueError if a spec does not fit, or has no mesh.
    """
    leaves, structure = pytrees.flatten(x)
    result = []
    for leaf, spec in zip(leaves, pytrees.spread(shardings, structure, is_sharding), strict=True):
        result.append(leaf if spec is None else sharding.constrained(array_of(leaf), *over(spec)))
    return structure.unflatten(result)


def shard_map(
    f: Callable[..., Any] | None = None,
    /,
    *,
    out_specs: Any,
    in_specs: Any,
    mesh: Any = None,
    axis_names: Collection[str] = (),
    check_vma: bool = True,
) -> Any:
    """Return a function of whole arrays that calls `f` on each device's part of them. Without `f`, return a decorator.

    As `jax.shard_map` (https://docs.jax.dev/en/latest/_autosummary/jax.shard_map.html).

    in_specs: a tree of `PartitionSpec`, or a prefix of one: how each positional argument is split.
    out_specs: the same for the results. Along axes that a spec does not name, all devices must have the same values.
    mesh: None means the current one, which the manifest or `set_mesh` sets.
    axis_names: the axes along which arrays are split, and which collectives may name. Empty means all axes.
    check_vma: whether JAX checks which values are the same on all devices. stagec does not check that.

    The function raises ValueError if arrays, specs and mesh do not fit.

    >>> import stagec_arrays.numpy as np
    >>> from stagec_arrays import lax
    >>> total = stagec_arrays.shard_map(
    ...     lambda x: lax.psum(np.sum(x), "data"),
    ...     mesh=stagec.Mesh((2,), ("data",)),
    ...     in_specs=stagec.PartitionSpec("data"),
    ...     out_specs=stagec.PartitionSpec(),
    ... )
    >>> x = stagec_arrays.ShapeDtypeStruct((8,), "float32")
    >>> stagec.jit(total, frontend="arrays").lower(x).nr_devices
    2
    """
    if f is None:
        options = {"mesh": mesh, "axis_names": axis_names, "check_vma": check_vma}
        return functools.partial(shard_map, in_specs=in_specs, out_specs=out_specs, **options)
    function = f

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        axes = axes_of_mesh(mesh) if mesh is not None else meshes.current()
        if not axes:
            raise ValueError("shard_map has no mesh: give it one, or call it in `with set_mesh(mesh)`")
        manual = tuple(name for name, _ in axes if not axis_names or name in axis_names)
        leaves, structure = pytrees.flatten(args)
        flat = Flat(function, structure)

        def specs(tree: Any, of: Any) -> list[Partition]:
            return [partition_of(spec) for spec in pytrees.spread(tree, of, is_sharding)]

        wanted = specs(in_specs if not isinstance(in_specs, list) else tuple(in_specs), structure)
        if tracing.current() is None:
            what = "shard_map runs on the devices of a mesh: call it in a function of stagec.jit(frontend='arrays')"
            raise ValueError(what)
        values = [array_of(leaf) for leaf in leaves]
        return flat.unflatten(sharding.mapped(flat, values, axes, wanted, lambda: specs(out_specs, flat.out), manual))

    return call


def _names(axis_name: str | Iterable[str]) -> tuple[tuple[str, ...], Axes]:
    """Return the axes that an argument names, and the mesh. Raises NameError outside a `shard_map` along them."""
    names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    return names, meshes.manual(names)


def _over_leaves(operation: Callable[[Any], Any], tree: Any) -> Any:
    return pytrees.tree_map(lambda leaf: operation(array_of(leaf)), tree)


def _reduction(name: str, operation: Callable[[Any, tuple[str, ...], Axes], Any], what: str) -> Callable[..., Any]:
    def function(x: Any, axis_name: str | Iterable[str]) -> Any:
        axes = _names(axis_name)
        return _over_leaves(lambda leaf: operation(leaf, *axes), x)

    doc = f"Return {what} of a tree of arrays over the devices along axes, in a `shard_map`. As `jax.lax.{name}`."
    return named(function, name, doc)


psum = _reduction("psum", collectives.psum, "the sum")
pmax = _reduction("pmax", collectives.pmax, "the largest elements")
pmin = _reduction("pmin", collectives.pmin, "the smallest elements")


def pmean(x: Any, axis_name: str | Iterable[str]) -> Any:
    """Return the mean of a tree of arrays over the devices along axes, in a `shard_map`. As `jax.lax.pmean`."""
    names, mesh = _names(axis_name)
    count = meshes.size(mesh, names)
    return _over_leaves(lambda leaf: elementwise.divide(collectives.psum(inexact(leaf), names, mesh), count), x)


def all_gather(x: Any, axis_name: str | Iterable[str], *, axis: int = 0, tiled: bool = False) -> Any:
    """Return the values of all devices along axes, in a `shard_map`: along a new axis, or one after another if `tiled`.

    As `jax.lax.all_gather`.
    """
    axes = _names(axis_name)

    def gathered(leaf: Any) -> Any:
        at = axis_of(axis, len(leaf.shape) + (not tiled))
        wide = leaf if tiled else structural.reshape(leaf, (*leaf.shape[:at], 1, *leaf.shape[at:]))
        return collectives.all_gather(wide, *axes, at)

    return _over_leaves(gathered, x)


def psum_scatter(x: Any, axis_name: str | Iterable[str], *, scatter_dimension: int = 0, tiled: bool = False) -> Any:
    """Return this device's part, along a dimension, of the sum over the devices along axes, in a `shard_map`.

    As `jax.lax.psum_scatter`. tiled: whether the dimension stays; without, there must be one index for each device.
    """
    axes = _names(axis_name)

    def scattered(leaf: Any) -> Any:
        at = axis_of(scatter_dimension, len(leaf.shape))
        result = collectives.psum_scatter(leaf, *axes, at)
        return result if tiled else structural.reshape(result, (*result.shape[:at], *result.shape[at + 1 :]))

    return _over_leaves(scattered, x)


def ppermute(x: Any, axis_name: str | Iterable[str], perm: Sequence[tuple[int, int]]) -> Any:
    """Return what another device along axes has, in a `shard_map`. perm: (source, target). As `jax.lax.ppermute`."""
    axes = _names(axis_name)
    sends = [(int(source), int(target)) for source, target in perm]
    return _over_leaves(lambda leaf: collectives.ppermute(leaf, *axes, sends), x)


def all_to_all(
    x: Any, axis_name: str | Iterable[str], split_axis: int, concat_axis: int, *, tiled: bool = False
) -> Any:
    """Return the parts that the devices along axes have for this one, in a `shard_map`. As `jax.lax.all_to_all`.

    tiled: whether the axes stay; without, `split_axis` has one index for each device, and goes to `concat_axis`.
    """
    names, mesh = _names(axis_name)

    def exchanged(leaf: Any) -> Any:
        rank = len(leaf.shape)
        split, concat = axis_of(split_axis, rank, "split_axis"), axis_of(concat_axis, rank, "concat_axis")
        if tiled or split == concat:
            return collectives.all_to_all(leaf, names, mesh, split, concat)
        if leaf.shape[split] != meshes.size(mesh, names):
            raise ValueError(
                f"all_to_all: axis {split} has {leaf.shape[split]} indices for {meshes.size(mesh, names)} devices"
            )
        at = concat + 1 if split < concat else concat
        wide = structural.reshape(leaf, (*leaf.shape[:at], 1, *leaf.shape[at:]))
        split += at <= split
        result = collectives.all_to_all(wide, names, mesh, split, at)
        return structural.reshape(result, (*result.shape[:split], *result.shape[split + 1 :]))

    return _over_leaves(exchanged, x)


def axis_index(axis_name: str | Iterable[str]) -> Any:
    """Return the number of this device along axes, in a `shard_map`: an i32. As `jax.lax.axis_index`."""
    return collectives.axis_index(*_names(axis_name))


def axis_size(axis_name: str | Iterable[str]) -> int:
    """Return how many devices there are along axes, in a `shard_map`. As `jax.lax.axis_size`."""
    names, mesh = _names(axis_name)
    return meshes.size(mesh, names)
