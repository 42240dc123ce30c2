"""Primitives of square matrices that are made of their LU decomposition, and have derivatives of their own."""

from __future__ import annotations

from typing import Any

import numpy as np

from stagec_arrays import dtypes
from stagec_arrays.binding import bind
from stagec_arrays.dtypes import COMPLEX, KINDS
from stagec_arrays.primitives import elementwise as p, matrices
from stagec_arrays.primitives.derivatives import Derivative, linearly
from stagec_arrays.primitives.factorizations import lu, lu_solved, triangular_solve
from stagec_arrays.primitives.foreign import require_matrices
from stagec_arrays.primitives.matrices import adjoint, as_dtype, as_rows, diagonal, dot, real_part, transposed
from stagec_arrays.primitives.platforms import composed
from stagec_arrays.primitives.reductions import reduce_or, reduce_prod
from stagec_arrays.primitives.slicing import along
from stagec_arrays.primitives.spectra import svd
from stagec_arrays.primitives.structural import broadcast, convert, iota, reduce_sum, reshape
from stagec_arrays.program import Primitive
from stagec_arrays.values import Literal, ShapedArray


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
    of_a = p.negative(dot(x, transposed(of_b)) if transpose else dot(of_b, transposed(x)))
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
    moved = p.not_equal(pivots, iota(dtypes.int32, pivots.shape, axis))
    odd = p.bitwise_and(reduce_sum(convert(moved, dtypes.int32), [axis]), 1)
    return convert(p.subtract(1, p.multiply(odd, 2)), dtype)


def _slogdet(x: Any) -> list[Any]:
    factors, pivots, _ = lu(x)
    numbers = diagonal(factors)
    axis = len(numbers.shape) - 1
    size = p.absolute(numbers)
    length = as_dtype(size, x.dtype)
    direction = p.divide(numbers, p.select(p.equal(length, 0), 1.0, length))
    sign = p.multiply(reduce_prod(direction, [axis]), as_dtype(_parity(pivots, dtypes.real_part(x.dtype)), x.dtype))
    return [sign, reduce_sum(p.log(size), [axis])]


def _slogdet_forward(d: Derivative, dx: Any) -> list[Any]:
    trace = reduce_sum(diagonal(solve(d.operands[0], dx)), [len(dx.shape) - 2])
    if KINDS[dx.dtype] != COMPLEX:
        return [None, trace]
    turned = p.subtract(trace, as_dtype(real_part(trace), trace.dtype))
    return [p.multiply(turned, d.results[0]), real_part(trace)]


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
            result = p.multiply(result, at(row, (start + way * row) % n))
        return result

    if n == 2:
        return p.subtract(product(1, 0), product(1, 1))
    right, left = (p.add(p.add(product(way, 0), product(way, 1)), product(way, 2)) for way in (1, -1))
    return p.subtract(right, left)


def _det(x: Any) -> Any:
    factors, pivots, _ = lu(x)
    result = reduce_prod(diagonal(factors), [len(x.shape) - 2])
    return p.multiply(result, as_dtype(_parity(pivots, dtypes.real_part(x.dtype)), x.dtype))


def _det_vjp(d: Derivative) -> list[Any]:
    (x,) = d.operands
    result = transposed(_adjugate(x))
    return [p.multiply(broadcast(d.cotangent, x.shape, range(len(x.shape) - 2)), result)]


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
    before = p.multiply(reduce_prod(along(numbers, axis, 0, n - 1), [axis]), sign)
    whole = p.multiply(reduce_prod(numbers, [axis]), sign)
    rows, columns = (iota(dtypes.int32, x.shape, number) for number in (axis, axis + 1))
    corner = p.bitwise_and(p.equal(rows, n - 1), p.equal(columns, n - 1))
    factors = p.select(corner, broadcast(p.divide(1.0, before), x.shape, range(axis)), factors)
    ones = broadcast(Literal(np.ones((), x.dtype)), (*x.shape[:-1], 1), ())
    tried = p.absolute(triangular_solve(factors, ones, left=True, lower=False))
    bad = reduce_or(p.bitwise_not(p.is_finite(tried)), [axis, axis + 1])
    bad = broadcast(bad, x.shape, range(axis))
    result = matrices.permuted(p.select(bad, 0, matrices.identity(x)), permutation)
    result = triangular_solve(factors, result, left=True, lower=True, unit=True)
    scaled = p.multiply(result, broadcast(whole, x.shape, range(axis)))
    result = triangular_solve(factors, p.select(p.equal(rows, n - 1), result, scaled), left=True, lower=False)
    return p.select(bad, 0, result)


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
    largest = along(numbers, -1, 0, 1)
    least = p.multiply(broadcast(limit, numbers.shape, range(len(batch))), broadcast(largest, numbers.shape))
    numbers = p.select(p.greater(numbers, least), numbers, np.inf)
    return dot(p.divide(adjoint(vh), as_dtype(as_rows(numbers, (*batch, x.shape[-1], k)), x.dtype)), adjoint(u))


def _pinv_forward(d: Derivative, dx: Any, _: Any) -> list[Any]:
    """https://doi.org/10.1137/0710036 (Golub, Pereyra)."""
    x, y = d.operands[0], d.results[0]
    h = adjoint(dx)
    if x.shape[-2] >= x.shape[-1]:
        s, t = dot(dot(y, adjoint(y)), h), dot(dot(h, adjoint(y)), y)
        first, s, t = dot(dot(y, dx), y), p.subtract(s, dot(dot(s, x), y)), p.subtract(t, dot(dot(y, x), t))
    else:
        s, t = dot(y, dot(adjoint(y), h)), dot(h, dot(adjoint(y), y))
        first, s, t = dot(y, dot(dx, y)), p.subtract(s, dot(s, dot(x, y))), p.subtract(t, dot(y, dot(x, t)))
    return [p.subtract(p.add(s, t), first)]


PINV = Primitive("pinv", _pinv_infer, composed(_pinv), linearly(_pinv_forward))
