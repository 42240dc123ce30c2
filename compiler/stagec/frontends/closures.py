"""The arrays that a Python function reaches by a name: those that it closed over, and its module's."""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxlib import _jax

from stagec.core.specs import FunctionSpec
from stagec.frontends import user_code
from stagec.frontends.frontend import NamedArray
from stagec.pjrt.arrays import Array

_ARRAYS = (np.ndarray, _jax.ArrayImpl, Array)
"""NumPy's, JAX's and stagec's."""


def named_arrays(spec: FunctionSpec, least: int) -> Iterator[NamedArray]:
    """Yield each array that a function, or one that it calls, reaches by a name: the name, it, the function's place.

    least: bytes of the smallest. The place is FILE:LINE; functions of installed packages are left out.
    """
    yield from _arrays(user_code.load_entry(spec.entry, spec.manifest, f"{spec.key}.entry"), least, set())


def _arrays(function: Any, least: int, seen: set[int]) -> Iterator[NamedArray]:
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
        leaves, _ = _jax.pytree.default_registry().flatten_with_path(value)
        for path, leaf in leaves:
            if isinstance(leaf, _ARRAYS) and math.prod(leaf.shape) * leaf.dtype.itemsize >= least:
                yield name + "".join(map(str, path)), leaf, where


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield the global names and attributes that the code, and functions inside of it, may use."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
