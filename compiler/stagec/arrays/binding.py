"""Binding: an operation on values is recorded in the current trace, or run at once where there is none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from stagec.arrays import dims, execution, tracing
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


def is_known(value: Any) -> bool:
    """Whether an array has elements, so that Python can read them."""
    return not isinstance(value, tracing.Tracer)


def constant(array: np.ndarray[Any, Any]) -> Any:
    """Return NumPy's array as one of ours: a constant of the current trace, or an array on the device."""
    if tracing.current() is None:
        return execution.array(array)
    return array


def is_static(value: Any) -> bool:
    """Whether the shape of an array has no symbolic sizes."""
    return dims.is_static(value.shape)
