"""The standard's products of vectors and matrices, and diagonals.

https://data-apis.org/array-api/2024.12/API_specification/linear_algebra_functions.html
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stagec_arrays import dtypes
from stagec_arrays.namespace import elementwise, statistical
from stagec_arrays.namespace.promotion import array_of, promoted
from stagec_arrays.primitives import elementwise as p, matrices
from stagec_arrays.primitives.contractions import dot_general
from stagec_arrays.primitives.slicing import along, concatenate
from stagec_arrays.primitives.structural import broadcast, full, reshape, transpose
from stagec_arrays.values import axis_of, broadcast_shapes, gives_views, shown


@gives_views
def matrix_transpose(x: Any, /) -> Any:
    """Return matrices with rows and columns exchanged: the last two axes."""
    x = array_of(x, "matrix_transpose")
    rank = len(x.shape)
    if rank < 2:
        raise ValueError(f"matrix_transpose: expected an array of 2 dimensions or more, not of {rank}")
    return transpose(x, (*range(rank - 2), rank - 1, rank - 2))


def matmul(x1: Any, x2: Any, /) -> Any:
    """Return the product of matrices: the last two axes; the others broadcast. A vector is a row or column."""
    first, second = promoted(x1, x2, function="matmul")
    if not first.shape or not second.shape:
        raise ValueError("matmul: expected arrays of 1 dimension or more; write multiply for numbers")
    row, column = len(first.shape) == 1, len(second.shape) == 1
    a = reshape(first, (1, *first.shape)) if row else first
    b = reshape(second, (*second.shape, 1)) if column else second
    if a.shape[-1] != b.shape[-2]:
        shapes = f"{shown(first.shape)} and {shown(second.shape)}"
        raise ValueError(f"matmul: shapes {shapes} do not fit: the last size of one is that of the other's rows")
    if len(b.shape) == 2:  # of a matrix that all share, without copies of it
        result = dot_general(a, b, ([len(a.shape) - 1], [0]))
    else:
        batch = broadcast_shapes(a.shape[:-2], b.shape[:-2])
        a, b = broadcast(a, (*batch, *a.shape[-2:])), broadcast(b, (*batch, *b.shape[-2:]))
        axes = range(len(batch))
        result = dot_general(a, b, ([len(batch) + 1], [len(batch)]), (axes, axes))
    shape = [*result.shape[:-2], *([] if row else [result.shape[-2]]), *([] if column else [result.shape[-1]])]
    return reshape(result, shape)


def tensordot(x1: Any, x2: Any, /, *, axes: int | tuple[Sequence[int], Sequence[int]] = 2) -> Any:
    """Return the sum of products over axes: the last and first ones as many as `axes` says, or those that it names."""
    first, second = promoted(x1, x2, function="tensordot")
    ranks = len(first.shape), len(second.shape)
    if isinstance(axes, int):
        if axes > min(ranks):
            raise ValueError(f"tensordot: expected {axes} axes of arrays of {ranks[0]} and {ranks[1]} dimensions")
        axes = (range(ranks[0] - axes, ranks[0]), range(axes))
    of_first = [axis_of(axis, ranks[0]) for axis in axes[0]]
    of_second = [axis_of(axis, ranks[1]) for axis in axes[1]]
    return dot_general(first, second, (of_first, of_second))


def vecdot(x1: Any, x2: Any, /, *, axis: int = -1) -> Any:
    """Return the dot product of vectors along an axis; x1 is conjugated, the other axes broadcast."""
    first, second = promoted(x1, x2, function="vecdot")
    shape = broadcast_shapes(first.shape, second.shape)
    smallest = min(len(first.shape), len(second.shape))
    axis_of(axis, smallest)
    if first.shape[axis] != second.shape[axis]:
        shapes = f"{shown(first.shape)} and {shown(second.shape)}"
        raise ValueError(f"vecdot: shapes {shapes} do not fit: axis {axis} must have the same size")
    where = axis_of(axis, len(shape))
    a, b = broadcast(elementwise.conj(first), shape), broadcast(second, shape)
    others = [i for i in range(len(shape)) if i != where]
    return dot_general(a, b, ([where], [where]), (others, others))


def matrices_of(x: Any, name: str) -> Any:
    """Return an operand that has two axes or more. Raises ValueError."""
    x = array_of(x, name)
    if len(x.shape) < 2:
        raise ValueError(f"{name}: expected an array of 2 dimensions or more, not of shape {shown(x.shape)}")
    return x


@gives_views
def diagonal(x: Any, /, *, offset: int = 0) -> Any:
    """Return diagonals of matrices. offset: which, from the main one to the right, or to the left where negative."""
    x = matrices_of(x, "diagonal")
    m, n = x.shape[-2:]
    if offset == 0 and m == n:
        return matrices.diagonal(x)
    row, column = max(-offset, 0), max(offset, 0)
    size = max(min(m - row, n - column), 0)
    if size == 0:
        return full((*x.shape[:-2], 0), 0, x.dtype)
    return matrices.diagonal(matrices.part(x, size, size, row, column))


def trace(x: Any, /, *, offset: int = 0, dtype: Any = None) -> Any:
    """Return the sum of diagonals of matrices, as `sum` does."""
    return statistical.sum(diagonal(x, offset=offset), axis=-1, dtype=dtype)


def outer(x1: Any, x2: Any, /) -> Any:
    """Return the product of each element of one vector with each of another."""
    first, second = promoted(x1, x2, function="outer")
    if len(first.shape) != 1 or len(second.shape) != 1:
        shapes = f"{shown(first.shape)} and {shown(second.shape)}"
        raise ValueError(f"outer: expected arrays of one dimension, not of shapes {shapes}")
    return p.multiply(reshape(first, (*first.shape, 1)), reshape(second, (1, *second.shape)))


def cross(x1: Any, x2: Any, /, *, axis: int = -1) -> Any:
    """Return the cross product of vectors of three elements along an axis, a negative one; the others broadcast."""
    first, second = promoted(x1, x2, function="cross")
    dtypes.require("cross", first.dtype, dtypes.NUMERIC)
    least = min(len(first.shape), len(second.shape))
    if not -least <= axis <= -1:
        raise IndexError(f"cross: axis is {axis}; write one from {-least} to -1")
    if first.shape[axis] != 3 or second.shape[axis] != 3:
        shapes = f"{shown(first.shape)} and {shown(second.shape)}"
        raise ValueError(f"cross: axis {axis} must have size 3 in both arrays, of shapes {shapes}")
    shape = broadcast_shapes(first.shape, second.shape)
    where = axis_of(axis, len(shape))
    a, b = ([along(broadcast(x, shape), where, i, i + 1) for i in range(3)] for x in (first, second))
    pairs = ((1, 2), (2, 0), (0, 1))
    parts = [p.subtract(p.multiply(a[i], b[j]), p.multiply(a[j], b[i])) for i, j in pairs]
    return concatenate(parts, where)
