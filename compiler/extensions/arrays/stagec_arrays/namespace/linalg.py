"""The standard's extension of linear algebra: the functions of `stagec_arrays.numpy.linalg`.

https://data-apis.org/array-api/2024.12/extensions/linear_algebra_functions.html, with eig and eigvals of 2025.12.
Matrices are the last two axes, the others are a batch. A matrix without factors gives NaN, as in JAX.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from stagec_arrays import dtypes
from stagec_arrays.dtypes import COMPLEX, INEXACT, KINDS, SIGNED
from stagec_arrays.namespace import statistical
from stagec_arrays.namespace.linear import matmul, matrices_of
from stagec_arrays.namespace.promotion import array_of, like, promoted
from stagec_arrays.primitives import elementwise as p, factorizations, matrices, orthogonal, spectra, systems
from stagec_arrays.primitives.foreign import require_matrices
from stagec_arrays.primitives.reductions import reduce_max, reduce_min
from stagec_arrays.primitives.slicing import along
from stagec_arrays.primitives.structural import broadcast, convert, full, reduce_sum, reshape
from stagec_arrays.values import ShapedArray, as_view, axes_of, broadcast_shapes, shown


class EighResult(NamedTuple):
    """Of `eigh`: eigenvalues in ascending order, and eigenvectors as columns."""

    eigenvalues: Any
    eigenvectors: Any


class EigResult(NamedTuple):
    """Of `eig`: eigenvalues, and eigenvectors as columns, all complex."""

    eigenvalues: Any
    eigenvectors: Any


class QRResult(NamedTuple):
    """Of `qr`: x = Q @ R."""

    Q: Any
    R: Any


class SlogdetResult(NamedTuple):
    """Of `slogdet`: det(x) = sign * exp(logabsdet)."""

    sign: Any
    logabsdet: Any


class SVDResult(NamedTuple):
    """Of `svd`: x = U @ diag(S) @ Vh, singular values in descending order."""

    U: Any
    S: Any
    Vh: Any


def _factorized(x: Any, name: str, square: bool = False) -> Any:
    """Return an operand as matrices that LAPACK takes. Raises TypeError or ValueError."""
    x = array_of(x, name)
    require_matrices(name, ShapedArray.of(x), square)
    return x


def _inexact(x: Any, name: str) -> Any:
    x = array_of(x, name)
    dtypes.require(name, x.dtype, INEXACT)
    return x


# Factorizations.


def cholesky(x: Any, /, *, upper: bool = False) -> Any:
    """Return L of x = L L^H, lower triangular, of Hermitian positive definite matrices; upper: its adjoint."""
    result = factorizations.cholesky(matrices.symmetrized(_factorized(x, "cholesky", square=True)))
    return matrices.adjoint(result) if upper else result


def qr(x: Any, /, *, mode: str = "reduced") -> QRResult:
    """Return Q and R of x = Q R. mode: "reduced", or "complete" for a square Q."""
    x = _factorized(x, "qr")
    if mode not in ("reduced", "complete"):
        raise ValueError(f'qr: mode is {mode!r}; write "reduced" or "complete"')
    return QRResult(*orthogonal.qr(x, mode == "complete"))


def eigh(x: Any, /) -> EighResult:
    """Return eigenvalues, in ascending order, and eigenvectors of Hermitian matrices."""
    return EighResult(*spectra.eigh(matrices.symmetrized(_factorized(x, "eigh", square=True))))


def eigvalsh(x: Any, /) -> Any:
    """Return the eigenvalues of Hermitian matrices, in ascending order."""
    return spectra.eigh(matrices.symmetrized(_factorized(x, "eigvalsh", square=True)))[0]


def eig(x: Any, /) -> EigResult:
    """Return eigenvalues and eigenvectors, which are complex, of any square matrices. Only on CPUs."""
    return EigResult(*spectra.eig(_factorized(x, "eig", square=True)))


def eigvals(x: Any, /) -> Any:
    """Return the eigenvalues, which are complex, of any square matrices. Only on CPUs."""
    return spectra.eig(_factorized(x, "eigvals", square=True), vectors=False)[0]


def svd(x: Any, /, *, full_matrices: bool = True) -> SVDResult:
    """Return U, S and Vh of x = U diag(S) Vh. full_matrices: whether U and Vh are square.

    There is a derivative where they are not, or where x is square.
    """
    numbers, u, vh = spectra.svd(_factorized(x, "svd"), bool(full_matrices))
    return SVDResult(u, numbers, vh)


def svdvals(x: Any, /) -> Any:
    """Return singular values, in descending order."""
    return spectra.svd(_factorized(x, "svdvals"), vectors=False)[0]


# Systems of equations, inverses, determinants.


def solve(x1: Any, x2: Any, /) -> Any:
    """Return x of x1 @ x = x2. x2: matrices, or one vector if it has one dimension."""
    first, second = promoted(x1, x2, function="solve")
    first = _factorized(first, "solve", square=True)
    vector = len(second.shape) == 1
    if not second.shape or second.shape[0 if vector else -2] != first.shape[-1]:
        shapes = f"{shown(first.shape)} and {shown(second.shape)}"
        raise ValueError(f"solve: shapes {shapes} do not fit: x2 must have as many rows as x1")
    second = reshape(second, (*second.shape, 1)) if vector else second
    batch = broadcast_shapes(first.shape[:-2], second.shape[:-2])
    first, second = (broadcast(operand, (*batch, *operand.shape[-2:])) for operand in (first, second))
    result = systems.solve(first, second)
    return reshape(result, result.shape[:-1]) if vector else result


def inv(x: Any, /) -> Any:
    """Return the inverses of square matrices; of singular ones, infinite numbers and NaN."""
    return systems.inverse(_factorized(x, "inv", square=True))


def pinv(x: Any, /, *, rtol: Any = None) -> Any:
    """Return pseudoinverses. rtol: up to which part of the largest a singular value is zero.

    A number, or one for each matrix; None: the larger of both sizes times the dtype's eps.
    """
    x = _factorized(x, "pinv")
    return systems.pinv(x, _tolerance(x, rtol, "pinv"))


def _tolerance(x: Any, rtol: Any, name: str) -> Any:
    """Return a tolerance for each matrix. Raises ValueError if it does not broadcast to the batch."""
    dtype, batch = dtypes.real_part(x.dtype), x.shape[:-2]
    if rtol is None:
        return full(batch, max(x.shape[-2:]) * float(np.finfo(dtype).eps), dtype)
    result = like(rtol, dtype, name)
    try:
        return broadcast(result, batch, None)
    except ValueError as error:
        raise ValueError(f"{name}: rtol: {error}") from None


def det(x: Any, /) -> Any:
    """Return the determinants of square matrices."""
    return systems.det(_factorized(x, "det", square=True))


def slogdet(x: Any, /) -> SlogdetResult:
    """Return the sign of determinants, or their direction if they are complex, and the logarithm of their size."""
    return SlogdetResult(*systems.slogdet(_factorized(x, "slogdet", square=True)))


def matrix_rank(x: Any, /, *, rtol: Any = None) -> Any:
    """Return how many singular values are over `rtol` times the largest, as `pinv` takes it."""
    x = _factorized(x, "matrix_rank")
    numbers = svdvals(x)
    dtype = dtypes.default(SIGNED)
    if numbers.shape[-1] == 0:
        return full(numbers.shape[:-1], 0, dtype)
    largest = along(numbers, -1, 0, 1)
    limit = _tolerance(x, rtol, "matrix_rank")
    limit = p.multiply(reshape(limit, (*limit.shape, 1)), largest)
    return reduce_sum(convert(p.greater(numbers, limit), dtype), [len(numbers.shape) - 1])


def matrix_power(x: Any, n: int, /) -> Any:
    """Return square matrices to a power, an integer; of negative ones the inverse's."""
    given, x = x, _factorized(x, "matrix_power", square=True)
    if not hasattr(n, "__index__"):
        raise TypeError(f"matrix_power: n is {n!r}; write an integer")
    left = int(n.__index__())
    if left == 0:
        return matrices.identity(x)
    factor, result = systems.inverse(x) if left < 0 else x, None
    if left == 1:
        return as_view(x, given, "write to that array before you call matrix_power")
    left = max(left, -left)
    while left:
        if left & 1:
            result = factor if result is None else matmul(result, factor)
        left >>= 1
        factor = matmul(factor, factor) if left else factor
    return result


# Norms.


def vector_norm(x: Any, /, *, axis: Any = None, keepdims: bool = False, ord: Any = 2) -> Any:  # noqa: A002
    """Return norms of the vectors along axes, None: of all elements. ord: which, a number or infinity."""
    x = _inexact(x, "vector_norm")
    axes = axes_of(axis, len(x.shape))
    size = _squared(x) if ord == 2 else p.absolute(x)
    if ord == 2:
        result = p.sqrt(statistical.sum(size, axis=axes))
    elif ord == math.inf:
        result = reduce_max(size, axes)
    elif ord == -math.inf:
        result = reduce_min(size, axes)
    elif ord == 0:
        result = statistical.sum(convert(p.not_equal(size, 0), size.dtype), axis=axes)
    elif ord == 1:
        result = statistical.sum(size, axis=axes)
    elif type(ord) in (int, float):
        result = p.power(statistical.sum(p.power(size, float(ord)), axis=axes), 1.0 / ord)
    else:
        raise ValueError(f"vector_norm: ord is {ord!r}; write a number, inf or -inf")
    return statistical.kept(x, result, axes, keepdims)


def _squared(x: Any) -> Any:
    if KINDS[x.dtype] == COMPLEX:
        return p.add(p.square(p.real(x)), p.square(p.imag(x)))
    return p.square(x)


def matrix_norm(x: Any, /, *, keepdims: bool = False, ord: Any = "fro") -> Any:  # noqa: A002
    """Return norms of matrices. ord: "fro", "nuc", 1, -1, 2, -2, inf or -inf."""
    x = _inexact(matrices_of(x, "matrix_norm"), "matrix_norm")
    rows, columns = axes = (len(x.shape) - 2, len(x.shape) - 1)
    if ord == "fro" or ord is None:
        return vector_norm(x, axis=axes, keepdims=keepdims)
    if ord in ("nuc", 2, -2):
        numbers = svdvals(x)
        last = [len(numbers.shape) - 1]
        empty = numbers.shape[-1] == 0
        result = reduce_sum(numbers, last) if ord == "nuc" or empty else _extreme(numbers, last, ord)
    elif ord in (1, -1):
        result = _extreme(reduce_sum(p.absolute(x), [rows]), [rows], ord)
    elif ord in (math.inf, -math.inf):
        result = _extreme(reduce_sum(p.absolute(x), [columns]), [rows], ord)
    else:
        raise ValueError(f'matrix_norm: ord is {ord!r}; write "fro", "nuc", 1, -1, 2, -2, inf or -inf')
    return statistical.kept(x, result, axes, keepdims)


def _extreme(x: Any, axes: Sequence[int], ord: Any) -> Any:  # noqa: A002
    """Return the largest, or of a negative norm the smallest; nothing has 0."""
    if any(x.shape[axis] == 0 for axis in axes):
        return reduce_sum(x, axes)
    return (reduce_max if ord > 0 else reduce_min)(x, axes)
