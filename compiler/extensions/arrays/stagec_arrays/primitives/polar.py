"""The polar decomposition, and singular values by it, for platforms without a library for them: TPUs.

By QDWH, which converges in few turns of QR and Cholesky decompositions, as JAX does it (`jax/_src/tpu/linalg`):
Nakatsukasa, Bai, Gygi, "Optimizing Halley's iteration for computing the matrix polar decomposition", SIAM 2010.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from stagec_arrays import dtypes
from stagec_arrays.primitives import elementwise as p, matrices
from stagec_arrays.primitives.control import case, while_
from stagec_arrays.primitives.factorizations import cholesky, triangular_solve
from stagec_arrays.primitives.indexing import dynamic_slice
from stagec_arrays.primitives.matrices import adjoint, dot, part
from stagec_arrays.primitives.orthogonal import qr
from stagec_arrays.primitives.reductions import reduce_and, reduce_max, reduce_or
from stagec_arrays.primitives.slicing import along, concatenate, reverse
from stagec_arrays.primitives.structural import broadcast, convert, reduce_sum, reshape
from stagec_arrays.values import Literal

_TURNS = 10
_QR_IS_SAFER = 100.0
"""Limit of the coefficient c: above it, Cholesky's decomposition gets a nearly singular matrix."""


def _coefficients(eps: float) -> Iterator[tuple[float, float, float]]:
    """Yield a, b and c of each turn, for matrices whose smallest singular value is eps of the largest, or more."""
    low, turn = eps, 0
    while low + 5 * eps < 1 and turn < _TURNS:
        turn += 1
        power = low * low
        d = (4 * (1 / power - 1) / power) ** (1 / 3)
        root = (1 + d) ** 0.5
        a = root + (2 - d + 2 * (2 - power) / (power * root)) ** 0.5
        b = (a - 1) ** 2 / 4
        c = a + b - 1
        low = low * (a + b * power) / (1 + c * power)
        yield a, b, c


def polar(x: Any) -> tuple[Any, Any]:
    """Return U and H of x = U H, of matrices with as many rows as columns or more: H is Hermitian, U orthogonal."""
    rank = len(x.shape)
    eps = float(np.finfo(dtypes.real_part(x.dtype)).eps)
    size = p.absolute(x)
    sums = [reduce_max(reduce_sum(size, [axis]), [rank - 2]) for axis in (rank - 2, rank - 1)]
    scale = p.select(p.equal(sums[0], 0.0), 1.0, p.multiply(p.rsqrt(sums[0]), p.rsqrt(sums[1])))
    u = p.multiply(x, matrices.as_dtype(_of_each(scale, x), x.dtype))
    known = list(_coefficients(eps))
    by_qr = sum(c > _QR_IS_SAFER for _, _, c in known)
    halley = [(3.0, 1.0, 3.0)] * (_TURNS - len(known))  # to which the coefficients converge
    table = np.asarray([*known, *halley], scale.dtype)

    def turn(number: Any, u: Any, way: Callable[..., Any]) -> Any:
        row = dynamic_slice(table, [number, Literal(np.zeros((), np.int32))], (1, 3))
        a, b, c = (reshape(along(row, 1, i, i + 1), ()) for i in range(3))
        return way(u, a, b, c)

    def first(number: Any, u: Any) -> list[Any]:
        return [p.add(number, 1), turn(number, u, _turn_by_qr)]

    def body(number: Any, u: Any, moved: Any) -> list[Any]:
        result = turn(number, u, _turn_by_cholesky)
        return [p.add(number, 1), result, _moved(result, u, eps)]

    def condition(number: Any, u: Any, moved: Any) -> list[Any]:
        return [p.bitwise_or(p.less(number, len(known)), p.bitwise_and(moved, p.less(number, _TURNS)))]

    number, u = while_(lambda number, u: [p.less(number, by_qr)], first, [Literal(np.zeros((), np.int32)), u])
    u = while_(condition, body, [number, u, Literal(np.asarray(True))])[1]
    u = p.subtract(p.multiply(u, 1.5), p.multiply(dot(u, dot(adjoint(u), u)), 0.5))
    return u, matrices.symmetrized(dot(adjoint(u), x))


def _of_each(x: Any, like: Any) -> Any:
    """Return one number for each matrix as matrices."""
    return broadcast(x, like.shape, range(len(x.shape)))


def _moved(u: Any, before: Any, eps: float) -> Any:
    """Return whether the last turn changed one of the matrices by more than the limit at which the next is exact."""
    rank = len(u.shape)
    length = p.sqrt(reduce_sum(p.square(p.absolute(p.subtract(u, before))), [rank - 2, rank - 1]))
    return reduce_or(p.greater(length, (5 * eps) ** (1 / 3)), range(rank - 2))


def _scaled(x: Any, by: Any) -> Any:
    return p.multiply(x, matrices.as_dtype(by, x.dtype))


def _turn_by_qr(u: Any, a: Any, b: Any, c: Any) -> Any:
    m, n = u.shape[-2:]
    identity = matrices.eye((*u.shape[:-2], n, n), u.dtype)
    q, _ = qr(concatenate([_scaled(u, p.sqrt(c)), identity], len(u.shape) - 2))
    result = dot(part(q, rows=m), adjoint(part(q, from_row=m)))
    rest = p.divide(b, c)
    return p.add(_scaled(u, rest), _scaled(result, p.divide(p.subtract(a, rest), p.sqrt(c))))


def _turn_by_cholesky(u: Any, a: Any, b: Any, c: Any) -> Any:
    inner = _scaled(dot(adjoint(u), u), c)
    factor = cholesky(p.add(inner, matrices.identity(inner)))
    result = triangular_solve(factor, adjoint(u), left=True, lower=True)
    result = adjoint(triangular_solve(factor, result, left=True, lower=True, transpose=True, conjugate=True))
    rest = p.divide(b, c)
    return p.add(_scaled(u, rest), _scaled(result, p.subtract(a, rest)))


def svd_by_polar(x: Any, full: bool, vectors: bool, eigh: Callable[[Any], tuple[Any, Any]]) -> list[Any]:
    """Return the results of `spectra.svd` by way of the polar decomposition. eigh: that of Hermitian matrices."""
    m, n = x.shape[-2:]
    if m < n:
        result = svd_by_polar(adjoint(x), full, vectors, eigh)
        return [result[0], adjoint(result[2]), adjoint(result[1])] if vectors else result
    finite = reduce_and(p.is_finite(p.absolute(x)), [len(x.shape) - 2, len(x.shape) - 1])
    q, rest = None, None
    if m > n and (full or m > 1.15 * n):  # where QR first is less work
        q, r = qr(x, complete=full)
        q, rest, x = part(q, columns=n), part(q, from_column=n) if full else None, part(r, rows=n)
    u, h = polar(x)
    numbers, v = eigh(h)
    axis = len(numbers.shape) - 1
    numbers, v = p.maximum(reverse(numbers, [axis]), 0.0), reverse(v, [axis + 1])
    results = [numbers]
    if vectors:
        u = _corrected(dot(u, v), numbers)
        u = u if q is None else dot(q, u)
        u = u if rest is None else concatenate([u, rest], axis + 1)
        results += [u, adjoint(v)]
    return [p.select(broadcast(finite, result.shape, range(axis)), result, np.nan) for result in results]


def _corrected(u: Any, numbers: Any) -> Any:
    """Return U orthogonal also where singular values are zero (Nakatsukasa, Higham, SIAM 2013, section 5.5)."""
    axis, count = len(numbers.shape) - 1, numbers.shape[-1]
    eps = float(np.finfo(numbers.dtype).eps)
    first, last = (along(numbers, axis, at, at + 1) for at in (0, count - 1))
    needed = reshape(p.less_equal(last, p.multiply(first, count * eps)), numbers.shape[:-1])

    def again(u: Any) -> list[Any]:
        q, r = qr(u)
        unit = Literal(np.ones((), numbers.dtype))
        signs = p.select(p.greater_equal(matrices.real_part(matrices.diagonal(r)), 0.0), unit, -1.0)
        turned = p.multiply(q, matrices.as_dtype(matrices.as_rows(signs, q.shape), q.dtype))
        return [p.select(_of_each(needed, u), turned, u)]

    index = convert(reduce_or(needed, range(axis)), dtypes.int32)
    return case(index, [lambda u: [u], again], [u])[0]
