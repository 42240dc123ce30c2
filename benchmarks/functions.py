"""Functions of three sizes to start, and two that are nothing but a call."""

from typing import Any

import jax
import jax.export
import jax.numpy as jnp

LAYERS, WIDTH, HEADS, LENGTH = 24, 64, 4, 16


def mlp(params: dict[str, Any], x: jax.Array) -> jax.Array:
    """A perceptron of three layers."""
    x = jax.nn.gelu(x @ params["first"])
    x = jax.nn.gelu(x @ params["second"])
    return x @ params["last"]


def block(params: dict[str, Any], x: jax.Array) -> jax.Array:
    """One block of a transformer, on f32[position,width]: attention and a perceptron, each behind a normalization."""
    heads = (x.shape[0], HEADS, -1)
    h = _normalized(x)
    query, key, value = (jnp.reshape(h @ params[name], heads) for name in ("query", "key", "value"))
    scores = jnp.einsum("qhd,khd->hqk", query, key) / query.shape[-1] ** 0.5
    scores = jnp.where(jnp.tri(x.shape[0], dtype=bool), scores, -1e9)
    attended = jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores), value)
    x = x + attended.reshape(x.shape) @ params["out"]
    return x + jax.nn.gelu(_normalized(x) @ params["up"]) @ params["down"]


def model(params: list[dict[str, Any]], x: jax.Array) -> jax.Array:
    """24 blocks, written out: each has a separate array for each weight."""
    for layer in params:
        x = block(layer, x)
    return x


def scalar(x: jax.Array) -> jax.Array:
    """A call, and one addition."""
    return x + 1


def tree(params: dict[str, dict[str, jax.Array]]) -> dict[str, dict[str, jax.Array]]:
    """As many additions as there are leaves."""
    return jax.tree.map(lambda leaf: leaf + 1, params)


def sized_mlp_avals() -> tuple[Any, ...]:
    """Arguments of `mlp`, for any number of rows."""
    params = {"first": _array((WIDTH, 256)), "second": _array((256, 256)), "last": _array((256, 16))}
    return params, _array(jax.export.symbolic_shape(f"rows, {WIDTH}"))


def block_avals() -> tuple[Any, ...]:
    """Arguments of `block`."""
    square, wide = (WIDTH, WIDTH), (WIDTH, 4 * WIDTH)
    shapes = {"query": square, "key": square, "value": square, "out": square, "up": wide, "down": wide[::-1]}
    return {name: _array(shape) for name, shape in shapes.items()}, _array((LENGTH, WIDTH))


def model_avals() -> tuple[Any, ...]:
    """Arguments of `model`."""
    params, x = block_avals()
    return [params] * LAYERS, x


def sized_model_avals() -> tuple[Any, ...]:
    """Arguments of `model`, for any number of rows."""
    params, _ = model_avals()
    return params, _array(jax.export.symbolic_shape(f"rows, {WIDTH}"))


def scalar_avals() -> tuple[Any, ...]:
    """Arguments of `scalar`."""
    return (_array(()),)


def tree_avals() -> tuple[Any, ...]:
    """Arguments of `tree`: 20 x 10 leaves."""
    return ({f"part{i:02}": {f"weight{j}": _array((4,)) for j in range(10)} for i in range(20)},)


def _array(shape: tuple[Any, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _normalized(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
