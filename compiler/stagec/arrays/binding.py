"""Binding: an operation on values is recorded in the current trace, or run at once where there is none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from stagec.arrays import execution, tracing
from stagec.arrays.program import Primitive
from stagec.arrays.values import Literal, ShapedArray


def bind(primitive: Primitive, *values: Any, **params: Any) -> Any:
    """Apply a primitive to arrays, and return the result, or a list of results where it has `several`.

    values: arrays of a trace or with elements, NumPy's, and `Literal`s. params: hashable. Raises what the primitive's
    rule of shapes raises.
    """
    trace = tracing.current()
    if trace is None:
        results: Sequence[Any] = execution.run(primitive, values, params)
    else:
        avals = [aval(value) for value in values]
        results = trace.record(primitive, values, params, primitive.results(avals, params))
    return results if primitive.several else results[0]


def aval(value: Any) -> ShapedArray:
    """Return what is known of an array without its elements."""
    if isinstance(value, tracing.Tracer | Literal):
        return value.aval
    return ShapedArray(tuple(value.shape), value.dtype)


def constant(array: np.ndarray[Any, Any]) -> Any:
    """Return NumPy's array as one of ours: a constant of the current trace, or an array on the device."""
    trace = tracing.current()
    return execution.array(array) if trace is None else trace.constant(array)


def known(value: Any) -> np.ndarray[Any, Any] | None:
    """Return the elements of an array: of one of a trace if it is a constant there; None where nobody knows them."""
    if not isinstance(value, tracing.Tracer):
        return np.asarray(value.value if isinstance(value, Literal) else value)
    return value.known()
