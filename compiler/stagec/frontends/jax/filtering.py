"""Fields of objects that are not arrays, in functions as Equinox has them: they are static.

`jax.jit` takes only arrays, and traces Python's numbers as arrays; stagec does the same anywhere in a tree. Equinox's
modules are pytrees whose leaves may be anything, such as an activation function or the name of an axis, and
`eqx.filter_jit` makes everything but arrays static
(https://docs.kidger.site/equinox/api/transformations/#equinox.filter_jit). Here such a leaf becomes a node without
children, with the value as its static part. This holds for a number below a module of Equinox, and in any object for a
value that is not a number. In tuples, lists and dicts that are in no object, it stays a mistake.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from stagec.core.trees.one_level import OneLevel, StaticLeaf
from stagec.pjrt.calling_convention import NUMBERS

jax.tree_util.register_pytree_node(StaticLeaf, lambda leaf: ((), leaf.value), lambda value, _: StaticLeaf(value))


def filtered(function: Callable[..., Any], arguments: Any, called: Callable[..., Any]) -> Callable[..., Any]:
    """Return `called` for arguments that `closed` has made; its results are closed in the same way.

    called: the function to call instead of the user's.

    A function that has nothing to do with that is returned as it is.
    """
    static = any(map(_is_static, jax.tree.leaves(arguments, is_leaf=_is_static)))
    if not static and type(function).__module__.partition(".")[0] != "equinox":
        return called

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        given, named = opened((args, kwargs))
        return closed(called(*given, **named))

    return run


def closed(tree: Any, in_object: bool = False, in_module: bool = False) -> Any:
    """Return `tree` with a `StaticLeaf` instead of each leaf that is static.

    in_object: whether `tree` is in an object. in_module: whether it is below a module of Equinox's.
    """
    level = OneLevel.flatten(tree)
    if level is None:
        is_array = hasattr(tree, "shape") and hasattr(tree, "dtype")
        # `jax.jit` traces numbers wherever they are, and `equinox.filter_jit` keeps them as they are.
        static = not is_array and (in_module if isinstance(tree, NUMBERS) else in_object)
        return StaticLeaf(tree) if static else tree
    in_object = in_object or not issubclass(level.kind, tuple | list | dict)
    in_module = in_module or any(base.__module__.partition(".")[0] == "equinox" for base in level.kind.__mro__)
    children = [closed(child, in_object, in_module) for child in level.children]
    same = all(new is old for new, old in zip(children, level.children, strict=True))
    return tree if same else level.make(children)


def opened(tree: Any) -> Any:
    """Return `tree` as it was before `closed`."""
    return jax.tree.map(lambda leaf: leaf.value if _is_static(leaf) else leaf, tree, is_leaf=_is_static)


def _is_static(value: Any) -> bool:
    return isinstance(value, StaticLeaf)
