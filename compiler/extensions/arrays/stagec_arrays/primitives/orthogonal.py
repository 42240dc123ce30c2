"""The primitives of Householder's decomposition: x = Q R, of an orthogonal and an upper triangular matrix.

Matrices are the last two axes, the others are a batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from stagec_arrays.binding import bind
from stagec_arrays.lowering import IRValue, Rule
from stagec_arrays.primitives import foreign, matrices
from stagec_arrays.primitives.derivatives import Derivative, linearly
from stagec_arrays.primitives.elementwise import add, multiply, subtract
from stagec_arrays.primitives.factorizations import lu, lu_solved, smaller, triangular_solve
from stagec_arrays.primitives.foreign import require_matrices, solver
from stagec_arrays.primitives.matrices import adjoint, dot, lower_part, part, upper_part
from stagec_arrays.primitives.platforms import by_platform, composed
from stagec_arrays.primitives.slicing import concatenate, pad
from stagec_arrays.primitives.structural import broadcast
from stagec_arrays.program import Primitive
from stagec_arrays.values import Literal, ShapedArray


def qr(x: Any, complete: bool = False) -> tuple[Any, Any]:
    """Return the orthogonal and the upper triangular factors; complete: Q is square, and R of as many rows as x."""
    result: tuple[Any, Any] = tuple(bind(QR, x, complete=complete))
    return result


def _qr_infer(x: ShapedArray, *, complete: bool) -> list[ShapedArray]:
    require_matrices("qr", x)
    *batch, m, n = x.shape
    k = m if complete else smaller(m, n)
    return [ShapedArray((*batch, m, k), x.dtype), ShapedArray((*batch, k, n), x.dtype)]


def _qr(x: Any, *, complete: bool) -> list[Any]:
    *batch, m, n = x.shape
    if m == 0 or n == 0:
        k = m if complete else 0
        return [matrices.eye((*batch, m, k), x.dtype), broadcast(Literal(np.zeros((), x.dtype)), (*batch, k, n), ())]
    result, scales = bind(GEQRF, x)
    if m == n:
        reflectors = result
    elif m < n:
        reflectors = part(result, columns=m)
    elif complete:
        low = [0] * len(result.shape)
        reflectors = pad(result, Literal(np.zeros((), x.dtype)), low, [*low[:-1], m - n])
    else:
        reflectors, result = result, part(result, rows=n)
    return [bind(HOUSEHOLDER_PRODUCT, reflectors, scales), upper_part(result)]


def _geqrf_lower(rule: Rule, x: IRValue) -> list[IRValue]:
    return solver(rule, "geqrf", [x], rule.outputs)


def _householder_lower(rule: Rule, x: IRValue, scales: IRValue) -> IRValue:
    return solver(rule, "orgqr", [x, scales], rule.outputs)[0]


_OF_QR = "it is a part of qr, which has one"
GEQRF = Primitive(
    "geqrf",
    lambda x: [x, ShapedArray((*x.shape[:-2], smaller(*x.shape[-2:])), x.dtype)],
    by_platform(
        lambda rule, x: foreign.xla_call(rule, "Qr", [x]), cpu=_geqrf_lower, cuda=_geqrf_lower, rocm=_geqrf_lower
    ),
    _OF_QR,
    several=True,
)
HOUSEHOLDER_PRODUCT = Primitive(
    "householder_product",
    lambda x, scales: x,
    by_platform(
        lambda rule, x, scales: foreign.xla_call(rule, "ProductOfElementaryHouseholderReflectors", [x, scales])[0],
        cpu=_householder_lower,
        cuda=_householder_lower,
        rocm=_householder_lower,
    ),
    _OF_QR,
)


def _qr_forward(d: Derivative, dx: Any, *, complete: bool) -> list[Any]:
    q, r = d.results
    m, n = d.operands[0].shape[-2:]
    if m == n or (m > n and not complete):
        return _thin_qr_forward(q, r, dx)
    if m < n:
        dq, first = _thin_qr_forward(q, part(r, columns=m), part(dx, columns=m))
        rest = part(d.operands[0], from_column=m), part(dx, from_column=m)
        second = add(dot(adjoint(dq), rest[0]), dot(adjoint(q), rest[1]))
        return [dq, concatenate([first, second], len(first.shape) - 1)]
    # https://arxiv.org/abs/2409.13374, equations 32 and 33.
    thin, more = part(q, columns=n), part(q, from_column=n)
    dq, dr = _thin_qr_forward(thin, part(r, rows=n), dx)
    square, below = part(thin, rows=n), part(thin, from_row=n)
    factors, _, order = lu(subtract(square, matrices.identity(square)))
    z = adjoint(lu_solved(factors, order, adjoint(below), transpose=True, conjugate=True))
    d_square, d_below = part(dq, rows=n), part(dq, from_row=n)
    turned = dot(add(thin, dot(more, z)), adjoint(subtract(d_below, dot(z, d_square))))
    d_more = subtract(dot(dq, adjoint(z)), turned)
    zeros = multiply(part(r, from_row=n), 0)
    rank = len(q.shape)
    return [concatenate([dq, d_more], rank - 1), concatenate([dr, zeros], rank - 2)]


def _thin_qr_forward(q: Any, r: Any, dx: Any) -> list[Any]:
    """https://j-towns.github.io/papers/qr-derivative.pdf, with its correction for complex numbers."""
    scaled = triangular_solve(r, dx, left=False, lower=False)
    inner = dot(adjoint(q), scaled)
    below = lower_part(inner, -1)
    turn = subtract(below, adjoint(below))
    imaginary = subtract(inner, matrices.as_dtype(matrices.real_part(inner), inner.dtype))
    turn = add(turn, multiply(matrices.identity(turn), imaginary))
    return [add(dot(q, subtract(turn, inner)), scaled), dot(subtract(inner, turn), r)]


QR = Primitive("qr", _qr_infer, composed(_qr), linearly(_qr_forward), several=True)
