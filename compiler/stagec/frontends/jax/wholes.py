"""Arguments that can be put together of arrays alone, and of no placeholders.

Distributions of TFP convert their arrays, and those of distrax count them. `jax.jit` puts such an argument together of
traced values. `jax.stages` and `jax.export` do it of placeholders too, to describe the arguments: then the class raises
an error, or loses a child. So JAX gets a node of ours instead, and the function puts the object together in its trace.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

_CONTAINERS = (tuple, list, dict, type(None))


class _Whole:
    """The leaves of an object.

    about: the path of each as JAX writes it, because a module names its arguments so, and the structure: JAX's
        PyTreeDef.
    """

    def __init__(self, leaves: Sequence[Any], about: tuple[tuple[str, ...], Any]) -> None:
        self.leaves = leaves
        self.about = about


jax.tree_util.register_pytree_with_keys(
    _Whole,
    lambda whole: (tuple(zip(whole.about[0], whole.leaves, strict=True)), whole.about),
    lambda about, leaves: _Whole(tuple(leaves), about),
    lambda whole: (whole.leaves, whole.about),
)


def closed(tree: Any) -> Any:
    """Return `tree` with a node of ours for each object that takes no placeholders; `tree` itself without any."""
    structure: Any  # jax.tree has another type for it, without methods
    leaves, structure = jax.tree.flatten(tree)
    if jax.tree_util.treedef_is_leaf(structure) or _takes_placeholders(leaves, structure):
        return tree
    kind, _ = structure.node_data()
    if kind in _CONTAINERS or hasattr(kind, "_fields"):
        below, structure = jax.tree.flatten(tree, is_leaf=lambda other: other is not tree)
        return structure.unflatten(map(closed, below))
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return _Whole(leaves, (tuple(jax.tree_util.keystr(path) for path, _ in paths), structure))


def _takes_placeholders(leaves: list[Any], structure: Any) -> bool:
    """Whether an object can be put together of what JAX describes its arrays by, and still has all of them."""
    try:
        placeholders = [jax.stages.ArgInfo(jax.typeof(leaf), False) for leaf in leaves]
    except (TypeError, ValueError):  # a leaf is not an array: JAX says it in its own words
        return True
    try:
        return len(jax.tree.leaves(jax.tree.unflatten(structure, placeholders))) == len(leaves)
    except Exception:  # noqa: BLE001 - a class of the user's raises anything
        return False


def opened(tree: Any) -> Any:
    """Return `tree` as it was before `closed`."""

    def whole(leaf: Any) -> Any:
        return leaf.about[1].unflatten(leaf.leaves) if _is_whole(leaf) else leaf

    return jax.tree.map(whole, tree, is_leaf=_is_whole)


def opening(function: Callable[..., Any], arguments: Any) -> Callable[..., Any]:
    """Return the function for arguments that `closed` has made; itself if they are as they were."""
    if not any(map(_is_whole, jax.tree.leaves(arguments, is_leaf=_is_whole))):
        return function

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        given, named = opened((args, kwargs))
        return function(*given, **named)

    return run


def original(structure: Any) -> Any:
    """Return the PyTreeDef of what `closed` has made as that of the original."""
    data = structure.node_data()
    if data is None:
        return structure
    kind, auxdata = data
    if kind is _Whole:
        return auxdata[1]
    children, before = list(map(original, structure.children())), structure.children()
    if children == before:
        return structure
    return structure.from_node_data_and_children(jax.tree_util.default_registry, data, children)


def _is_whole(value: Any) -> bool:
    return isinstance(value, _Whole)
