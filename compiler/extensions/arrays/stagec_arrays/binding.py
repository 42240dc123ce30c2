"""Binding: an operation on values is recorded in the current trace, or run at once outside a trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from stagec_arrays import dtypes, execution, tracing
from stagec_arrays.program import Primitive
from stagec_arrays.values import Literal, ShapedArray, physical


def bind(primitive: Primitive, *values: Any, **params: Any) -> Any:
    """Apply a primitive to arrays, and return the result, or a list of results if it has `several`.

    values: arrays of a trace or with elements, NumPy's, and `Literal`s. params: hashable. Raises what the primitive's
    rule of shapes raises, and TypeError for PRNG keys that it does not take.
    """
    trace = tracing.current()
    known = values if trace is None else [*map(aval, values)]
    if primitive.of_keys is not True:
        for operand in known:
            if operand.dtype is dtypes.KEY:
                return _of_keys(primitive, values, params)
    if trace is None:
        results: Sequence[Any] = execution.run(primitive, values, params)
    else:
        results = trace.record(primitive, values, params, primitive.results(known, params))
    return results if primitive.several else results[0]


def _of_keys(primitive: Primitive, values: Sequence[Any], params: Mapping[str, Any]) -> Any:
    """Apply a primitive to the words of keys, and return keys."""
    if not callable(primitive.of_keys):
        raise TypeError(
            f"{primitive.name}: PRNG keys are not numbers; stagec_arrays.random takes them, and key_data(key)"
        )
    operands, inner = primitive.of_keys(*values, **params)
    return wrap(bind(primitive, *map(unwrap, operands), **inner))


def wrap(words: Any) -> Any:
    """Return u32 as PRNG keys: the last dimension, of size 2, has the words of each."""
    if isinstance(words, execution.Array) and tracing.current() is None:
        _wrap_infer(aval(words))
        return words.as_keys()
    return bind(WRAP, words)


def unwrap(keys: Any) -> Any:
    """Return the words of PRNG keys, in a last dimension; another array unchanged."""
    if keys.dtype is not dtypes.KEY:
        return keys
    return keys.words() if isinstance(keys, execution.Array) and tracing.current() is None else bind(UNWRAP, keys)


def _wrap_infer(words: ShapedArray) -> ShapedArray:
    if words.dtype != dtypes.uint32 or words.shape[-1:] != (2,):
        raise TypeError(f"the words of a key are uint32 in a last dimension of size 2, not {words}")
    return ShapedArray(words.shape[:-1], dtypes.KEY)


WRAP = Primitive("random_wrap", _wrap_infer, lambda rule, words: words)
UNWRAP = Primitive("random_unwrap", physical, lambda rule, keys: keys, of_keys=True)


_OF_PROGRAMS = tracing.Tracer, Literal


def aval(value: Any) -> ShapedArray:
    """Return the abstract value of an array: everything but its elements."""
    if isinstance(value, _OF_PROGRAMS):
        return value.aval
    return ShapedArray(tuple(value.shape), value.dtype)


def constant(array: np.ndarray[Any, Any], dtype: Any = None) -> Any:
    """Return NumPy's array as a value: a constant of the current trace, or an array on the device.

    dtype: `dtypes.KEY` if it has the words of keys.
    """
    trace = tracing.current()
    result = execution.array(array) if trace is None else trace.constant(array)
    return wrap(result) if dtype is dtypes.KEY else result


def known(value: Any) -> np.ndarray[Any, Any] | None:
    """Return the elements of an array: of one of a trace if it is a constant there; None if they are not known."""
    if not isinstance(value, tracing.Tracer):
        return np.asarray(value.value if isinstance(value, Literal) else value)
    return value.known()
