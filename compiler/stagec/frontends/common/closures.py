"""The arrays that a Python function reaches by a name: those that it closed over, and its module's."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from jaxlib import _jax

from stagec.core.builds.specs import FunctionSpec
from stagec.frontends.common import user_code
from stagec.frontends.common.frontend import NamedArray
from stagec.pjrt.arrays import DeviceArray

_ARRAYS = (np.ndarray, _jax.ArrayImpl, DeviceArray)
"""NumPy's, JAX's and stagec's."""


def named_arrays(spec: FunctionSpec, least: int) -> Iterator[NamedArray]:
    """Yield each array that a function, or one that it calls, reaches by a name: the name, it, the function's location.

    least: bytes of the smallest. The location is FILE:LINE; functions of installed packages are left out.
    """
    for name, leaf, where in reached(user_code.load_entry(spec.entry, spec.manifest, f"{spec.key}.entry")):
        if isinstance(leaf, _ARRAYS) and math.prod(leaf.shape) * leaf.dtype.itemsize >= least:
            yield name, leaf, where


def reached(
    function: Any, given: Mapping[str, Any] | None = None, seen: set[int] | None = None
) -> Iterator[NamedArray]:
    """Yield each leaf that a function reaches by a name, as `named_arrays`: also of fields of the user's objects.

    given: more values that it reaches, by name. seen: ids of code and objects that were passed.
    """
    seen = set() if seen is None else seen
    while isinstance(function, functools.partial) or hasattr(function, "__wrapped__"):
        function = function.func if isinstance(function, functools.partial) else function.__wrapped__
    values = dict(given or {})
    if isinstance(function, types.MethodType):
        values["self"], function = function.__self__, function.__func__
    elif not hasattr(function, "__code__") and hasattr(type(function).__call__, "__code__"):
        values["self"], function = function, type(function).__call__
    code = getattr(function, "__code__", None)
    if code is None or id(code) in seen:
        return
    seen.add(id(code))
    where = user_code.location([(code.co_filename, code.co_firstlineno)])
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # it is empty yet
            values[name] = cell.cell_contents
    # A function of an installed package may have closed over one of the user's, such as `haiku.transform`'s.
    names = set(_names(code)) if where else set()
    values |= {name: function.__globals__[name] for name in sorted(names & function.__globals__.keys())}
    for name, value in list(values.items()):
        if isinstance(value, types.ModuleType):
            values |= {f"{name}.{key}": getattr(value, key, None) for key in sorted(names)}
    for name, value in values.items():
        if callable(value) and not isinstance(value, type):
            yield from reached(value, seen=seen)
        for path, leaf in _leaves(value, seen):
            if leaf is not value and isinstance(leaf, types.FunctionType):
                yield from reached(leaf, seen=seen)
            if where:
                yield name + path, leaf, where


def leaves(tree: Any) -> list[tuple[str, Any]]:
    """Return paths and leaves; none if the tree cannot be taken apart any more: using that state is an error.

    A class of the user's may give two children one path.
    """
    try:
        leaves, _ = _jax.pytree.default_registry().flatten_with_path(tree)
    except Exception:  # noqa: BLE001 - a class of the user's raises anything
        return []
    return [("".join(map(str, path)), leaf) for path, leaf in leaves]


def _leaves(value: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a pytree with their paths, and those of the fields of the user's own objects in it."""
    for path, leaf in leaves(value):
        yield path, leaf
        fields = getattr(leaf, "__dict__", None)
        if not isinstance(fields, dict) or isinstance(leaf, type | types.ModuleType | types.FunctionType):
            continue
        module = sys.modules.get(type(leaf).__module__)
        if id(leaf) in seen or not user_code.is_users(getattr(module, "__file__", None) or "<"):
            continue
        seen.add(id(leaf))
        for name, field in list(fields.items()):
            for below, inner in _leaves(field, seen):
                yield f"{path}.{name}{below}", inner


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield the global names and attributes that the code, and functions inside it, may use."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
