"""Primitives of square matrices that are made of their LU decomposition, and have derivatives of their own."""

from __future__ import annotations

from typing import Any

import numpy as np

from stagec.arrays import dtypes
from stagec.arrays.binding import bind
from stagec.arrays.dtypes import COMPLEX, KINDS
from stagec.arrays.primitives import matrices
from stagec.arrays.primitives.derivatives import Derivative, linearly
from stagec.arrays.primitives.elementwise import (
    absolute,
    add,
    bitwise_and,
    bitwise_not,
    divide,
    equal,
    greater,
    is_finite,
    log,
    multiply,
    negative,
    not_equal,
    select,
    subtract,
)
from stagec.arrays.primitives.factorizations import lu, lu_solved, triangular_solve
from stagec.arrays.primitives.foreign import require_matrices
from stagec.arrays.primitives.matrices import adjoint, as_dtype, as_rows, diagonal, dot, real_part, transposed
from stagec.arrays.primitives.platforms import composed
from stagec.arrays.primitives.reductions import reduce_or, reduce_prod
from stagec.arrays.primitives.slicing import slice_
from stagec.arrays.primitives.spectra import svd
from stagec.arrays.primitives.structural import broadcast, convert, iota, reduce_sum, reshape
from stagec.arrays.program import Primitive
from stagec.arrays.values import Literal, ShapedArray


def solve(a: Any, b: Any) -> Any:
    """Return x of a x = b, of matrices with the same batch axes. The derivative uses the same decomposition of a."""
    factors, _, permutation = lu(a)
    return bind(LU_SOLVE, a, factors, permutation, b, transpose=False)


def inverse(x: Any) -> Any:
    """Return the inverses of square matrices."""
    return solve(x, matrices.identity(x))


def _lu_solve_vjp(d: Derivative, *, transpose: bool) -> list[Any]:
    a, factors, permutation, _ = d.operands
    (x,) = d.results
    of_b = bind(LU_SOLVE, a, factors, permutation, d.cotangent, transpose=not transpose)
    of_a = negative(dot(x, transposed(of_b)) if transpose else dot(of_b, transposed(x)))
    return [of_a, None, None, of_b]


LU_SOLVE: Primitive = Primitive(  # of a: what the decomposition is of, for the derivative alone
    "lu_solve",
    lambda a, factors, permutation, b, *, transpose: ShapedArray(b.shape, b.dtype),
    composed(lambda a, factors, permutation, b, *, transpose: lu_solved(factors, permutation, b, transpose)),
    _lu_solve_vjp,
)


# Determinants.


def _of_square(name: str) -> Any:
    def infer(x: ShapedArray) -> Any:
        require_matrices(name, x, square=True)
        number = ShapedArray(x.shape[:-2], x.dtype)
        return number if name == "det" else [number, ShapedArray(x.shape[:-2], dtypes.real_part(x.dtype))]

    return infer


def _parity(pivots: Any, dtype: dtypes.DType) -> Any:
    """Return 1 or -1: the determinant of the permutation."""
    axis = len(pivots.shape) - 1
    moved = not_equal(pivots, iota(dtypes.int32, pivots.shape, axis))
    odd = bitwise_and(reduce_sum(convert(moved, dtypes.int32), [axis]), 1)
    return convert(subtract(1, multiply(odd, 2)), dtype)


def _slogdet(x: Any) -> list[Any]:
    factors, pivots, _ = lu(x)
    numbers = diagonal(factors)
    axis = len(numbers.shape) - 1
    size = absolute(numbers)
    length = as_dtype(size, x.dtype)
    direction = divide(numbers, select(equal(length, 0), 1.0, length))
    sign = multiply(reduce_prod(direction, [axis]), as_dtype(_parity(pivots, dtypes.real_part(x.dtype)), x.dtype))
    return [sign, reduce_sum(log(size), [axis])]


def _slogdet_forward(d: Derivative, dx: Any) -> list[Any]:
    trace = reduce_sum(diagonal(solve(d.operands[0], dx)), [len(dx.shape) - 2])
    if KINDS[dx.dtype] != COMPLEX:
        return [None, trace]
    turned = subtract(trace, as_dtype(real_part(trace), trace.dtype))
    return [multiply(turned, d.results[0]), real_part(trace)]


def slogdet(x: Any) -> list[Any]:
    """Return the sign, or direction, and the logarithm of the length of determinants."""
    result: list[Any] = bind(SLOGDET, x)
    return result


SLOGDET = Primitive("slogdet", _of_square("slogdet"), composed(_slogdet), linearly(_slogdet_forward), several=True)


def det(x: Any) -> Any:
    """Return determinants; of small matrices by their polynomial, whose derivative is right where they are singular."""
    n = x.shape[-1]
    if n not in (2, 3) or x.shape[-2] != n:
        return bind(DET, x)
    axis = len(x.shape) - 2

    def at(row: int, column: int) -> Any:
        return reshape(matrices.part(x, 1, 1, row, column), x.shape[:axis])

    def product(way: int, start: int) -> Any:
        result = at(0, start % n)
        for row in range(1, n):
            result = multiply(result, at(row, (start + way * row) % n))
        return result

    if n == 2:
        return subtract(product(1, 0), product(1, 1))
    right, left = (add(add(product(way, 0), product(way, 1)), product(way, 2)) for way in (1, -1))
    return subtract(right, left)


def _det(x: Any) -> Any:
    factors, pivots, _ = lu(x)
    result = reduce_prod(diagonal(factors), [len(x.shape) - 2])
    return multiply(result, as_dtype(_parity(pivots, dtypes.real_part(x.dtype)), x.dtype))


def _det_vjp(d: Derivative) -> list[Any]:
    (x,) = d.operands
    result = transposed(_adjugate(x))
    return [multiply(broadcast(d.cotangent, x.shape, range(len(x.shape) - 2)), result)]


def _adjugate(x: Any) -> Any:
    """Return det(x) inverse(x), also where the last number of U is zero, which then is not divided by.

    Of matrices whose U has another zero it is taken for zero, as in JAX (`jnp.linalg._cofactor_solve`): right for those
    that lack more than one rank.
    """
    n, axis = x.shape[-1], len(x.shape) - 2
    if n in (0, 1):
        return broadcast(Literal(np.ones((), x.dtype)), x.shape, ())
    factors, pivots, permutation = lu(x)
    numbers = diagonal(factors)
    sign = as_dtype(_parity(pivots, dtypes.real_part(x.dtype)), x.dtype)
    before = multiply(reduce_prod(slice_(numbers, [0] * (axis + 1), [*numbers.shape[:-1], n - 1]), [axis]), sign)
    whole = multiply(reduce_prod(numbers, [axis]), sign)
    rows, columns = (iota(dtypes.int32, x.shape, number) for number in (axis, axis + 1))
    corner = bitwise_and(equal(rows, n - 1), equal(columns, n - 1))
    factors = select(corner, broadcast(divide(1.0, before), x.shape, range(axis)), factors)
    ones = broadcast(Literal(np.ones((), x.dtype)), (*x.shape[:-1], 1), ())
    tried = absolute(triangular_solve(factors, ones, left=True, lower=False))
    bad = reduce_or(bitwise_not(is_finite(tried)), [axis, axis + 1])
    bad = broadcast(bad, x.shape, range(axis))
    result = matrices.permuted(select(bad, 0, matrices.identity(x)), permutation)
    result = triangular_solve(factors, result, left=True, lower=True, unit=True)
    scaled = multiply(result, broadcast(whole, x.shape, range(axis)))
    result = triangular_solve(factors, select(equal(rows, n - 1), result, scaled), left=True, lower=False)
    return select(bad, 0, result)


DET = Primitive("det", _of_square("det"), composed(_det), _det_vjp)


# The inverse of matrices that may have none.


def pinv(x: Any, limit: Any) -> Any:
    """Return pseudoinverses: singular values up to `limit` of the largest, one number for each matrix, are zero."""
    return bind(PINV, x, limit)


def _pinv_infer(x: ShapedArray, limit: ShapedArray) -> ShapedArray:
    require_matrices("pinv", x)
    *batch, m, n = x.shape
    return ShapedArray((*batch, n, m), x.dtype)


def _pinv(x: Any, limit: Any) -> Any:
    numbers, u, vh = svd(x)
    *batch, k = numbers.shape
    if k == 0:
        return dot(adjoint(vh), adjoint(u))
    largest = slice_(numbers, [0] * len(numbers.shape), [*batch, 1])
    least = multiply(broadcast(limit, numbers.shape, range(len(batch))), broadcast(largest, numbers.shape))
    numbers = select(greater(numbers, least), numbers, np.inf)
    return dot(divide(adjoint(vh), as_dtype(as_rows(numbers, (*batch, x.shape[-1], k)), x.dtype)), adjoint(u))


def _pinv_forward(d: Derivative, dx: Any, _: Any) -> list[Any]:
    """https://doi.org/10.1137/0710036 (Golub, Pereyra)."""
    x, p = d.operands[0], d.results[0]
    h = adjoint(dx)
    if x.shape[-2] >= x.shape[-1]:
        s, t = dot(dot(p, adjoint(p)), h), dot(dot(h, adjoint(p)), p)
        first, s, t = dot(dot(p, dx), p), subtract(s, dot(dot(s, x), p)), subtract(t, dot(dot(p, x), t))
    else:
        s, t = dot(p, dot(adjoint(p), h)), dot(h, dot(adjoint(p), p))
        first, s, t = dot(p, dot(dx, p)), subtract(s, dot(s, dot(x, p))), subtract(t, dot(p, dot(x, t)))
    return [subtract(add(s, t), first)]


PINV = Primitive("pinv", _pinv_infer, composed(_pinv), linearly(_pinv_forward))
