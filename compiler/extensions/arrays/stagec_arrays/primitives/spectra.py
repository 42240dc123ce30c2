"""Primitives of eigenvalues and singular values. Matrices are the last two axes, the others are a batch.

As in `jax.lax.linalg`, a matrix whose iteration does not converge gives NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxlib.mlir.dialects import stablehlo as hlo

from stagec_arrays import dims, dtypes
from stagec_arrays.binding import bind
from stagec_arrays.dtypes import COMPLEX, KINDS
from stagec_arrays.lowering import IRValue, Rule
from stagec_arrays.primitives import foreign, matrices
from stagec_arrays.primitives.derivatives import Derivative, NoDerivative, linearly
from stagec_arrays.primitives.elementwise import add, divide, equal, multiply, square, subtract
from stagec_arrays.primitives.factorizations import lu, lu_solved, smaller
from stagec_arrays.primitives.foreign import LIBRARIES, ffi_call, info_of, nan_where_failed, require_matrices, solver
from stagec_arrays.primitives.matrices import adjoint, as_dtype, as_rows, dot, real_part, transposed
from stagec_arrays.primitives.platforms import by_platform, composed, inline
from stagec_arrays.primitives.polar import svd_by_polar
from stagec_arrays.primitives.structural import broadcast, convert, reduce_sum
from stagec_arrays.program import Primitive
from stagec_arrays.values import Literal, ShapedArray

# Of Hermitian matrices.


def eigh(x: Any) -> tuple[Any, Any]:
    """Return eigenvalues of Hermitian matrices, in ascending order, and eigenvectors as columns.

    The lower part is read.
    """
    vectors, numbers = bind(EIGH, x)
    return numbers, vectors


def _eigh_infer(x: ShapedArray) -> list[ShapedArray]:
    require_matrices("eigh", x, square=True)
    return [ShapedArray(x.shape, x.dtype), ShapedArray(x.shape[:-1], dtypes.real_part(x.dtype))]


def _eigh_lower(rule: Rule, x: IRValue) -> list[IRValue]:
    results = [*rule.outputs, info_of(rule.inputs[0])]
    *result, info = solver(rule, "syevd", [x], results, {"mode": "V", "uplo": "L"}, {"lower": True, "algorithm": 0})
    return [nan_where_failed(rule, info, *pair) for pair in zip(result, rule.outputs, strict=True)]


def _eigh_tpu(rule: Rule, x: IRValue) -> list[IRValue]:
    vectors, numbers = rule.outputs
    if vectors.shape[-1] == 0:
        return [x, rule.full(0, numbers)]
    return foreign.xla_call(rule, "Eigh", [x], "1,1,100,1e-6")  # lower part, sorted, so many turns, so exact


def _eigh_forward(d: Derivative, dx: Any) -> list[Any]:
    """Of distinct eigenvalues: https://people.maths.ox.ac.uk/gilesm/files/NA-08-01.pdf."""
    vectors, numbers = d.results
    inner = dot(dot(adjoint(vectors), dx), vectors)
    turn = multiply(as_dtype(_gaps(numbers), dx.dtype), inner)
    return [dot(vectors, turn), matrices.diagonal(real_part(inner))]


def _gaps(numbers: Any) -> Any:
    """Return 1 / (w[j] - w[i]) for row i and column j, and 0 on the diagonal."""
    shape = (*numbers.shape, numbers.shape[-1])
    identity = matrices.eye(shape, numbers.dtype)
    apart = subtract(as_rows(numbers, shape), matrices.as_columns(numbers, shape))
    return subtract(divide(1.0, add(identity, apart)), identity)


EIGH = Primitive(
    "eigh",
    _eigh_infer,
    by_platform("there is no library for it", cpu=_eigh_lower, cuda=_eigh_lower, rocm=_eigh_lower, tpu=_eigh_tpu),
    linearly(_eigh_forward),
    several=True,
)


# Of matrices of any kind.


def eig(x: Any, vectors: bool = True) -> list[Any]:
    """Return eigenvalues, which are complex, and then eigenvectors as columns where `vectors` says so."""
    result: list[Any] = bind(EIG, x, vectors=vectors)
    return result


def _eig_infer(x: ShapedArray, *, vectors: bool) -> list[ShapedArray]:
    require_matrices("eig", x, square=True)
    dtype = dtypes.complex_of(x.dtype)
    return [ShapedArray(x.shape[:-1], dtype), *[ShapedArray(x.shape, dtype)] * vectors]


def _eig_lapack(rule: Rule, x: IRValue, *, vectors: bool) -> list[IRValue]:
    (aval,) = rule.inputs
    numbers, matrix = ShapedArray(aval.shape[:-1], aval.dtype), ShapedArray(aval.shape, rule.outputs[0].dtype)
    parts = [numbers] * (2 if KINDS[aval.dtype] != COMPLEX else 1)
    name = f"lapack_{foreign.LETTERS[aval.dtype]}geev_ffi"
    attributes = {"compute_left": "N", "compute_right": "V" if vectors else "N"}
    results = [*parts, matrix, matrix, info_of(aval)]
    *eigenvalues, _, right, info = ffi_call(rule, name, [x], rule.inputs, results, attributes, None)
    both = [hlo.complex(*eigenvalues) if len(eigenvalues) == 2 else eigenvalues[0], right]
    return [nan_where_failed(rule, info, *pair) for pair in zip(both, rule.outputs, strict=False)]


def _eig_forward(d: Derivative, dx: Any, *, vectors: bool) -> list[Any]:
    if vectors:
        raise NoDerivative("eig has no derivative: eigenvectors are known but for factors; eigvals has one")
    _, right = eig(d.operands[0])
    factors, _, order = lu(right)
    inner = lu_solved(factors, order, as_dtype(dx, right.dtype))
    return [reduce_sum(multiply(inner, transposed(right)), [len(right.shape) - 1])]


EIG = Primitive(
    "eig",
    _eig_infer,
    by_platform(
        "JAX guarantees no function for eigenvalues of any matrix there; eigh is for Hermitian ones", cpu=_eig_lapack
    ),
    linearly(_eig_forward),
    several=True,
)


# Singular values: x = U diag(s) V^H.


def svd(x: Any, full: bool = False, vectors: bool = True) -> list[Any]:
    """Return singular values, in descending order, and then U and V^H where `vectors` says so.

    full: whether these are square, or have as many columns and rows as there are singular values.
    """
    *batch, m, n = x.shape
    if m == 0 or n == 0:
        k = (m, n) if full else (0, 0)
        numbers = broadcast(Literal(np.zeros((), dtypes.real_part(x.dtype))), (*batch, 0), ())
        both = [matrices.eye((*batch, m, k[0]), x.dtype), matrices.eye((*batch, k[1], n), x.dtype)]
        return [numbers, *both] if vectors else [numbers]
    result: list[Any] = bind(SVD, x, full=full, vectors=vectors)
    return result


def _svd_infer(x: ShapedArray, *, full: bool, vectors: bool) -> list[ShapedArray]:
    require_matrices("svd", x)
    *batch, m, n = x.shape
    k = smaller(m, n)
    numbers = ShapedArray((*batch, k), dtypes.real_part(x.dtype))
    both = [ShapedArray((*batch, m, m if full else k), x.dtype), ShapedArray((*batch, n if full else k, n), x.dtype)]
    return [numbers, *both] if vectors else [numbers]


def _svd_lapack(rule: Rule, x: IRValue, *, full: bool, vectors: bool) -> list[IRValue]:
    (aval,) = rule.inputs
    name = f"lapack_{foreign.LETTERS[aval.dtype]}gesdd_ffi"
    mode = ("A" if full else "S") if vectors else "N"
    results = [aval, *_svd_infer(aval, full=full, vectors=True), info_of(aval)]
    _, *result, info = ffi_call(rule, name, [x], rule.inputs, results, {"mode": mode})
    return [nan_where_failed(rule, info, *pair) for pair in zip(result, rule.outputs, strict=False)]


def _svd_device(rule: Rule, x: IRValue, *, full: bool, vectors: bool) -> list[IRValue]:
    (aval,) = rule.inputs
    (platform,) = rule.platforms
    numbers, *both = _svd_infer(aval, full=full, vectors=True)
    *batch, m, n = aval.shape
    small = dims.is_static((m, n)) and m <= 1024 and n <= 1024  # then Jacobi's is faster, as JAX says
    if not small:
        wide = m < n
        given = [ShapedArray((), aval.dtype)] * 2 if not vectors else both[::-1] if wide else both
        results = [aval, numbers, *given, info_of(aval)]
        attributes = {"full_matrices": full, "compute_uv": vectors, "transposed": wide}
        name = f"{LIBRARIES[platform]}solver_gesvd_ffi"
        _, s, u, vh, info = ffi_call(rule, name, [x], rule.inputs, results, attributes, column_major=not wide)
        result = [s, vh, u] if wide else [s, u, vh]
    else:
        thin = not full and m > 32 and n > 32
        k = smaller(m, n)
        own = [ShapedArray((*batch, size, k if thin else size), aval.dtype) for size in (m, n)]
        results = [aval, numbers, *own, info_of(aval)]
        attributes = {"full_matrices": not thin, "compute_uv": vectors}
        name = f"{LIBRARIES[platform]}solver_gesvdj_ffi"
        _, s, u, v, info = ffi_call(rule, name, [x], rule.inputs, results, attributes)
        shapes = [shaped.shape[-2:] for shaped in both]

        def cut(u: Any, v: Any) -> list[Any]:
            return [matrices.part(u, columns=shapes[0][1]), matrices.part(adjoint(v), rows=shapes[1][0])]

        result = [s, *inline(rule, cut, [u, v], own)] if vectors else [s]
    return [nan_where_failed(rule, info, *pair) for pair in zip(result, rule.outputs, strict=False)]


def _svd_forward(d: Derivative, dx: Any, *, full: bool, vectors: bool) -> list[Any]:
    """Of distinct singular values: https://people.maths.ox.ac.uk/gilesm/files/NA-08-01.pdf."""
    m, n = d.operands[0].shape[-2:]
    if not vectors:
        _, u, vh = svd(d.operands[0])
    elif full and m != n:
        raise NoDerivative("svd has no derivative with full_matrices=True where matrices are not square; write False")
    else:
        _, u, vh = d.results
    numbers, v = d.results[0], adjoint(vh)
    inner = dot(dot(adjoint(u), dx), v)
    of_numbers = matrices.diagonal(real_part(inner))
    if not vectors:
        return [of_numbers]
    shape = (*numbers.shape, numbers.shape[-1])
    columns = as_rows(numbers, shape)
    identity = matrices.eye(shape, numbers.dtype)
    squares = subtract(square(columns), square(transposed(columns)))
    gaps = as_dtype(subtract(divide(1.0, add(squares, identity)), identity), dx.dtype)
    zero = convert(equal(numbers, 0), numbers.dtype)
    inverse = matrices.from_diagonal(subtract(divide(1.0, add(numbers, zero)), zero))
    scaled = multiply(as_dtype(columns, dx.dtype), inner)
    other = multiply(as_dtype(transposed(columns), dx.dtype), inner)
    phase = multiply(multiply(subtract(inner, adjoint(inner)), 0.5), as_dtype(inverse, dx.dtype))
    du = dot(u, add(multiply(gaps, add(scaled, adjoint(scaled))), phase))
    dv = dot(v, multiply(gaps, add(other, adjoint(other))))
    if m > n:
        du = add(du, _outside(dot(dx, v), u, numbers))
    if n > m:
        dv = add(dv, _outside(dot(adjoint(dx), u), v, numbers))
    return [of_numbers, du, adjoint(dv)]


def _outside(x: Any, u: Any, numbers: Any) -> Any:
    """Return the part of x that is orthogonal to the columns of u, each column divided by a singular value."""
    rest = subtract(x, dot(u, dot(adjoint(u), x)))
    return divide(rest, as_dtype(as_rows(numbers, rest.shape), rest.dtype))


SVD = Primitive(
    "svd",
    _svd_infer,
    by_platform(
        "there is no library for it",
        cpu=_svd_lapack,
        cuda=_svd_device,
        rocm=_svd_device,
        tpu=composed(lambda x, *, full, vectors: svd_by_polar(x, full, vectors, eigh)),
    ),
    linearly(_svd_forward),
    several=True,
)
