"""The arrays that a Python function reaches by a name: those that it closed over, and its module's."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from stagec.frontends import user_code


def arrays(function: Any, least: int) -> Iterator[tuple[str, Any, str]]:
    """Yield each array that a function, or one that it calls, reaches by a name: the name, it, the function's place.

    least: bytes of the smallest. The place is FILE:LINE; functions of installed packages are left out.
    """
    yield from _arrays(function, least, set())


def _arrays(function: Any, least: int, seen: set[int]) -> Iterator[tuple[str, Any, str]]:
    while isinstance(function, functools.partial) or hasattr(function, "__wrapped__"):
        function = function.func if isinstance(function, functools.partial) else function.__wrapped__
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None or id(code) in seen:
        return
    seen.add(id(code))
    where = user_code.place([(code.co_filename, code.co_firstlineno)])
    if not where:  # of an installed package
        return
    values = {}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        values[name] = getattr(cell, "cell_contents", None)
    names = set(_names(code))
    values |= {name: function.__globals__[name] for name in sorted(names & function.__globals__.keys())}
    for name, value in list(values.items()):
        if isinstance(value, types.ModuleType):
            values |= {f"{name}.{key}": getattr(value, key, None) for key in sorted(names)}
    for name, value in values.items():
        if callable(value) and not isinstance(value, type):
            yield from _arrays(value, least, seen)
        for path, leaf in jax.tree_util.tree_leaves_with_path(value):
            if isinstance(leaf, np.ndarray | jax.Array) and leaf.nbytes >= least:
                yield name + jax.tree_util.keystr(path), leaf, where


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield the global names and attributes that the code, and functions inside of it, may use."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
