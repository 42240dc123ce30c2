"""How the arguments and results of a function of arrays are split over devices, by `jit` and manifests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from stagec.core.builds.specs import FunctionSpec
from stagec.core.sizes.partitions import Partition
from stagec.core.trees.tree import Tree
from stagec.frontends.common import entries
from stagec.stages.shardings import Mesh, NamedSharding, PartitionSpec
from stagec_arrays import meshes, pytrees
from stagec_arrays.meshes import Axes
from stagec_arrays.modules import Split
from stagec_arrays.namespace import parallel
from stagec_arrays.program import Program
from stagec_arrays.values import ShapedArray


def split_of(program: Program, in_shardings: Any, out_shardings: Any, args: Any, out_structure: Any) -> Split:
    """Return how a program is split: by trees of shardings, prefixes of the arguments and the result, and by itself.

    args: structure of the positional arguments, which come first among the program's inputs.
    Raises ValueError if a sharding does not fit, or there are two meshes.
    """
    given = [*_flat(_of_arguments(in_shardings), args)]
    given += [None] * (len(program.inputs) - len(given))
    wanted = _flat(out_shardings, out_structure)
    both = [sharding for sharding in (*given, *wanted) if sharding is not None]
    mesh = meshes.the_one({meshes.of_program(program), *(axes for axes, _ in both)}) or meshes.current()

    def fitting(shardings: Sequence[tuple[Axes, Partition] | None], avals: Sequence[ShapedArray]) -> Any:
        for known, aval in zip(shardings, avals, strict=True):
            if known is not None:
                meshes.part(aval.shape, *known)
        return tuple(None if known is None else known[1] for known in shardings)

    return Split(mesh, fitting(given, program.in_avals), fitting(wanted, program.out_avals)) if mesh else Split()


def _of_arguments(in_shardings: Any) -> Any:
    single = parallel.is_sharding(in_shardings) or isinstance(in_shardings, dict)
    return in_shardings if single else tuple(in_shardings)


def constrained(function: Callable[..., Any], in_shardings: Any, out_shardings: Any) -> Callable[..., Any]:
    """Return a function of positional arguments whose arguments and result are split like this, inside a trace.

    As JAX lowers a `jax.jit` inside another one: by `with_sharding_constraint`.
    """

    def call(*args: Any) -> Any:
        given = parallel.with_sharding_constraint(args, _of_arguments(in_shardings))
        return parallel.with_sharding_constraint(function(*given), out_shardings)

    return call


def _flat(shardings: Any, structure: Any) -> list[tuple[Axes, Partition] | None]:
    leaves = pytrees.spread(shardings, structure, parallel.is_sharding)
    return [None if leaf is None else parallel.over(leaf) for leaf in leaves]


def named(mesh: Axes, split: Sequence[Partition | None], count: int) -> tuple[NamedSharding | None, ...]:
    """Return partitions over a mesh as artifacts have them. count: of arrays; `split` may be (), for None of each."""
    whole = Mesh(tuple(size for _, size in mesh), tuple(name for name, _ in mesh))
    parts = split or [None] * count
    return tuple(None if part is None else NamedSharding(whole, PartitionSpec(*part)) for part in parts)


def of_manifest(spec: FunctionSpec, key: str, structure: Any) -> Any:
    """Return a tree of shardings for a structure, from the manifest's value of a key such as "in_shardings".

    Raises StagecError if they do not fit (`entries.partitions_of`).
    """
    prefix = getattr(spec, key)
    if prefix is None:
        return None
    mesh = tuple((name, size) for name, size in spec.mesh)
    tree = pytrees.to_tree(structure)
    leaves = entries.partitions_of(spec, key, prefix, tree, _below, lambda node: node.num_leaves)
    return structure.unflatten(named(mesh, leaves, len(leaves)))


def _below(node: Tree) -> list[tuple[str, Tree]] | None:
    return None if node.kind == "leaf" else list(zip(_names(node), node.children, strict=True))


def _names(node: Tree) -> list[str]:
    """Return the names of a node's children, as a manifest writes them."""
    if node.kind == "dict":
        return list(map(str, node.keys))
    return list(node.fields.names) if node.fields else list(map(str, range(len(node.children))))
