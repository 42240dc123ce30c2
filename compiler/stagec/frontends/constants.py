"""Large constants of a module: arrays that a function closed over, and that would better be arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from stagec.core.builds.specs import FunctionSpec
from stagec.core.messages.errors import Problem
from stagec.core.sizes.avals import DTYPES, Aval, num_bytes
from stagec.frontends import stablehlo
from stagec.frontends.common.frontend import NamedArray
from stagec.stages import mlir
from stagec.stages.exported import Exported

LARGE = 2**20
"""The size in bytes for a warning about a constant: each executable of the function contains it."""


def find(serialized: bytes, named: Callable[[int], Iterable[NamedArray]]) -> list[dict[str, Any]]:
    """Return the large constants of an exported artifact, those first that come first in it.

    named: the frontend's `named_arrays` of the function.

    Each is a table: "name", the variable that the function closes over; "where", FILE:LINE of its use; "aval"; "bytes".
    The first two are "" if they are not found. Arrays of one repeated value take no space and are not listed.
    """
    if len(serialized) < LARGE:
        return []
    with mlir.make_context() as context:
        module = mlir.read_artifact(context, Exported.deserialize(serialized).mlir_module_serialized)
        constants = []
        for operation in mlir.operations(module, "stablehlo.constant"):
            aval = stablehlo.aval(ir.RankedTensorType(operation.results[0].type))
            if aval is None or num_bytes(aval) < LARGE or _is_splat(operation):
                continue
            name, where = _origin(aval, operation, named)
            constants.append({"name": name, "where": where, "aval": str(aval), "bytes": num_bytes(aval)})
        return constants


def _is_splat(operation: ir.Operation) -> bool:
    """Whether a large constant is one repeated value: the text form leaves out only other constants."""
    return "__elided__" not in str(operation.get_asm(large_elements_limit=1))


def advice(spec: FunctionSpec, constants: Sequence[Mapping[str, Any]]) -> list[Problem]:
    """Return a warning for each result of `find`. It is not a mistake."""
    problems: list[Problem] = []
    for constant in constants:
        origin = " of ".join(filter(None, (constant["name"], constant["where"]))) or "an array"
        what = f"warning: {origin} ({constant['aval']}, {constant['bytes']:,} bytes) is a constant of every executable"
        write = 'pass it as an argument, and bind that: bind = { NAME = "weights.safetensors" }'
        problems += spec.problem("", what, write).problems
    return problems


def _origin(aval: Aval, operation: Any, named: Callable[[int], Iterable[NamedArray]]) -> tuple[str, str]:
    """Return the name of the variable with this value, and the location of the function that uses it."""
    try:
        content = memoryview(operation.attributes["value"]).tobytes()
    except (ValueError, TypeError, BufferError):  # a dtype of which jaxlib does not give the values
        content = None
    # A module has the constant and no name of it. So look for an array with the same bytes among those that the
    # function reaches: in its closure, and in the globals of its module.
    for name, array, where in named(LARGE):
        if tuple(array.shape) != aval.shape or str(array.dtype) != DTYPES[aval.dtype].numpy_name:
            continue
        if content is None or np.asarray(array).tobytes() == content:
            return name, where
    return "", ""
