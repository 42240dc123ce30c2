"""Large constants of a module: arrays that a function closed over, and that would better be arguments."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxlib.mlir import ir

from stagec.core.avals import DTYPES, Aval, num_bytes
from stagec.core.errors import Problem
from stagec.core.specs import FunctionSpec
from stagec.frontends import stablehlo, user_code
from stagec.stages import mlir
from stagec.stages.exported import Exported

LARGE = 2**20
"""Bytes from which on a constant is told: it is in each executable of the function, and compiled with it."""


def find(spec: FunctionSpec, serialized: bytes) -> list[dict[str, Any]]:
    """Return the large constants of a portable artifact, those first that come first in it.

    Each is a table: "name" of the variable that the function closed over, and "where", FILE:LINE of the code that uses
    it, "" where they are not found; "aval"; "bytes". Arrays of one repeated value take no space and are not told.
    """
    if len(serialized) < LARGE:
        return []
    with mlir.make_context() as context:
        module = mlir.read_artifact(context, Exported.deserialize(serialized).mlir_module_serialized)
        operations: list[ir.Operation] = []

        def visit(operation: ir.Operation) -> ir.WalkResult:
            if operation.name == "stablehlo.constant":
                operations.append(operation)
            return ir.WalkResult.ADVANCE

        module.operation.walk(visit)
        found = []
        for operation in operations:
            aval = stablehlo.aval(ir.RankedTensorType(operation.results[0].type))
            if aval is None or num_bytes(aval) < LARGE or _is_splat(operation):
                continue
            name, where = _origin(spec, aval, operation)
            found.append({"name": name, "where": where, "aval": str(aval), "bytes": num_bytes(aval)})
        return found


def _is_splat(operation: ir.Operation) -> bool:
    """Whether a large constant is one repeated value: only others are left out of text."""
    return "__elided__" not in str(operation.get_asm(large_elements_limit=1))


def advice(spec: FunctionSpec, found: Sequence[Mapping[str, Any]]) -> list[Problem]:
    """Return what to say of each of what `find` returned. It is no mistake."""
    problems: list[Problem] = []
    for one in found:
        origin = " of ".join(filter(None, (one["name"], one["where"]))) or "an array"
        what = f"warning: {origin} ({one['aval']}, {one['bytes']:,} bytes) is a constant of every executable"
        write = 'pass it as an argument, and bind that: bind = { NAME = "weights.safetensors" }'
        problems += spec.problem("", what, write).problems
    return problems


def _origin(spec: FunctionSpec, aval: Aval, operation: Any) -> tuple[str, str]:
    """Return the name of the variable with this value, and the place of the function that uses it."""
    if spec.is_module:
        return "", ""
    function = user_code.load_entry(spec.entry, spec.manifest, f"{spec.key}.entry")
    try:
        content = memoryview(operation.attributes["value"]).tobytes()
    except (ValueError, TypeError, BufferError):  # a dtype of which jaxlib does not give the values
        content = None
    for name, array, where in _arrays(function, set()):
        if tuple(array.shape) != aval.shape or str(array.dtype) != DTYPES[aval.dtype].numpy_name:
            continue
        if content is None or np.asarray(array).tobytes() == content:
            return name, where
    return "", ""


def _arrays(function: Any, seen: set[int]) -> Iterator[tuple[str, Any, str]]:
    """Yield each array that a function, or one that it calls, reaches by a name: the name, it, the function's place."""
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
            yield from _arrays(value, seen)
        for path, leaf in jax.tree_util.tree_leaves_with_path(value):
            if isinstance(leaf, np.ndarray | jax.Array) and leaf.nbytes >= LARGE:
                yield name + jax.tree_util.keystr(path), leaf, where


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield the global names and attributes that the code, and functions inside of it, may use."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
