"""Fields of objects that are no arrays, in functions as Equinox has them: they are static.

`jax.jit` takes arrays alone. Equinox's modules are pytrees whose leaves may be anything, such as an activation function
or the name of an axis, and `eqx.filter_jit` makes what is no array static
(https://docs.kidger.site/equinox/api/transformations/#equinox.filter_jit). Here such a leaf becomes a node without
children, with the value as its static part. In tuples, lists and dicts that are in no object it stays a mistake.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from stagec.core.one_level import OneLevel, StaticLeaf

_NUMBERS = (bool, int, float, complex)


jax.tree_util.register_pytree_node(StaticLeaf, lambda leaf: ((), leaf.value), lambda value, _: StaticLeaf(value))


def filtered(function: Callable[..., Any], arguments: Any) -> Callable[..., Any]:
    """Return the function for arguments that `closed` has made; what its results have that is no array is static too.

    A number that is a field of a result is static where the arguments have static fields, as in `eqx.filter_jit`, and
    an array elsewhere, as in `jax.jit`. A function that has nothing to do with that is returned as it is.
    """
    numbers = any(map(_is_static, jax.tree.leaves(arguments, is_leaf=_is_static)))
    if not numbers and type(function).__module__.partition(".")[0] != "equinox":
        return function

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        given, named = _opened((args, kwargs))
        return closed(function(*given, **named), numbers)

    return run


def closed(tree: Any, numbers: bool = True, within: bool = False) -> Any:
    """Return `tree` with `StaticLeaf` in the place of each leaf that is a field of an object and no array.

    numbers: whether Python's numbers are such leaves. within: whether `tree` is in an object.
    """
    level = OneLevel.of(tree)
    if level is None:
        is_array = hasattr(tree, "shape") and hasattr(tree, "dtype")
        return tree if is_array or not within or (isinstance(tree, _NUMBERS) and not numbers) else StaticLeaf(tree)
    plain = issubclass(level.kind, tuple | list | dict)
    children = [closed(child, numbers, within or not plain) for child in level.children]
    same = all(new is old for new, old in zip(children, level.children, strict=True))
    return tree if same else level.make(children)


def _opened(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.value if _is_static(leaf) else leaf, tree, is_leaf=_is_static)


def _is_static(value: Any) -> bool:
    return isinstance(value, StaticLeaf)
