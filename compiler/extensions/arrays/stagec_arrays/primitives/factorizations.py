"""Primitives that factorize matrices into triangular ones, and solve with those.

Matrices are the last two axes, the others are a batch. As in `jax.lax.linalg`, a matrix without factors gives NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import chlo, stablehlo as hlo

from stagec_arrays import dtypes
from stagec_arrays.binding import bind
from stagec_arrays.lowering import IRValue, Rule
from stagec_arrays.primitives import foreign, matrices
from stagec_arrays.primitives.control import while_
from stagec_arrays.primitives.derivatives import Derivative, linearly
from stagec_arrays.primitives.elementwise import add, divide, equal, less, negative, select
from stagec_arrays.primitives.foreign import LIBRARIES, ffi_call, info_of, nan_where_failed, require_matrices, solver
from stagec_arrays.primitives.indexing import dynamic_slice, dynamic_update_slice
from stagec_arrays.primitives.matrices import dot, lower_part, part, transposed, upper_part
from stagec_arrays.primitives.platforms import by_platform, inline
from stagec_arrays.primitives.slicing import pad
from stagec_arrays.primitives.sorting import sort
from stagec_arrays.primitives.structural import iota, reduce_sum, reshape, size_value
from stagec_arrays.program import Primitive
from stagec_arrays.values import Literal, ShapedArray, shown


def smaller(m: Any, n: Any) -> Any:
    """Return the smaller of two sizes; symbolic ones must be equal, or a constraint must say which is smaller."""
    return m if m == n or m <= n else n


# Cholesky's: x = L L^H.


def cholesky(x: Any) -> Any:
    """Return the lower triangular factors of positive definite matrices; only their lower part is read."""
    return lower_part(bind(CHOLESKY, x))


def _cholesky_infer(x: ShapedArray) -> ShapedArray:
    require_matrices("cholesky", x, square=True)
    return ShapedArray(x.shape, x.dtype)


def _cholesky_lower(rule: Rule, x: IRValue) -> IRValue:
    results = [rule.out, info_of(rule.out)]
    result, info = solver(rule, "potrf", [x], results, {"uplo": "L"}, {"lower": True})
    return nan_where_failed(rule, info, result, rule.out)


def _cholesky_forward(d: Derivative, dx: Any) -> list[Any]:
    """https://arxiv.org/abs/1602.07527."""
    factor = lower_part(d.results[0])
    inner = triangular_solve(factor, dx, left=False, transpose=True, conjugate=True, lower=True)
    inner = lower_part(triangular_solve(factor, inner, left=True, lower=True))
    inner = divide(inner, add(matrices.identity(inner), 1.0))
    return [dot(factor, inner)]


CHOLESKY = Primitive(
    "cholesky",
    _cholesky_infer,
    by_platform(
        lambda rule, x: hlo.cholesky(x, lower=ir.BoolAttr.get(True)),
        cpu=_cholesky_lower,
        cuda=_cholesky_lower,
        rocm=_cholesky_lower,
    ),
    linearly(_cholesky_forward),
)


# Triangular systems.


def triangular_solve(
    a: Any,
    b: Any,
    *,
    left: bool,
    lower: bool,
    transpose: bool = False,
    conjugate: bool = False,
    unit: bool = False,
) -> Any:
    """Return x of op(a) x = b, or of x op(a) = b where not `left`; a and b have the same batch axes.

    lower: whether the lower part of a is meant, or the upper. transpose, conjugate: what op does. unit: whether a's
    diagonal is one, and not read. As `jax.lax.linalg.triangular_solve`.
    """
    return bind(TRIANGULAR_SOLVE, a, b, left=left, lower=lower, transpose=transpose, conjugate=conjugate, unit=unit)


def _triangular_infer(a: ShapedArray, b: ShapedArray, *, left: bool, **_: bool) -> ShapedArray:
    require_matrices("triangular_solve", a, square=True)
    if a.dtype != b.dtype or len(b.shape) < 2:
        raise TypeError(f"triangular_solve: expected matrices of one dtype, not {a} and {b}")
    if a.shape[:-2] != b.shape[:-2] or a.shape[-1] != b.shape[-2 if left else -1]:
        raise ValueError(f"triangular_solve: shapes {shown(a.shape)} and {shown(b.shape)} do not fit")
    return ShapedArray(b.shape, b.dtype)


def _without_conjugate(a: IRValue, transpose: bool, conjugate: bool) -> tuple[IRValue, bool]:
    """XLA and LAPACK conjugate only matrices that they transpose."""
    return (chlo.conj(a), False) if conjugate and not transpose else (a, conjugate)


def _triangular_lower(
    rule: Rule, a: IRValue, b: IRValue, *, left: bool, lower: bool, transpose: bool, conjugate: bool, unit: bool
) -> IRValue:
    a, conjugate = _without_conjugate(a, transpose, conjugate)
    how = ("ADJOINT" if conjugate else "TRANSPOSE") if transpose else "NO_TRANSPOSE"
    solve: Any = hlo.triangular_solve  # jaxlib's stubs have none of its attributes
    return solve(a, b, *(ir.BoolAttr.get(flag) for flag in (left, lower, unit)), hlo.TransposeAttr.get(how))


def _triangular_lapack(
    rule: Rule, a: IRValue, b: IRValue, *, left: bool, lower: bool, transpose: bool, conjugate: bool, unit: bool
) -> IRValue:
    a, conjugate = _without_conjugate(a, transpose, conjugate)
    attributes = {
        "side": "L" if left else "R",
        "uplo": "L" if lower else "U",
        "trans_x": ("C" if conjugate else "T") if transpose else "N",
        "diag": "U" if unit else "N",
    }
    name = f"lapack_{foreign.LETTERS[rule.out.dtype]}trsm_ffi"
    return ffi_call(rule, name, [a, b], rule.inputs, rule.outputs, attributes, aliased=1)[0]


def _triangular_vjp(
    d: Derivative, *, left: bool, lower: bool, transpose: bool, conjugate: bool, unit: bool
) -> list[Any]:
    a, _ = d.operands
    (x,) = d.results
    of_b = triangular_solve(
        a, d.cotangent, left=left, lower=lower, transpose=not transpose, conjugate=conjugate, unit=unit
    )
    result = negative(dot(of_b, transposed(x)) if left else dot(transposed(x), of_b))
    result = transposed(result) if transpose else result
    result = matrices.conjugate(result) if conjugate else result
    return [lower_part(result, -int(unit)) if lower else upper_part(result, int(unit)), of_b]


TRIANGULAR_SOLVE = Primitive(
    "triangular_solve", _triangular_infer, by_platform(_triangular_lower, cpu=_triangular_lapack), _triangular_vjp
)


# Gauss': P x = L U.


def lu(x: Any) -> tuple[Any, Any, Any]:
    """Return both factors in one matrix, the pivots, and the permutation of rows that they are.

    The diagonal of L is one, and not there. pivots: for each row, in order, that with which it was exchanged.
    """
    result: tuple[Any, Any, Any] = tuple(bind(LU, x))
    return result


def _lu_infer(x: ShapedArray) -> list[ShapedArray]:
    require_matrices("lu", x)
    *batch, m, n = x.shape
    pivots = ShapedArray((*batch, smaller(m, n)), dtypes.int32)
    return [ShapedArray(x.shape, x.dtype), pivots, ShapedArray((*batch, m), dtypes.int32)]


def _lu_lower(rule: Rule, x: IRValue) -> list[IRValue]:
    out, pivots, permutation = rule.outputs
    result, places, info = solver(rule, "getrf", [x], [out, pivots, info_of(out)])
    places = hlo.subtract(places, rule.full(1, pivots))  # LAPACK counts from 1
    result = nan_where_failed(rule, info, result, out, positive_fails=False)
    (platform,) = rule.platforms
    if platform in LIBRARIES:
        name = f"{LIBRARIES[platform]}_lu_pivots_to_permutation"
        order = ffi_call(rule, name, [places], [pivots], [permutation], {}, None, core=1, column_major=False)
    else:
        size = permutation.shape[-1]
        order = inline(rule, lambda given: [_permutation(given, size)], [places], [pivots])
    return [result, places, order[0]]


def _permutation(pivots: Any, size: Any) -> Any:
    """Return in which order rows are when each was exchanged with its pivot, one after the other."""
    *batch, count = pivots.shape
    shape = (*batch, size)
    places = iota(dtypes.int32, shape, len(batch))
    if 0 in pivots.shape:
        return places
    single = (*batch, 1)

    def turn(i: Any, order: Any) -> list[Any]:
        starts = [*[Literal(np.zeros((), np.int32))] * len(batch), i]
        pivot, own = dynamic_slice(pivots, starts, single), dynamic_slice(order, starts, single)
        there = equal(places, pivot)
        other = reshape(reduce_sum(select(there, order, 0), [len(batch)]), single)
        return [add(i, 1), dynamic_update_slice(select(there, own, order), other, starts)]

    limit = Literal(np.asarray(count, np.int32)) if type(count) is int else size_value(count)
    start = Literal(np.zeros((), np.int32))
    return while_(lambda i, order: [less(i, limit)], turn, [start, places])[1]


def _lu_forward(d: Derivative, dx: Any) -> list[Any]:
    """L' = L tril(inv(L) P x' inv(U), -1), U' = triu(inv(L) P x' inv(U)) U (de Hoog, Anderssen, Lukas)."""
    both, _, permutation = d.results
    m, n = both.shape[-2:]
    k = smaller(m, n)
    batch, zero = [0] * (len(both.shape) - 2), Literal(np.zeros((), both.dtype))
    first = pad(lower_part(part(both, columns=k), -1), zero, [*batch, 0, 0], [*batch, 0, m - k])
    first = add(first, matrices.identity(first))
    second = pad(upper_part(part(both, rows=k)), zero, [*batch, 0, 0], [*batch, n - k, 0])
    rest = matrices.eye((*both.shape[:-2], n - k, n - k), both.dtype)
    second = add(second, pad(rest, zero, [*batch, k, k], [*batch, 0, 0]))
    inner = triangular_solve(first, matrices.permuted(dx, permutation), left=True, lower=True, unit=True)
    inner = triangular_solve(second, inner, left=False, lower=False)
    return [add(dot(first, lower_part(inner, -1)), dot(upper_part(inner), second)), None, None]


LU = Primitive(
    "lu",
    _lu_infer,
    by_platform(
        "there is no library for it",
        cpu=_lu_lower,
        cuda=_lu_lower,
        rocm=_lu_lower,
        tpu=lambda rule, x: foreign.xla_call(rule, "LuDecomposition", [x], api_version=2),
    ),
    linearly(_lu_forward),
    several=True,
)


def lu_solved(factors: Any, permutation: Any, b: Any, transpose: bool = False, conjugate: bool = False) -> Any:
    """Return x of a x = b, of the factors of a; of a transposed, and conjugated then, where that is said."""
    if not transpose:
        x = triangular_solve(factors, matrices.permuted(b, permutation), left=True, lower=True, unit=True)
        return triangular_solve(factors, x, left=True, lower=False)
    x = triangular_solve(factors, b, left=True, lower=False, transpose=True, conjugate=conjugate)
    x = triangular_solve(factors, x, left=True, lower=True, unit=True, transpose=True, conjugate=conjugate)
    axis = len(permutation.shape) - 1
    back = sort([permutation, iota(dtypes.int32, permutation.shape, axis)], axis)[1]
    return matrices.permuted(x, back)
