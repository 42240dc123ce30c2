"""Small functions of matrices, which are the last two axes, for factorizations and their derivatives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from stagec_arrays import dims, dtypes
from stagec_arrays.dtypes import COMPLEX, KINDS, DType
from stagec_arrays.primitives.contractions import dot_general
from stagec_arrays.primitives.elementwise import add, complex_, conj, equal, greater_equal, multiply, real, select
from stagec_arrays.primitives.indexing import GatherDimensionNumbers, gather
from stagec_arrays.primitives.slicing import slice_
from stagec_arrays.primitives.structural import broadcast, convert, iota, reduce_sum, reshape, transpose
from stagec_arrays.values import Literal


def transposed(x: Any) -> Any:
    """Return matrices with rows and columns exchanged."""
    rank = len(x.shape)
    return transpose(x, (*range(rank - 2), rank - 1, rank - 2))


def conjugate(x: Any) -> Any:
    """Return the complex conjugate of numbers that may be real."""
    return conj(x) if KINDS[x.dtype] == COMPLEX else x


def adjoint(x: Any) -> Any:
    """Return matrices with rows and columns exchanged, conjugated."""
    return conjugate(transposed(x))


def symmetrized(x: Any) -> Any:
    """Return the mean of matrices and their adjoints."""
    return multiply(add(x, adjoint(x)), 0.5)


def real_part(x: Any) -> Any:
    """Return the real part of numbers that may be real."""
    return real(x) if KINDS[x.dtype] == COMPLEX else x


def as_dtype(x: Any, dtype: DType) -> Any:
    """Return real numbers as ones of a dtype that may be complex."""
    if KINDS[dtype] != COMPLEX or KINDS[x.dtype] == COMPLEX:
        return convert(x, dtype)
    part = convert(x, dtypes.real_part(dtype))
    return complex_(part, broadcast(Literal(np.zeros((), part.dtype)), part.shape, ()))


def dot(x: Any, y: Any) -> Any:
    """Return the products of matrices of the same batch axes, in the highest precision."""
    axes = range(len(x.shape) - 2)
    return dot_general(x, y, ([len(axes) + 1], [len(axes)]), (axes, axes), "HIGHEST")


def _indices(shape: Sequence[Any]) -> tuple[Any, Any]:
    rank = len(shape)
    return iota(dtypes.int32, shape, rank - 2), iota(dtypes.int32, shape, rank - 1)


def lower_part(x: Any, k: int = 0) -> Any:
    """Return matrices with zeros above diagonal number k, which counts from the main one to the right."""
    rows, columns = _indices(x.shape)
    return select(greater_equal(add(rows, k), columns), x, 0)


def upper_part(x: Any, k: int = 0) -> Any:
    """Return matrices with zeros below diagonal number k."""
    rows, columns = _indices(x.shape)
    return select(greater_equal(add(rows, k - 1), columns), 0, x)


def identity(x: Any) -> Any:
    """Return identity matrices of the shape and dtype of x."""
    return eye(x.shape, x.dtype)


def eye(shape: Sequence[Any], dtype: DType) -> Any:
    """Return arrays of a shape with ones on the diagonals of the last two axes."""
    rows, columns = _indices(shape)
    return convert(equal(rows, columns), dtype)


def diagonal(x: Any) -> Any:
    """Return the diagonals of square matrices."""
    *batch, _, n = x.shape
    if not dims.is_static([n]):
        return reduce_sum(select(equal(*_indices(x.shape)), x, 0), [len(batch)])
    flat = reshape(x, (*batch, n * n))
    start, limit = [0] * len(flat.shape), list(flat.shape)
    return slice_(flat, start, limit, [*[1] * len(batch), n + 1]) if n else reshape(x, (*batch, 0))


def from_diagonal(x: Any) -> Any:
    """Return square matrices with these diagonals."""
    shape = (*x.shape, x.shape[-1])
    return select(equal(*_indices(shape)), broadcast(x, shape, range(len(x.shape))), 0)


def as_rows(x: Any, shape: Sequence[Any]) -> Any:
    """Return matrices of `shape` with x as each row."""
    return broadcast(x, shape, [*range(len(x.shape) - 1), len(x.shape)])


def as_columns(x: Any, shape: Sequence[Any]) -> Any:
    """Return matrices of `shape` with x as each column."""
    return broadcast(x, shape, range(len(x.shape)))


def part(x: Any, rows: Any = None, columns: Any = None, from_row: Any = 0, from_column: Any = 0) -> Any:
    """Return the elements of some rows and columns, from the first ones on; None is all to the end."""
    batch, (m, n) = x.shape[:-2], x.shape[-2:]
    start = [*[0] * len(batch), from_row, from_column]
    limit = [*batch, m if rows is None else from_row + rows, n if columns is None else from_column + columns]
    return slice_(x, start, limit)


def permuted(x: Any, permutation: Any) -> Any:
    """Return matrices with row `permutation[i]` of each as its i-th."""
    if 0 in x.shape:
        return x
    batch = tuple(range(len(permutation.shape) - 1))
    count = len(batch)
    indices = reshape(permutation, (*permutation.shape, 1))
    numbers = GatherDimensionNumbers((count + 1,), (count,), (count,), batch, batch)
    return gather(x, indices, numbers, (*[1] * count, 1, x.shape[-1]))
