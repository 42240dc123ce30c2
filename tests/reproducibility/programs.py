"""Programs that may bring disorder into XLA's bytes: name -> (function, avals). One line of XLA's features each."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

N, LARGE = 16, 512
MATRIX = jax.ShapeDtypeStruct((N, N), jnp.float32)
VECTOR = jax.ShapeDtypeStruct((N,), jnp.float32)
INTEGERS = jax.ShapeDtypeStruct((N,), jnp.int32)
BYTES = jax.ShapeDtypeStruct((4 * N,), jnp.uint8)
SEED = jax.ShapeDtypeStruct((2,), jnp.uint32)
IMAGE = jax.ShapeDtypeStruct((2, 12, 12, 3), jnp.float32)
CONSTANT = np.random.default_rng(0).normal(size=(LARGE, LARGE)).astype(np.float32)


def newton(x):
    return lax.fori_loop(0, 50, lambda _, y: y - (y * y - x) / (2 * y), jnp.ones_like(x))


def nested_loops(x):
    def inner(y):
        return lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, jnp.sin(c[1]) + y), (0, y))[1]

    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, inner(c[1])), (0, x))[1]


def conditional(x):
    return lax.cond(x.sum() > 0, jnp.sin, lambda y: lax.cond(y[0] > 1, jnp.cos, jnp.tanh, y), x)


def network(x):
    for layer in range(12):
        x = jax.nn.gelu(x @ jnp.full((N, N), 0.01 * layer)) + x
    return jax.nn.log_softmax(x)


def attention(x):
    weights = jax.nn.softmax(jnp.where(jnp.tri(N, dtype=bool), x @ x.T, -jnp.inf))
    return weights @ x


def recurrent(x):
    return lax.scan(lambda h, row: (jnp.tanh(h @ x + row), h), x[0], x)


def convolve(x):
    kernel = jnp.ones((3, 3, 3, 4), x.dtype)
    y = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return lax.reduce_window(jax.nn.relu(y), -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


# Four devices, which no build needs to have.
MESH = jax.sharding.AbstractMesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
SPLIT = jax.ShapeDtypeStruct((N, N), jnp.float32, sharding=jax.sharding.NamedSharding(MESH, P("d")))


def on_devices(function, out_spec=P("d")):  # noqa: B008 - a PartitionSpec is immutable
    return jax.shard_map(function, mesh=MESH, in_specs=P("d"), out_specs=out_spec)


def exchange(x):
    return lax.ppermute(x, "d", [(i, (i + 1) % 4) for i in range(4)])


def constrained(x):
    split = lambda x, *axes: lax.with_sharding_constraint(x, jax.sharding.NamedSharding(MESH, P(*axes)))  # noqa: E731
    return split(split(x, "d", None) @ split(x, None, "d"), "d", None)


PROGRAMS = {
    "elementwise": (lambda x: jnp.exp(jnp.tanh(x)) + jnp.log1p(x * x), [MATRIX]),
    "special_functions": (lambda x: (lax.erf(x), lax.lgamma(x), lax.digamma(x), lax.erf_inv(x)), [VECTOR]),
    "trigonometric": (lambda x: (jnp.sin(x), jnp.arctan2(x, x + 1), jnp.sinh(x)), [VECTOR]),
    "matmul": (lambda x: x @ x.T, [jax.ShapeDtypeStruct((LARGE, LARGE), jnp.float32)]),
    "einsum": (lambda x: jnp.einsum("ij,jk,lk->il", x, x, x), [MATRIX]),
    "int8_dot": (lambda x: jnp.dot(x.astype(jnp.int32), x.astype(jnp.int32)), [BYTES]),
    "reductions": (lambda x: (x.sum(0), x.max(1), x.argmin(), jnp.prod(x), x.std()), [MATRIX]),
    "cumulative": (lambda x: (jnp.cumsum(x), lax.cummax(x), jnp.cumprod(x)), [VECTOR]),
    "softmax_grad": (jax.grad(lambda x: jax.nn.log_softmax(x)[0].sum()), [MATRIX]),
    "mlp_grad": (jax.value_and_grad(lambda x: (jnp.tanh(x @ x) @ x).sum()), [MATRIX]),
    "network": (network, [MATRIX]),
    "attention": (attention, [MATRIX]),
    "recurrent": (recurrent, [MATRIX]),
    "convolution": (convolve, [IMAGE]),
    "convolution_grad": (jax.grad(lambda x: convolve(x).sum()), [IMAGE]),
    "fft": (lambda x: jnp.fft.ifft2(jnp.fft.fft2(x) * 2), [MATRIX]),
    "sort": (lambda x: (jnp.sort(x), jnp.argsort(x), lax.sort((x, -x), num_keys=1)), [VECTOR]),
    "top_k": (lambda x: lax.top_k(x, 3), [MATRIX]),
    "median": (lambda x: (jnp.median(x, axis=0), jnp.quantile(x, 0.3)), [MATRIX]),
    "scatter": (lambda x, i: x.at[i % N].add(1.0), [VECTOR, INTEGERS]),
    "scatter_set": (lambda x, i: x.at[i % N, ::2].set(3.0), [MATRIX, INTEGERS]),
    "gather": (lambda x, i: jnp.take(x, i % N, axis=0), [MATRIX, INTEGERS]),
    "segment_sum": (lambda x, i: jax.ops.segment_sum(x, i % 4, 4), [MATRIX, INTEGERS]),
    "unique": (lambda x: jnp.unique(x, size=N), [INTEGERS]),
    "newton": (newton, [VECTOR]),
    "nested_loops": (nested_loops, [VECTOR]),
    "conditional": (conditional, [VECTOR]),
    "switch": (lambda x, i: lax.switch(i[0], [jnp.sin, jnp.cos, jnp.tanh], x), [VECTOR, INTEGERS]),
    "scan_in_map": (lambda x: lax.map(lambda row: lax.associative_scan(jnp.add, row), x), [MATRIX]),
    "normal": (lambda s: jax.random.normal(jax.random.wrap_key_data(s), (N, N)), [SEED]),
    "categorical": (lambda s, x: jax.random.categorical(jax.random.wrap_key_data(s), x), [SEED, MATRIX]),
    "permutation": (lambda s: jax.random.permutation(jax.random.wrap_key_data(s), N), [SEED]),
    "gamma": (lambda s: jax.random.gamma(jax.random.wrap_key_data(s), 2.0, (N,)), [SEED]),
    "cholesky": (lambda x: jnp.linalg.cholesky(x @ x.T + N * jnp.eye(N)), [MATRIX]),
    "svd": (lambda x: tuple(jnp.linalg.svd(x)), [MATRIX]),
    "eigh": (lambda x: tuple(jnp.linalg.eigh(x + x.T)), [MATRIX]),
    "solve": (lambda x, b: (jnp.linalg.solve(x, b), jnp.linalg.det(x)), [MATRIX, VECTOR]),
    "qr": (lambda x: tuple(jnp.linalg.qr(x)), [MATRIX]),
    "expm": (jax.scipy.linalg.expm, [MATRIX]),
    "large_constant": (lambda x: x @ CONSTANT, [jax.ShapeDtypeStruct((4, LARGE), jnp.float32)]),
    "byte_shuffles": (lambda x: (x[::-1] << 3) | (x.reshape(4, -1).T.ravel() >> 5), [BYTES]),
    "bits": (lambda x: (lax.population_count(x), lax.clz(x), x ^ (x >> 7)), [INTEGERS]),
    "half_precision": (lambda x: (x.astype(jnp.bfloat16) @ x.astype(jnp.bfloat16)).astype(jnp.float16), [MATRIX]),
    "complex": (lambda x: jnp.exp(1j * x) * jnp.conj(x + 1j), [VECTOR]),
    "all_reduce": (on_devices(lambda x: lax.psum(x, "d"), P()), [SPLIT]),
    "all_gather": (on_devices(lambda x: lax.all_gather(x, "d").sum(0)), [SPLIT]),
    "reduce_scatter": (on_devices(lambda x: lax.psum_scatter(x.T, "d", tiled=True)), [SPLIT]),
    "all_to_all": (on_devices(lambda x: lax.all_to_all(x, "d", 1, 0, tiled=True)), [SPLIT]),
    "permute": (on_devices(exchange), [SPLIT]),
    "partitioned_matmul": (constrained, [SPLIT]),
    "partitioned_grad": (jax.grad(lambda x: on_devices(lambda y: jnp.tanh(lax.pmean(y, "d")))(x).sum()), [SPLIT]),
    "dynamic_slices": (lambda x, i: lax.dynamic_update_slice(x, x[:3, :3], (i[0], i[1])), [MATRIX, INTEGERS]),
}
