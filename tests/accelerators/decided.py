"""Functions whose optimized programs are run on CPUs: one of each kind that compilers of devices treat in their way."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

# Layers.


def mlp(params, x):
    return jax.nn.gelu(x @ params["up"] / 8 + params["bias"]) @ params["down"] / 16


def layer_norm(x, scale):
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-5) * scale


def rms_norm(x, scale):
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype) * scale


def cross_entropy(logits, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).mean()


def attention(q, k, v):
    return jax.nn.dot_product_attention(q, k, v)


def causal_attention(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def _block(params, x):
    params = {name: values if name == "scale" else values / 8 for name, values in params.items()}
    heads = params["qkv"].shape[1] // 3 // 16
    x = layer_norm(x, params["scale"])
    q, k, v = (part.reshape(*part.shape[:2], heads, 16) for part in jnp.split(x @ params["qkv"], 3, -1))
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(*x.shape[:2], -1)
    x = x + mixed @ params["out"]
    return x + jax.nn.silu(x @ params["up"]) @ params["down"]


def transformer(params, x):
    return _block(params, x)


def transformer_step(params, x):
    loss, gradients = jax.value_and_grad(lambda params: (_block(params, x) ** 2).mean())(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss


def adam_step(state, x, y):
    params, first, second, count = state

    def loss(params):
        return ((jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2).mean()

    value, gradients = jax.value_and_grad(loss)(params)
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, gradients)
    second = jax.tree.map(lambda m, g: 0.99 * m + 0.01 * g * g, second, gradients)
    params = jax.tree.map(lambda p, m, s: p - 0.01 * m / (jnp.sqrt(jnp.abs(s)) + 0.1), params, first, second)
    return (params, first, second, count + 1), value


# Convolutions and windows.


def _convolve(x, w, **options):
    options = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC"), **options}
    return lax.conv_general_dilated(x, w, **options)


def convolution(x, w):
    return jax.nn.relu(_convolve(x, w))


def strided_convolution(x, w):
    return _convolve(x, w, window_strides=(2, 2), padding=((1, 2), (0, 1)), rhs_dilation=(1, 2))


def grouped_convolution(x, w):
    return _convolve(x, w, feature_group_count=4)


def depthwise_convolution(x, w):
    return _convolve(x, w, feature_group_count=x.shape[-1])


def transposed_convolution(x, w):
    return lax.conv_transpose(x, w, (2, 2), "SAME")


def convolution_gradients(x, w):
    return jax.grad(lambda x, w: (_convolve(x, w, window_strides=(2, 2)) ** 2).sum(), (0, 1))(x, w)


def convolution_1d(x, w):
    return lax.conv_general_dilated(x, w, (1,), ((2, 0),), dimension_numbers=("NWC", "WIO", "NWC"))


def convolution_3d(x, w):
    return lax.conv_general_dilated(x, w, (1, 1, 1), "VALID", dimension_numbers=("NDHWC", "DHWIO", "NDHWC"))


def residual(x, first, second, scale):
    y = jax.nn.relu(_convolve(x, first) * scale)
    return jax.nn.relu(x + _convolve(y, second))


def pooling(x):
    window, strides = (1, 3, 3, 1), (1, 2, 2, 1)
    most = lax.reduce_window(x, -jnp.inf, lax.max, window, strides, "SAME")
    return most, lax.reduce_window(x, 0.0, lax.add, window, strides, "VALID") / 9


def pooling_gradient(x):
    return jax.grad(
        lambda x: (lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") ** 2).sum()
    )(x)


# Loops and branches.


def lstm(w, h, xs):
    def step(carry, x):
        h, c = carry
        i, f, g, o = jnp.split(jnp.concatenate([x, h], -1) @ w, 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    return lax.scan(step, (h, jnp.zeros_like(h)), xs)


def lstm_gradient(w, h, xs):
    return jax.grad(lambda w: (lstm(w, h, xs)[1] ** 2).mean())(w)


def newton(x):
    x = jnp.abs(x) + 0.5
    return lax.while_loop(
        lambda s: jnp.abs(s[0] * s[0] - s[1]).max() > 1e-4, lambda s: ((s[0] + x / s[0]) / 2, x), (x, x)
    )[0]


def branches(n, x):
    return lax.switch(n, [jnp.sin, lambda x: x @ x, lambda x: x.T, jnp.exp], x)


def cache_update(cache, new, at):
    cache = lax.dynamic_update_slice(cache, new, (0, at, 0))
    return cache, lax.dynamic_slice(cache, (0, at, 0), (cache.shape[0], 4, cache.shape[2])).sum(1)


def recurrence(a, b):
    return lax.associative_scan(lambda x, y: (x[0] * y[0], x[1] * y[0] + y[1]), (jax.nn.sigmoid(a), b), axis=1)[1]


def cumulative(x):
    return jnp.cumsum(x, 1), lax.cummax(x, 0), jnp.cumprod(1 + x / 64, 1)


# Sorts, gathers, reductions.


def sorting(x):
    return jnp.sort(x, 0), jnp.argsort(x, 1), lax.sort((jnp.abs(x) // 1, x), dimension=1, num_keys=2)


def top(x):
    return lax.top_k(x, 8)


def embedding(table, tokens, w):
    def loss(table):
        return (table[tokens * 3 + jnp.arange(tokens.shape[1])] * w).sum()

    return loss(table), jax.grad(loss)(table)


def segments(x, of):
    of = (of + jnp.arange(of.shape[0])) % 7
    return jax.ops.segment_sum(x, of, 7), jax.ops.segment_max(x, of, 7), jnp.bincount(of, length=7)


def reductions(x):
    return x.sum((0, 2)), x.argmax(1), jax.nn.logsumexp(x, 2), x.prod(1), jnp.any(x > 2, (0, 1)), x.std()


def shapes(x):
    tiles = jnp.concatenate([jnp.pad(x[::-1], ((0, 0), (1, 2))), jnp.tile(x, (1, 2))[:, : x.shape[1] + 3]])
    return tiles.reshape(4, -1, 5, 7).transpose(2, 0, 3, 1), jnp.roll(x, 3, 1), jnp.where(jnp.eye(*x.shape) > 0, x, 0)


def life(x):
    around = sum(jnp.roll(x, (i, j), (0, 1)) for i in (-1, 0, 1) for j in (-1, 0, 1) if i or j)
    return ((around == 3) | ((around == 2) & (x == 1))).astype(x.dtype)


# Linear algebra.


def products(a, b):
    return jnp.einsum("bij,bkj->bik", a, b), jnp.einsum("bij,bik->bjk", a, b), jnp.einsum("bij,bij->b", a, b)


def long_product(a, b):
    """Few rows and columns, and a long sum: split-K."""
    return a @ b


def low_precision(a, b):
    return a @ b, (a @ b).astype(jnp.float32) * 2


def integers(a, b):
    return (
        lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32),
        a // 3,
        a.astype(jnp.int32) << 3,
    )


def complexes(a, b):
    return a @ b, jnp.abs(a), jnp.conj(a) * jnp.exp(b)


def eighths(a, b):
    narrow = a.astype(jnp.float8_e4m3fn), b.astype(jnp.float8_e4m3fn)
    return lax.dot_general(*narrow, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def fourier(x):
    return jnp.fft.rfft(x), jnp.fft.ifft2(x * (1 + 1j)), jnp.fft.irfft(jnp.fft.rfft(x) * 2)


def _definite(x):
    return x @ x.T / x.shape[0] + 2 * jnp.eye(x.shape[0])


def cholesky(x, y):
    factor = jnp.linalg.cholesky(_definite(x))
    return factor, jax.scipy.linalg.solve_triangular(factor, y, lower=True)


def solve(x, y):
    return jnp.linalg.solve(_definite(x), y)


def orthogonal(x):
    q, r = jnp.linalg.qr(x)
    return jnp.abs(q), jnp.abs(r)


def eigenvalues(x):
    values, vectors = jnp.linalg.eigh(_definite(x))
    return values, vectors * values @ vectors.T


def singular(x):
    u, s, v = jnp.linalg.svd(x, full_matrices=False)
    return s, u * s @ v


# Random numbers.


def dropout(x):
    keys = jax.random.split(jax.random.key(7))
    return jnp.where(jax.random.bernoulli(keys[0], 0.9, x.shape), x, 0), jax.random.normal(keys[1], x.shape)


def shuffled(x):
    return jax.random.permutation(jax.random.key(3), x)


# Split over the devices of a mesh; axes are named data and model.


def sharded_step(params, x, y):
    def loss(params):
        return ((jax.nn.gelu(x @ params["up"] / 8) @ params["down"] / 8 - y) ** 2).mean()

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def sharded_transformer(params, x):
    return transformer_step(params, x)


def _on_mesh(**specs):
    def decorate(function):
        @functools.wraps(function)
        def mapped(*args):
            return jax.shard_map(function, **specs)(*args)

        return mapped

    return decorate


@_on_mesh(in_specs=P("data", "model"), out_specs=(P("model", "data"), P("data", "model"), P("data")))
def exchanges(x):
    swapped = lax.all_to_all(x, "data", 1, 0, tiled=True)
    whole = lax.all_gather(swapped, "model", axis=1, tiled=True)
    scattered = lax.psum_scatter(whole, "data", scatter_dimension=0, tiled=True)
    size = lax.axis_size("data")
    ring = lax.ppermute(x, "data", [(i, (i + 1) % size) for i in range(size)])
    return lax.psum(scattered, "model").T, ring * lax.axis_index("model"), lax.pmax(x, "model")


@_on_mesh(in_specs=(P("data"), P()), out_specs=P("data"))
def ring_attention(q, w):
    size = lax.axis_size("data")
    k, total, weight = q @ w, jnp.zeros_like(q), jnp.zeros(q.shape[:1])
    weight = lax.pcast(weight, "data", to="varying")

    def step(_, carry):
        k, total, weight = carry
        scores = jnp.exp(jnp.tanh(q @ k.T))
        total, weight = total + scores @ k, weight + scores.sum(1)
        return lax.ppermute(k, "data", [(i, (i + 1) % size) for i in range(size)]), total, weight

    _, total, weight = lax.fori_loop(0, size, step, (k, total, weight))
    return total / weight[:, None]


def experts(x, gate, w):
    """Each token goes to one expert; experts are split over devices."""
    chosen = jax.nn.one_hot((x @ gate).argmax(-1), gate.shape[1], dtype=x.dtype)
    sent = jnp.einsum("td,te->etd", x, chosen)
    return jnp.einsum("etd,edf->tf", sent, w)
