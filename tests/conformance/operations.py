"""JAX's operations by kind, in programs for all platforms or for those that JAX can lower them for."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint

from tests.conformance.programs import LINE, mesh_of

PLATFORMS = ("cpu", "cuda", "tpu")
X = np.linspace(0.1, 0.9, 12, dtype=np.float32).reshape(3, 4)
I = np.arange(12, dtype=np.int32).reshape(3, 4)  # noqa: E741
B = I % 2 == 0
SQUARE = np.eye(4, dtype=np.float32) * 3 + 1
ANGLES = "abs acos acosh asin asinh atan atanh cos cosh sin sinh tan tanh ceil floor round sign neg is_finite"
POWERS = "exp exp2 expm1 log log1p logistic cbrt sqrt rsqrt square reciprocal"
SPECIAL = "bessel_i0e bessel_i1e digamma erf erfc erf_inv lgamma"
BINARY = "add atan2 complex div eq ge gt igamma igammac le lt max min mul ne nextafter polygamma pow rem sub zeta"
OF_INTEGERS = "bitwise_and bitwise_or bitwise_xor div rem shift_left shift_right_arithmetic shift_right_logical"
SCALES: Any = np.ones((1, 3, 1), jnp.float8_e8m0fnu)
DTYPES = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int4", "int8", "uint32", "bool", "complex64")


def each(names: str) -> Callable[..., Any]:
    return lambda *arrays: [getattr(lax, name)(*arrays) for name in names.split()]


def together(x: Any) -> Any:
    """On four devices, each with a part of the rows."""

    def function(x: Any) -> Any:
        return (
            lax.psum(x, "d"),
            lax.pmax(x, "d"),
            lax.pmin(x, "d"),
            lax.pmean(x, "d"),
            lax.all_gather(x, "d"),
            lax.ppermute(x, "d", [(0, 1), (1, 0)]),
            lax.all_to_all(x, "d", 1, 0, tiled=True),
            lax.psum_scatter(x, "d", scatter_dimension=1, tiled=True),
            lax.axis_index("d"),
        )

    mapped: Any = jax.shard_map(function, mesh=mesh_of(LINE), in_specs=jax.P("d"), out_specs=jax.P(), check_vma=False)
    return mapped(x)


@functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("kept"))
def named(x: Any) -> Any:
    return checkpoint_name(jnp.sin(x), "kept").sum()


class Operations(NamedTuple):
    """A program of operations. calls: custom calls in it that JAX promises nothing for. platforms: that it is for."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    calls: tuple[str, ...] = ()
    platforms: tuple[str, ...] = PLATFORMS


OPERATIONS: dict[str, Operations] = {
    "rounding and angles": Operations(each(ANGLES), (X,)),
    "powers": Operations(each(POWERS), (X,)),
    "special functions": Operations(each(SPECIAL), (X,)),
    "binary": Operations(each(BINARY), (X, X)),
    "binary, of integers": Operations(each(OF_INTEGERS), (I, I + 1)),
    "bits": Operations(
        lambda x: (lax.population_count(x), lax.clz(x), ~x, lax.bitcast_convert_type(x, jnp.float32)), (I,)
    ),
    "ternary": Operations(
        lambda x, p: (lax.clamp(0.2, x, 0.8), lax.select(p, x, -x), lax.betainc(x, x, x)),
        (X, B),
    ),
    "complex numbers": Operations(
        lambda x: (z := lax.complex(x, x), z.conj(), z.real, z.imag, jnp.exp(z), abs(z), jnp.sqrt(z)), (X,)
    ),
    "conversions": Operations(lambda x: [x.astype(dtype) for dtype in DTYPES] + [lax.reduce_precision(x, 5, 3)], (X,)),
    "reductions": Operations(
        lambda x, i: (
            x.sum(0),
            x.max(1),
            x.prod(),
            x.argmax(1),
            x.argmin(0),
            x.min(0),
            lax.reduce(x, 0.0, lambda a, b: a * 2 + b, (0,)),
            (x > 0.5).all(),
            (i > 2).any(),
            lax.reduce_xor(i, (0,)),
        ),
        (X, I),
    ),
    "cumulative sums": Operations(
        lambda x: (jnp.cumsum(x, 1), lax.cumprod(x, 0), lax.cummax(x, 1), lax.cummin(x), lax.cumlogsumexp(x, 1)),
        (X,),
    ),
    "windows": Operations(
        lambda x: (
            lax.reduce_window(x, -np.inf, lax.max, (2, 2), (1, 1), "SAME"),
            lax.reduce_window(x, 0.0, lax.add, (2, 2), (1, 1), "SAME"),
            lax.reduce_window(x, 0.0, lambda a, b: a * 2 + b, (2, 2), (1, 1), "SAME"),
            jax.jvp(lambda x: lax.reduce_window(x, -np.inf, lax.max, (2, 2), (1, 1), "SAME"), (x,), (x,)),
            jax.grad(lambda x: lax.reduce_window(x, -np.inf, lax.max, (2, 2), (2, 2), "VALID").sum())(x),
            jnp.convolve(x[0], x[1]),
        ),
        (X,),
    ),
    "products": Operations(
        lambda x, y: (
            x @ y,
            jnp.einsum("ij,ik->jk", x, x),
            jnp.dot(x, y, precision="highest"),
            lax.dot_general(
                x.astype(jnp.bfloat16), y.astype(jnp.bfloat16), (((1,), (0,)), ((), ())), None, jnp.float32
            ),
            lax.ragged_dot(x, y[None], jnp.array([3])),
            lax.scaled_dot(x.astype(jnp.bfloat16), y.astype(jnp.bfloat16)),
        ),
        (X, SQUARE),
    ),
    "convolutions": Operations(
        lambda x, k: (
            lax.conv_general_dilated(x, k, (1, 1), "SAME"),
            lax.conv_transpose(x, k, (2, 2), "VALID", dimension_numbers=("NCHW", "OIHW", "NCHW")),
            jax.grad(lambda k: lax.conv(x, k, (1, 1), "SAME").sum())(k),
        ),
        (np.ones((1, 2, 4, 4), np.float32), np.ones((2, 2, 2, 2), np.float32)),
    ),
    "shapes": Operations(
        lambda x: (
            x.reshape(2, 6),
            x.T,
            jnp.broadcast_to(x, (2, 3, 4)),
            lax.rev(x, (0,)),
            jnp.tile(x, (2, 1)),
            jnp.stack([x, x]),
            jnp.unstack(x),
            lax.pad(x, 0.0, [(1, 0, 1), (0, -1, 0)]),
            lax.concatenate([x, x], 1),
            lax.expand_dims(x, (1,)),
            lax.split(x, (1, 2)),
            lax.iota(jnp.int32, 5),
        ),
        (X,),
    ),
    "slices": Operations(
        lambda x, i: (
            x[1:, ::2],
            lax.dynamic_slice(x, (i, i), (2, 2)),
            lax.dynamic_update_slice(x, x[:1] * 2, (i, 0)),
            x[jnp.array([2, 0]), i],
            jnp.take_along_axis(x, jnp.array([[0], [1], [2]]), 1),
            x.at[0].set(1.0),
            x.at[i].add(2.0),
            x.at[i].subtract(2.0),
            x.at[i].apply(jnp.sin),
            x.at[i].multiply(2.0),
            x.at[i].min(0.0),
            x.at[i].max(0.5),
        ),
        (X, np.int32(1)),
    ),
    "sorting": Operations(
        lambda x: (jnp.sort(x, 0), jnp.argsort(x, 1), lax.top_k(x, 2), lax.approx_max_k(x, 2), jnp.median(x)),
        (X,),
    ),
    "control flow": Operations(
        lambda x, i: (
            lax.cond(i > 0, jnp.sin, jnp.cos, x),
            lax.switch(i, [jnp.sin, jnp.cos, jnp.tan], x),
            lax.fori_loop(0, i, lambda _, x: x * 2, x),
            lax.while_loop(lambda x: x.sum() < 9, lambda x: x * 2, x),
            lax.scan(lambda c, row: (c + row, c.sum()), x[0], x),
            lax.map(jnp.sin, x),
            lax.associative_scan(jnp.add, x),
        ),
        (X, np.int32(1)),
    ),
    "decompositions": Operations(
        lambda a: (
            jnp.linalg.cholesky(a),
            jnp.linalg.qr(a),
            jnp.linalg.qr(a, mode="raw"),
            jnp.linalg.eigh(a),
            jnp.linalg.svd(a),
            lax.linalg.lu(a),
            lax.linalg.triangular_solve(a, a, left_side=True, lower=True),
            lax.linalg.householder_product(a, a[0]),
        ),
        (SQUARE,),
    ),
    "tridiagonal forms": Operations(lax.linalg.tridiagonal, (SQUARE,), platforms=("cpu", "cuda")),
    "eigenvectors of any matrix": Operations(jnp.linalg.eig, (SQUARE,), ("cuhybrid_eig_real",), ("cpu", "cuda")),
    "QR with pivots": Operations(
        lambda a: lax.linalg.qr(a, pivoting=True), (SQUARE,), ("lapack_sgeqp3_ffi", "cuhybrid_geqp3"), ("cpu", "cuda")
    ),
    "Schur and Hessenberg forms": Operations(
        lambda a: (lax.linalg.schur(a), lax.linalg.hessenberg(a)), (SQUARE,), platforms=("cpu",)
    ),
    "updates of decompositions": Operations(
        lambda a: (lax.linalg.cholesky_update(a, a[0]), lax.linalg.symmetric_product(a, a)),
        (SQUARE,),
        ("cu_cholesky_update_ffi", "cusolver_syrk_ffi"),
    ),
    "layouts": Operations(lambda x: with_layout_constraint(x, Layout((1, 0))), (X,), ("LayoutConstraint",)),
    "products of blocks": Operations(
        lambda x: jax.nn.scaled_matmul(x, x, SCALES, SCALES),
        (np.ones((1, 3, 4), jnp.float8_e4m3fn),),
        ("__op$block_scaled_dot",),
        ("cuda",),
    ),
    "solutions": Operations(
        lambda a: (
            jnp.linalg.solve(a, a[0]),
            jnp.linalg.det(a),
            jnp.linalg.inv(a),
            jax.scipy.linalg.expm(a),
            lax.linalg.tridiagonal_solve(a[0], a[1], a[2], a),
        ),
        (SQUARE,),
    ),
    "transforms": Operations(
        lambda x: (jnp.fft.fft(x), jnp.fft.ifft2(x), jnp.fft.irfft(jnp.fft.rfft(x)), jnp.fft.fftn(x)),
        (X,),
    ),
    "random numbers": Operations(
        lambda seed: (
            *(jax.random.normal(jax.random.key(seed, impl=one), (5,)) for one in ("threefry2x32", "rbg", "unsafe_rbg")),
            jax.random.split(jax.random.key(seed)).shape[0],
            jax.random.randint(jax.random.key(seed), (4,), 0, 9),
            jax.random.gamma(jax.random.key(seed), 2.0, (3,)),
            jax.random.permutation(jax.random.key(seed), 6),
            jax.random.bits(jax.random.clone(jax.random.fold_in(jax.random.key(seed), 3)), (3,), jnp.uint8),
            lax.rng_bit_generator(jnp.zeros(4, jnp.uint32), (3,)),
            lax.rng_uniform(0.0, 1.0, (3,)),
        ),
        (np.uint32(7),),
    ),
    "derivatives": Operations(
        lambda x: (
            jax.grad(lambda x: jax.nn.softmax(x).sum())(x),
            jax.jacfwd(jnp.sin)(x[0]),
            jax.hessian(lambda x: (x**3).sum())(x[0]),
            jax.grad(lambda x: jax.checkpoint(jnp.tanh)(x).sum())(x),
            jax.grad(lambda x: jax.nn.relu(x).sum())(x),
            jax.grad(named)(x),
            jax.grad(lambda a: lax.igamma(a, x).sum())(x),
            jax.custom_derivatives.linear_call(lambda _, x: x * 2, lambda _, t: t * 2, (), x),
        ),
        (X,),
    ),
    "others": Operations(
        lambda x: (
            lax.composite(jnp.sin, "my.sin")(x),
            lax.optimization_barrier(x),
            lax.stop_gradient(x),
            jax.device_put(x),
            lax.platform_dependent(x, cpu=jnp.sin, tpu=jnp.cos, default=jnp.tan),
            lax.custom_linear_solve(lambda v: v * 2, x, lambda _, b: b / 2),
            lax.with_sharding_constraint(x, jax.sharding.SingleDeviceSharding(jax.devices()[0])),
        ),
        (X,),
    ),
    "collectives": Operations(together, (np.ones((16, 16), np.float32),)),
    "functions of jax.nn": Operations(
        lambda x: (jax.nn.gelu(x), jax.nn.logsumexp(x), jax.nn.dot_product_attention(*[x[None, :, None]] * 3)),
        (X,),
    ),
}


def as_markdown() -> list[str]:
    """Return the part of docs/conformance.md that lists them."""
    found: dict[str, list[str]] = {}
    for kind, program in OPERATIONS.items():
        found.setdefault(", ".join(program.platforms), []).append(kind)
    return [
        "## Operations, for every platform",
        "",
        "The tests can compare results only on this machine. For each platform, they compare the portable text of an",
        "artifact with that of the module that `jax.jit` lowers for it:",
        "",
        *(f"- {platforms}: {'; '.join(kinds)}" for platforms, kinds in found.items()),
        "",
        "For an export, JAX lowers some operations in an older form, so that the JAX of last month can read them",
        "(https://docs.jax.dev/en/latest/export/export.html#compatibility-guarantees). No operation in this list has",
        "one. Pallas kernels have: the artifact has the older form, and executables are made of what `jax.jit` lowers",
        "for their device.",
        "",
    ]
