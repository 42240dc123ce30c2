"""Pallas kernels: of Mosaic for TPUs, of Triton and of Mosaic for NVIDIA devices."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

ROWS = functools.partial(pl.BlockSpec, (64, 256), lambda i: (i, 0))


def matmul(x, y):
    """A product; its left side is transposed, with a hint that JAX leaves out for an export."""

    def kernel(x, y, out):
        contracted = (((0,), (0,)), ((), ()))
        out[...] = jax.lax.dot_general(x[...], y[...], contracted, preferred_element_type=jnp.float32)

    return pl.pallas_call(
        kernel,
        jax.ShapeDtypeStruct((x.shape[1], y.shape[1]), jnp.float32),
        compiler_params=pltpu.CompilerParams(fuse_transposed_lhs_in_matmul=True),
    )(x, y)


def sign(x):
    """What JAX lowers by the generation of the TPU."""

    def kernel(x, out):
        out[...] = jnp.sign(x[...])

    return pl.pallas_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def blocked(x):
    """In blocks, of a size that the model chooses by the generation of the TPU."""
    size = 64 if pltpu.get_tpu_info().generation >= 6 else 128

    def kernel(x, out):
        out[...] = jnp.exp2(x[...])

    rows = pl.BlockSpec((size, x.shape[1]), lambda i: (i, 0))
    return pl.pallas_call(
        kernel,
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0] // size,),
        in_specs=[rows],
        out_specs=rows,
    )(x)


def triton(x, y):
    """A sum of two arrays, rows by rows."""
    from jax.experimental.pallas import triton as backend

    return added(x, y, backend.CompilerParams())


def mosaic(x, y):
    """The same, as all releases lower it: those from 0.11.2 on do not take it by `pl.pallas_call`."""
    from jax.experimental.pallas import mosaic_gpu as backend

    def kernel(x, y, out):
        rows = pl.ds(jax.lax.axis_index("block") * 64, 64)
        out[rows] = x[rows] + y[rows]

    result, blocks = jax.ShapeDtypeStruct(x.shape, x.dtype), x.shape[0] // 64
    return backend.kernel(kernel, out_type=result, grid=(blocks,), grid_names=("block",))(x, y)


def by_pallas_call(x, y):
    """The same, as JAX before 0.11.2 takes it."""
    from jax.experimental.pallas import mosaic_gpu as backend

    return added(x, y, backend.CompilerParams())


def default(x, y):
    """The same, with what JAX takes where nothing is said."""
    return added(x, y, None)


def added(x, y, compiler_params):
    def kernel(x, y, out):
        out[...] = x[...] + y[...]

    return pl.pallas_call(
        kernel,
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0] // 64,),
        in_specs=[ROWS(), ROWS()],
        out_specs=ROWS(),
        compiler_params=compiler_params,
    )(x, y)


def small(x):
    """Through float8, which Triton has no instructions for on an A100."""
    from jax.experimental.pallas import triton as backend

    def kernel(x, out):
        out[...] = x[...].astype(jnp.float8_e4m3fn).astype(x.dtype)

    return pl.pallas_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), compiler_params=backend.CompilerParams())(x)
