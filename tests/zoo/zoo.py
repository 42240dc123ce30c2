"""Functions that between them use what a model may use: built once for many tests."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


def mlp(params, x):
    return jax.nn.softmax(jnp.tanh(x @ params["w"] + params["b"]))


def attention(x):
    scores = jnp.einsum("bqd,bkd->bqk", x, x) / 8**0.5
    return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), x)


def loop(x):
    def body(carry, _):
        carry = jnp.sin(carry) + 0.1
        return carry, carry.sum()

    return lax.scan(body, x, length=5), lax.while_loop(lambda v: v[0] < 10, lambda v: v * 1.5 + 1, x)


def factorize(a):
    spd = a @ a.T + 5 * jnp.eye(5)
    return jnp.linalg.cholesky(spd), jnp.linalg.eigh(spd)[0], jnp.linalg.inv(spd), jnp.linalg.svd(a)[1]


def fourier(x):
    return jnp.fft.ifft(jnp.fft.fft(x) * 2), jnp.sort(x.real)


def draw(key):
    return jax.random.normal(key, (4,)), jax.random.randint(key, (3,), 0, 100)


def narrow(a, b, c, empty):
    return {"a": a * 2, "b": b + 1, "c": ~c, "none": None, "empty": empty.sum(axis=0), "pair": [a[0], (b,)]}


def update(state, delta):
    return jax.tree.map(lambda x: x + delta, state)


def update_avals():
    return {"x": jax.ShapeDtypeStruct((4,), jnp.float32), "y": [jax.ShapeDtypeStruct((), jnp.float32)]}, jnp.float32(0)


def named(x, unused, *, shift, power):
    return x**power + shift


class Point(NamedTuple):
    x: jax.Array
    y: jax.Array


@functools.partial(jax.tree_util.register_dataclass, data_fields=["mean", "points"], meta_fields=["unit"])
@dataclasses.dataclass(frozen=True)
class Cloud:
    mean: jax.Array
    points: list[Point]
    unit: str


def typed(cloud, shift):
    points = [Point(p.x + shift, p.y - shift) for p in cloud.points]
    return Cloud(sum(p.x for p in points) / len(points), points, cloud.unit)


def typed_avals():
    vector = jax.ShapeDtypeStruct((3,), jnp.float32)
    return Cloud(vector, [Point(vector, vector)] * 2, "m"), jnp.float32(0)


def precise(x):
    return x @ x


def sharded(params, x):
    """Arrays split over 4 devices: the axes of the mesh in the manifest."""
    total = jax.shard_map(lambda part: jax.lax.psum(part, "data"), in_specs=jax.P("data"), out_specs=jax.P())(x)
    y = jax.lax.with_sharding_constraint(x @ params["w"], jax.P("data", "model"))
    return {"y": y + params["b"], "total": total}


def from_file(params, x):
    return params["dense"]["kernel"] @ x + params["dense"]["bias"]


def pooled(x, *, valid):
    """Rows and their mean; padding does not count in it."""
    total = jnp.sum(jnp.where(valid[:, None], x, 0), axis=0)
    return {"rows": x * 2, "mean": total / jnp.sum(valid)}


def halves(x):
    """Arrays split over 2 devices."""
    return x + 1, jax.shard_map(lambda part: jax.lax.psum(part, "d"), in_specs=jax.P("d"), out_specs=jax.P())(x)
