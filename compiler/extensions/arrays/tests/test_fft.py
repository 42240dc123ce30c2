"""`stagec_arrays.numpy.fft`: values and gradients are JAX's, sizes of a batch may be symbolic.

Modules: `stagec_arrays/primitives/fourier.py`, `stagec_arrays/numpy/fft.py`.
"""

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
import stagec_arrays.numpy as xp
from compiler.extensions.arrays.tests import mistakes

RNG = np.random.default_rng(3)
X = RNG.normal(size=(2, 5, 4)) + 1j * RNG.normal(size=(2, 5, 4))


def size(n: Any, x: Any) -> Any:
    return n.real(x) ** 2 + n.real(x) * n.imag(x)


FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "fft": lambda n, x: size(n, n.fft.fft(x, n=6, axis=1)) + size(n, n.fft.fft(n.real(x), n=6, axis=1, norm="ortho")),
    "ifft": lambda n, x: size(n, n.fft.ifft(x, n=3)) + size(n, n.fft.ifft(x, n=3, norm="forward")),
    "fftn": lambda n, x: size(n, n.fft.fftn(x)) + size(n, n.fft.ifftn(x, norm="forward")),
    "rfft": lambda n, x: size(n, n.fft.rfft(n.real(x))) + size(n, n.fft.rfft(n.imag(x), n=5)),
    "irfft": lambda n, x: n.fft.irfft(x, n=5) * n.fft.irfft(x)[..., :5] * n.fft.hfft(x, n=5, norm="forward"),
    "ihfft": lambda n, x: size(n, n.fft.ihfft(n.real(x), axis=1, norm="ortho")),
    "rfftn": lambda n, x: size(n, n.fft.rfftn(n.real(x), s=(3, 4))),
    "irfftn": lambda n, x: n.fft.irfftn(x, axes=(2, 1)) ** 2,
    "shifts": lambda n, x: size(n, n.fft.fftshift(x) * n.fft.ifftshift(x, axes=1)) * n.fft.fftfreq(4, d=0.5),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients_are_jaxs(name: str) -> None:
    function = FUNCTIONS[name]

    def weighed(n: Any, x: Any) -> Any:
        flat = n.reshape(function(n, x), (-1,))
        return n.sum(flat * np.cos(np.arange(flat.shape[0])))

    with jax.enable_x64(True), stagec_arrays.enable_x64():
        wanted = jax.jit(jax.value_and_grad(lambda x: weighed(jnp, x)))(X)
        ours = stagec.jit(stagec_arrays.value_and_grad(lambda x: weighed(xp, x)), frontend="arrays")
        found = ours(X)
        after, before = (float(ours(X + step * (1 - 2j))[0]) for step in (1e-6, -1e-6))
        outside = weighed(xp, xp.asarray(X))
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, 1e-10, 1e-10)
    np.testing.assert_allclose(outside, wanted[0], 1e-10)
    along = float(np.sum(np.asarray(found[1]) * (1 - 2j)).real)
    assert (after - before) / 2e-6 == pytest.approx(along, 1e-5, 1e-5)


def test_any_number_of_axes() -> None:
    """XLA transforms three at once."""
    x = RNG.normal(size=(2, 3, 2, 4, 2)).astype(np.float32)
    for name in ("fftn", "ifftn", "rfftn"):
        np.testing.assert_allclose(getattr(xp.fft, name)(x), getattr(np.fft, name)(x), 1e-5, 1e-5)
    np.testing.assert_allclose(xp.fft.irfftn(np.fft.rfftn(x).astype(np.complex64)), x, 1e-5, 1e-5)
    assert np.asarray(xp.fft.fftn(x, axes=())).tolist() == x.tolist()


def test_batches_of_any_size_on_any_platform() -> None:
    """Of several axes cuFFT takes another inverse than all others: the last one apart."""
    struct = stagec_arrays.ShapeDtypeStruct((*stagec_arrays.symbolic_shape("batch"), 3, 4), xp.complex64)
    exported = (
        stagec.jit(lambda x: xp.fft.irfftn(x, axes=(1, 2)), frontend="arrays").trace(struct).export(("cpu", "cuda"))
    )
    theirs = jax.export.deserialize(bytearray(exported.serialize()))
    assert [re.findall(r"type = (\w+)", part) for part in theirs.mlir_module().split("}, {")] == [
        ["IRFFT"],
        ["IFFT", "IRFFT"],
    ]
    for count in (1, 3):
        x = RNG.normal(size=(count, 3, 4)).astype(np.complex64)
        for found in exported.call(x), theirs.call(x):
            np.testing.assert_allclose(found, np.fft.irfftn(x, axes=(1, 2)), 1e-5, 1e-5)


BAD: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "axis": (lambda x: xp.fft.fft(x, axis=2), IndexError, "axis 2 is out of range for an array of 2 dimensions"),
    "twice": (lambda x: xp.fft.fftn(x, axes=(0, -2)), ValueError, r"axis \(0, -2\) names one dimension twice"),
    "complex": (lambda x: xp.fft.rfft(x * 1j), TypeError, "rfft: expected real numbers, not complex64; write fft"),
    "norm": (lambda x: xp.fft.fft(x, norm="none"), ValueError, "fft: norm is 'none'; write \"backward\""),
    "sizes": (lambda x: xp.fft.fftn(x, s=(2, 2), axes=(0,)), ValueError, "fftn: s has 2 sizes, and axes are 1"),
    "nothing": (lambda x: xp.fft.fft(x, n=0), ValueError, "fft: axis 1 has 0 elements to transform"),
    "dtype": (
        lambda x: xp.fft.fftfreq(3, dtype=xp.int32) * x,
        TypeError,
        "fftfreq: expected a real floating-point dtype",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_mistakes_have_the_users_line(name: str) -> None:
    mistakes.check(BAD[name], np.ones((3, 3), np.float32))


def test_what_is_transformed_has_a_number_of_elements() -> None:
    struct = stagec_arrays.ShapeDtypeStruct(stagec_arrays.symbolic_shape("batch"), xp.float32)
    with pytest.raises(ValueError, match=r"fft: axis 0 has the symbolic size batch, .*; write it as n or s"):
        stagec.jit(xp.fft.fft, frontend="arrays").trace(struct)
