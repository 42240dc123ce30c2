"""`stagec_arrays.numpy.linalg`: values and gradients are JAX's, artifacts are for several platforms, and JAX reads
them.

Modules: `stagec_arrays/primitives/factorizations.py`, `stagec_arrays/primitives/foreign.py`,
`stagec_arrays/primitives/matrices.py`, `stagec_arrays/primitives/orthogonal.py`,
`stagec_arrays/primitives/platforms.py`, `stagec_arrays/primitives/polar.py`, `stagec_arrays/primitives/spectra.py`,
`stagec_arrays/primitives/systems.py`, `stagec_arrays/numpy/linalg.py`.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import stagec
import stagec_arrays
import stagec_arrays.lax
import stagec_arrays.numpy as xp
from compiler.extensions.arrays.tests import mistakes
from stagec.pjrt.custom_calls import GUARANTEED
from stagec.stages import mlir
from stagec_arrays import execution
from stagec_arrays.primitives import spectra
from stagec_arrays.primitives.polar import svd_by_polar
from stagec_arrays.tracing import Tracer

RNG = np.random.default_rng(17)
REAL = RNG.normal(size=(2, 4, 4))
COMPLEX = REAL + 1j * RNG.normal(size=(2, 4, 4))


def positive(n: Any, a: Any) -> Any:
    return a @ n.conj(a.mT) + 3 * n.eye(4, dtype=a.dtype)


def again(n: Any, q: Any, numbers: Any, vh: Any) -> Any:
    """A function of a factorization that does not depend on the signs of its vectors."""
    return (q * n.sin(numbers)[..., None, :]) @ vh


def hermitian(n: Any, numbers: Any, vectors: Any) -> Any:
    return again(n, vectors, numbers, n.conj(vectors.mT))


FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "cholesky": lambda n, a: n.linalg.cholesky(positive(n, a)) + n.linalg.cholesky(positive(n, a), upper=True),
    "inv": lambda n, a: n.linalg.inv(a),
    "det": lambda n, a: n.linalg.det(a) + n.linalg.det(a[..., :2, :2]),
    "slogdet": lambda n, a: n.linalg.slogdet(a)[1] + n.real(n.linalg.slogdet(a)[0] * a[..., 0, 0]),
    "solve": lambda n, a: n.linalg.solve(a, a[..., :2] ** 2) + n.linalg.solve(a[0], a[1, 0])[:, None],
    "qr": lambda n, a: functools.reduce(n.matmul, n.linalg.qr(n.sin(a))) + n.linalg.qr(a)[1],
    "qr, tall": lambda n, a: n.linalg.qr(a[..., :3])[0] @ n.cos(n.linalg.qr(a[..., :3])[1]),
    "qr, wide": lambda n, a: n.linalg.qr(a[..., :3, :])[0] @ n.cos(n.linalg.qr(a[..., :3, :])[1]),
    "qr, complete": lambda n, a: n.linalg.qr(a[..., :3], mode="complete")[0][..., 3:] ** 2,
    "eigh": lambda n, a: hermitian(n, *n.linalg.eigh(positive(n, a))),
    "eigvalsh": lambda n, a: n.linalg.eigvalsh(positive(n, a)),
    "eigvals": lambda n, a: n.abs(n.linalg.eigvals(a)) ** 2,
    "svd": lambda n, a: again(n, *n.linalg.svd(a)),
    "svd, tall": lambda n, a: again(n, *n.linalg.svd(a[..., :3], full_matrices=False)),
    "svd, wide": lambda n, a: again(n, *n.linalg.svd(a[..., :3, :], full_matrices=False)),
    "svdvals": lambda n, a: n.linalg.svdvals(a),
    "pinv": lambda n, a: n.linalg.pinv(a[..., :3]) + n.linalg.pinv(a[..., :3, :]).mT,
    "norms": lambda n, a: (
        sum(n.linalg.matrix_norm(a, ord=o) for o in ("fro", "nuc", 1, -1, 2, -2, np.inf, -np.inf))
        + sum(n.linalg.vector_norm(a, ord=o, axis=(1, 2)) for o in (2, 1, 3, np.inf))
    ),
    "powers": lambda n, a: n.linalg.matrix_power(a, -3) + n.linalg.matrix_power(a, 5),
    "products": lambda n, a: (
        n.linalg.cross(a[..., :3], a[..., 1:]) * n.linalg.trace(a, offset=1)[..., None, None]
        + n.linalg.outer(a[0, 0], a[1, 0])[:, :3] * n.linalg.diagonal(a, offset=-1)[:, None]
    ),
}


def weighed(n: Any, found: Any) -> Any:
    """One number of many, each of which counts."""
    flat = n.reshape(found, (-1,))
    weights = np.cos(np.arange(flat.shape[0]) + 1.0)
    imaginary = n.sum(n.imag(flat) * weights[::-1]) if np.iscomplexobj(np.zeros((), flat.dtype)) else 0.0
    return n.sum(n.real(flat) * weights) + imaginary


CASES = [(name, "complex") for name in FUNCTIONS] + [(name, "real") for name in ("eigh", "eigvals", "slogdet", "svd")]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_values_and_gradients_are_jaxs(name: str, kind: str) -> None:
    function, a = FUNCTIONS[name], REAL if kind == "real" else COMPLEX
    direction = np.cos(np.arange(a.size)).reshape(a.shape) * (1 + 0.5j if np.iscomplexobj(a) else 1)
    with jax.enable_x64(True), stagec_arrays.enable_x64():
        wanted = jax.jit(jax.value_and_grad(lambda x: weighed(jnp, function(jnp, x))))(a)
        ours = stagec.jit(stagec_arrays.value_and_grad(lambda x: weighed(xp, function(xp, x))), frontend="arrays")
        value, gradient = map(np.asarray, ours(a))
        after, before = (float(ours(a + sign * 1e-6 * direction)[0]) for sign in (1, -1))
    np.testing.assert_allclose(value, wanted[0], 1e-9, 1e-9)
    np.testing.assert_allclose(gradient, wanted[1], 1e-9, 1e-9 * float(np.abs(wanted[1]).max()))
    along = float(np.sum(gradient * direction).real)
    assert (after - before) / 2e-6 == pytest.approx(along, 1e-4, 1e-5)


def everything(n: Any, a: Any) -> Any:
    """Each factorization, in results that are equal wherever they are computed."""
    definite = positive(n, a)
    q, r = n.linalg.qr(a)
    u, s, vh = n.linalg.svd(a[..., :3])
    return [
        n.linalg.cholesky(definite),
        n.linalg.inv(a),
        n.linalg.eigvalsh(definite),
        q @ r,
        (u[..., :3] * s[..., None, :]) @ vh,
        n.fft.irfftn(a + 0j, axes=(1, 2)),
    ]


SOLVERS = {"geqrf", "getrf", "orgqr", "potrf", "syevd"}
CALLS = {
    "cpu": {f"lapack_s{name}_ffi" for name in {*SOLVERS, "gesdd", "trsm"}},
    "cuda": {f"cusolver_{name}_ffi" for name in {*SOLVERS, "gesvdj"}} | {"cu_lu_pivots_to_permutation"},
    "rocm": {f"hipsolver_{name}_ffi" for name in {*SOLVERS, "gesvdj"}} | {"hip_lu_pivots_to_permutation"},
    "tpu": {"Eigh", "LuDecomposition", "ProductOfElementaryHouseholderReflectors", "Qr"},
}


@pytest.mark.parametrize("platforms", [*((one,) for one in CALLS), tuple(CALLS)], ids="-".join)
def test_calls_are_those_that_jax_guarantees(platforms: tuple[str, ...]) -> None:
    """As JAX's own; stock JAX reads the artifact, and runs that for several platforms on the one where it is."""
    a = REAL.astype(np.float32)
    exported = stagec.jit(lambda a: everything(xp, a), frontend="arrays").trace(a).export(platforms)
    calls = mlir.inventory(exported.mlir_module_serialized)
    assert set(calls) == set[str]().union(*(CALLS[one] for one in platforms))
    assert set(calls.values()) == {GUARANTEED}
    theirs = jax.export.deserialize(bytearray(exported.serialize()))
    assert theirs.platforms == platforms
    if "cpu" in platforms:
        wanted = jax.jit(lambda a: everything(jnp, a))(a)
        for found in theirs.call(a), exported.call(a):
            for one, other in zip(found, wanted, strict=True):
                np.testing.assert_allclose(one, other, 1e-4, 1e-4)


def test_the_module_is_jaxs() -> None:
    """Names, attributes, layouts, aliases of each call are those that JAX writes, on each platform."""

    def calls(text: str) -> list[str]:
        text = re.sub(r", sdy\.sharding_rule = #sdy\.op_sharding_rule<.*?custom>|%\w+(#\d+)?| loc\(.*", "", text)
        return sorted(re.findall(r"stablehlo\.custom_call @.*", text))

    a, big = COMPLEX.astype(np.complex64), jax.ShapeDtypeStruct((1100, 40), np.float32)

    def solvers(n: Any, a: Any) -> Any:
        return [*n.linalg.eigh(a), *n.linalg.qr(a), *n.linalg.slogdet(a)]

    def singular(n: Any, a: Any) -> Any:
        return [*n.linalg.svd(a), *n.linalg.svd(a, full_matrices=False)]

    for function, given, platforms in (
        (solvers, a, ("cpu", "cuda", "rocm", "tpu")),
        (singular, a, ("cpu", "cuda")),
        (singular, big, ("cpu", "cuda")),
    ):
        for platform in platforms:
            theirs = jax.export.export(jax.jit(functools.partial(function, jnp)), platforms=[platform])(given)
            ours = stagec.jit(functools.partial(function, xp), frontend="arrays").trace(given).export((platform,))
            text = jax.export.deserialize(bytearray(ours.serialize())).mlir_module()
            assert calls(text) == calls(theirs.mlir_module())


def filtered(n: Any, x: Any, a: Any) -> Any:
    lax = stagec_arrays.lax if n is xp else jax.lax

    def turn(carry: Any, row: Any) -> Any:
        scale = row @ row.mT + n.eye(4, dtype=row.dtype)
        return n.linalg.solve(scale, carry) + 1, n.linalg.slogdet(scale)[1] + n.linalg.cholesky(scale)[1, 0]

    carry, logarithms = lax.scan(turn, x, a)
    return n.sum(carry) + n.sum(logarithms)


def test_in_loops_on_several_platforms_and_derived_twice() -> None:
    a, x = REAL.astype(np.float32), np.ones(4, np.float32)
    exported = stagec.jit(functools.partial(filtered, xp), frontend="arrays").trace(x, a).export(("cpu", "cuda", "tpu"))
    theirs = jax.export.deserialize(bytearray(exported.serialize(vjp_order=2)))
    value, gradients = jax.value_and_grad(functools.partial(filtered, jnp), (0, 1))(x, a)
    np.testing.assert_allclose(theirs.call(x, a), value, 1e-5)
    for found, wanted in zip(theirs.vjp().call(x, a, np.float32(1)), gradients, strict=True):
        np.testing.assert_allclose(found, wanted, 1e-4, 1e-5)
    assert theirs.vjp().has_vjp()
    with jax.enable_x64(True), stagec_arrays.enable_x64():
        ours = stagec_arrays.grad(lambda a: xp.sum(stagec_arrays.grad(lambda a: filtered(xp, REAL[0, 0], a))(a) ** 2))
        wanted = jax.grad(lambda a: jnp.sum(jax.grad(lambda a: filtered(jnp, REAL[0, 0], a))(a) ** 2))(REAL)
        np.testing.assert_allclose(stagec.jit(ours, frontend="arrays")(REAL), wanted, 1e-8, 1e-8)


def test_batches_of_any_size() -> None:
    batch = stagec_arrays.symbolic_shape("batch")
    struct = stagec_arrays.ShapeDtypeStruct((*batch, 4, 4), xp.float32)
    exported = stagec.jit(lambda a: everything(xp, a), frontend="arrays").trace(struct).export(("cpu", "tpu"))
    theirs = jax.export.deserialize(bytearray(exported.serialize()))
    for count in (1, 3):
        a = RNG.normal(size=(count, 4, 4)).astype(np.float32)
        for found in exported.call(a), theirs.call(a):
            for one, other in zip(found, jax.jit(lambda a: everything(jnp, a))(a), strict=True):
                np.testing.assert_allclose(one, other, 1e-4, 1e-4)


def test_matrices_of_any_size() -> None:
    (size,) = stagec_arrays.symbolic_shape("n")
    struct = stagec_arrays.ShapeDtypeStruct((size, size), xp.float32)

    def function(n: Any, a: Any) -> Any:
        return n.linalg.cholesky(a), n.linalg.inv(a), n.linalg.det(a), n.linalg.trace(a), n.linalg.eigvalsh(a)

    exported = stagec.jit(functools.partial(function, xp), frontend="arrays").trace(struct).export()
    for count in (2, 5):
        a = np.eye(count, dtype=np.float32) * 3 + 1
        for one, other in zip(exported.call(a), function(jnp, a), strict=True):
            np.testing.assert_allclose(one, other, 1e-4, 1e-5)


@pytest.mark.parametrize("shape", [(2, 5, 3), (3, 6), (7, 7)], ids=str)
@pytest.mark.parametrize("full", [False, True])
def test_singular_values_without_a_library(shape: tuple[int, ...], full: bool) -> None:
    """What TPUs run, here, with LAPACK's other factorizations; one matrix of a batch lacks a rank."""
    a = RNG.normal(size=shape).astype(np.float32)
    a[..., -1] = np.where(np.arange(a[..., 0].size).reshape(a[..., 0].shape) < shape[-2], a[..., 0], a[..., -1])
    ours = stagec.jit(lambda x: svd_by_polar(x, full, True, spectra.eigh), frontend="arrays")
    s, u, vh = map(np.asarray, ours(a))
    k = s.shape[-1]
    np.testing.assert_allclose(s, np.linalg.svd(a, compute_uv=False), 1e-5, 1e-5)
    np.testing.assert_allclose((u[..., :k] * s[..., None, :]) @ vh[..., :k, :], a, 1e-5, 1e-5)
    for one in u, vh.swapaxes(-1, -2):
        np.testing.assert_allclose(one.swapaxes(-1, -2) @ one - np.eye(one.shape[-1]), 0, 0, 1e-5)
    assert np.isnan(ours(a * np.nan)[0]).all()


@pytest.mark.parametrize("shape", [(0, 0), (3, 0, 0), (0, 2, 2)], ids=str)
def test_matrices_without_elements(shape: tuple[int, ...]) -> None:
    a = np.ones(shape, np.float32)
    for name in ("cholesky", "det", "eigh", "eigvals", "inv", "pinv", "qr", "slogdet", "svd"):
        wanted = getattr(jnp.linalg, name)(a)
        for call in getattr(xp.linalg, name), stagec.jit(getattr(xp.linalg, name), frontend="arrays"):
            found = call(a)
            pairs = zip(found, wanted, strict=True) if isinstance(found, tuple) else [(found, wanted)]
            for one, other in pairs:
                np.testing.assert_array_equal(one, other)
    assert stagec_arrays.grad(lambda a: xp.sum(xp.linalg.inv(a)))(a).shape == shape


def test_what_cannot_be_factorized_is_nan() -> None:
    indefinite = -np.eye(2, dtype=np.float32)
    found = np.asarray(xp.linalg.cholesky(np.stack([indefinite, -indefinite])))
    assert np.isnan(np.tril(found[0])[[0, 1, 1], [0, 0, 1]]).all()
    assert found[1].tolist() == [[1, 0], [0, 1]]
    undefined = np.full((2, 2), np.nan, np.float32)
    assert np.isnan(np.asarray(xp.linalg.eigvalsh(undefined))).all()
    singular = np.ones((3, 3), np.float32)
    assert np.isinf(np.asarray(xp.linalg.slogdet(singular).logabsdet))
    gradient = stagec_arrays.grad(xp.linalg.det)(np.diag([0.0, 2, 3]).astype(np.float32))
    np.testing.assert_allclose(gradient, np.diag([6.0, 0, 0]), 1e-6, 1e-6)


BAD: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "not square": (
        lambda x: xp.linalg.inv(x + 0),
        ValueError,
        r"inv: expected square matrices, not ones of shape \(3, 2\)",
    ),
    "integers": (
        lambda x: xp.linalg.qr(x.astype(xp.int32)),
        TypeError,
        "qr: expected matrices of float32, .* not of int32",
    ),
    "half": (
        lambda x: xp.linalg.svd(x.astype(xp.float16)),
        TypeError,
        "svd: expected matrices of float32, .* not of float16",
    ),
    "a vector": (lambda x: xp.linalg.pinv(x[0]), ValueError, r"pinv: expected an array of 2 dimensions .* \(2,\)"),
    "rows": (lambda x: xp.linalg.solve(x.mT @ x, x), ValueError, r"solve: shapes \(2, 2\) and \(3, 2\) do not fit"),
    "mode": (lambda x: xp.linalg.qr(x, mode="r"), ValueError, 'qr: mode is \'r\'; write "reduced" or "complete"'),
    "norm": (lambda x: xp.linalg.matrix_norm(x, ord=3), ValueError, 'matrix_norm: ord is 3; write "fro"'),
    "cross": (lambda x: xp.linalg.cross(x, x, axis=0), IndexError, "cross: axis is 0; write one from -2 to -1"),
    "tolerance": (lambda x: xp.linalg.pinv(x, rtol=xp.ones(3)), ValueError, "pinv: rtol: .* does not broadcast"),
}


@pytest.mark.parametrize("name", BAD)
def test_mistakes_have_the_users_line(name: str) -> None:
    mistakes.check(BAD[name], np.ones((3, 2), np.float32))


def test_what_is_not_there_says_so() -> None:
    traced = stagec.jit(lambda x: xp.linalg.eigvals(x + 0), frontend="arrays").trace(np.eye(2, dtype=np.float32))
    line = f"{re.escape(__file__)}:{test_what_is_not_there_says_so.__code__.co_firstlineno + 1}"
    with pytest.raises(ValueError, match=f"{line}: eig cannot be lowered for cuda: JAX guarantees no function"):
        traced.export(("cpu", "cuda"))
    with pytest.raises(TypeError, match="eig has no derivative"):
        stagec_arrays.grad(lambda x: xp.sum(xp.abs(xp.linalg.eig(x).eigenvectors)))(np.eye(2, dtype=np.float32))
    with pytest.raises(TypeError, match="svd has no derivative with full_matrices=True"):
        stagec_arrays.grad(lambda x: xp.sum(xp.linalg.svd(x).U))(np.ones((3, 2), np.float32))


def test_results_are_named() -> None:
    import stagec_arrays.numpy.fft
    import stagec_arrays.numpy.linalg

    assert (xp.linalg, xp.fft) == (stagec_arrays.numpy.linalg, stagec_arrays.numpy.fft)
    found = stagec.jit(xp.linalg.slogdet, frontend="arrays")(np.eye(2, dtype=np.float32))
    assert (type(found.sign), type(found).__name__) == (execution.Array, "SlogdetResult")
    assert found._fields == ("sign", "logabsdet")
    kinds: list[type] = []
    stagec.jit(lambda x: kinds.append(type(xp.linalg.eigh(x).eigenvalues)) or x, frontend="arrays").trace(np.eye(2))
    assert kinds == [Tracer]
