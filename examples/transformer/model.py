"""A decoder-only language model, its training and its inference.

Normalization by root mean square, rotary embeddings, grouped-query attention, SwiGLU; AdamW. No size is written here:
all are those of the arrays, which `avals.py` makes up. Arrays are split over a mesh with the axes data and model where
there is one, and the same functions run on one device where there is none.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

MEAN_DECAY, VARIANCE_DECAY, WEIGHT_DECAY = 0.9, 0.95, 0.1
WAVELENGTH = 10_000.0
"""The longest of the rotary embeddings, in tokens, but for a factor of 2 pi."""


class State(NamedTuple):
    """What training changes: parameters, and AdamW's decaying mean and variance of their gradients (all f32)."""

    params: dict[str, Any]
    mean: dict[str, Any]
    variance: dict[str, Any]
    step: jax.Array


class Cache(NamedTuple):
    """What attention has seen: keys and values bf16[layer,sequence,position,kv_head,head]; `length` positions count."""

    keys: jax.Array
    values: jax.Array
    length: jax.Array


def init(
    seed: jax.Array, vocabulary: int, width: int, layers: int, heads: int, kv_heads: int, head: int, hidden: int
) -> State:
    """Return a new training state from a seed (u32[]).

    "columns" and "rows" are the weights of all layers, called by how Megatron splits them over the axis model: a
    product with the former ends split, and one with the latter takes that and ends in a sum over the devices.
    """
    shapes = {
        "embedding": (vocabulary, width),
        "columns": {
            "query": (layers, width, heads, head),
            "key": (layers, width, kv_heads, head),
            "value": (layers, width, kv_heads, head),
            "gate": (layers, width, hidden),
            "up": (layers, width, hidden),
        },
        "rows": {"attention": (layers, heads * head, width), "mlp": (layers, hidden, width)},
    }
    shapes, structure = jax.tree.flatten(shapes, is_leaf=lambda node: isinstance(node, tuple))
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    weights = [0.02 * jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]
    norms = {"attention": jnp.ones((layers, width)), "mlp": jnp.ones((layers, width)), "last": jnp.ones(width)}
    params = jax.tree.unflatten(structure, weights) | {"norms": norms}
    zeros = jax.tree.map(jnp.zeros_like, params)
    return State(params, zeros, zeros, jnp.int32(0))


def train_step(state: State, tokens: jax.Array, rate: jax.Array) -> tuple[State, jax.Array]:
    """Take one step of AdamW on a batch (i32[sequence,position]) at a rate (f32[]); return the loss before it too."""
    loss, gradient = jax.value_and_grad(mean_loss)(state.params, tokens)
    step = state.step + 1
    mean = jax.tree.map(lambda m, g: MEAN_DECAY * m + (1 - MEAN_DECAY) * g, state.mean, gradient)
    variance = jax.tree.map(lambda v, g: VARIANCE_DECAY * v + (1 - VARIANCE_DECAY) * g**2, state.variance, gradient)

    def updated(param: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        m, v = m / (1 - MEAN_DECAY**step), v / (1 - VARIANCE_DECAY**step)
        return param - rate * (m / (jnp.sqrt(v) + 1e-8) + WEIGHT_DECAY * param)

    return State(jax.tree.map(updated, state.params, mean, variance), mean, variance, step), loss


def mean_loss(params: dict[str, Any], tokens: jax.Array) -> jax.Array:
    """Return the mean of -log p(token | those before it), over all tokens but the first of each sequence."""
    logits = forward(params, tokens)[0][:, :-1]
    chosen = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=2)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=2) - chosen)


def prefill(params: dict[str, Any], cache: Cache, tokens: jax.Array) -> tuple[jax.Array, Cache]:
    """Read a piece of each prompt (i32[sequence,position]); return the logits of what follows, and the cache."""
    logits, cache = forward(params, tokens, cache)
    return logits[:, -1], cache


def decode(params: dict[str, Any], cache: Cache, tokens: jax.Array) -> tuple[jax.Array, Cache]:
    """Read one token of each sequence (i32[sequence]); return the logits of the next, and the cache."""
    return prefill(params, cache, tokens[:, None])


def forward(params: dict[str, Any], tokens: jax.Array, cache: Cache | None = None) -> tuple[jax.Array, Cache | None]:
    """Return logits f32[sequence,position,vocabulary] for i32[sequence,position], behind what the cache has."""
    positions = jnp.arange(tokens.shape[1]) + (0 if cache is None else cache.length)
    embedding = split(params["embedding"].astype(jnp.bfloat16), "model")
    norms = dict(params["norms"])
    last = norms.pop("last")
    layers = {"columns": params["columns"], "rows": params["rows"], "norms": norms}

    # Backwards, a layer is computed again from its input: of all that it computes, only that is kept.
    @jax.checkpoint
    def layer(carry: tuple, weights: dict[str, Any]) -> tuple[tuple, None]:
        x, keys, values, index = carry
        # Over the axis data weights are split where they are kept, and whole where they are used.
        columns = jax.tree.map(lambda w: split(w.astype(jnp.bfloat16), None, "model"), weights["columns"])
        rows = jax.tree.map(lambda w: split(w.astype(jnp.bfloat16), "model"), weights["rows"])

        h = normalize(x, weights["norms"]["attention"])
        query, key, value = (jnp.einsum("btd,dhk->bthk", h, columns[name]) for name in ("query", "key", "value"))
        query, key = rotate(query, positions), rotate(key, positions)
        if cache is not None:
            start = (index, 0, cache.length, 0, 0)
            keys = jax.lax.dynamic_update_slice(keys, key[None], start)
            values = jax.lax.dynamic_update_slice(values, value[None], start)
            key, value = keys[index], values[index]
        seen = positions[:, None] >= jnp.arange(key.shape[1])
        attended = jax.nn.dot_product_attention(query, key, value, mask=seen[None, None])
        x = split(x + attended.reshape(*x.shape[:2], -1) @ rows["attention"], "data")

        h = normalize(x, weights["norms"]["mlp"])
        x = split(x + (jax.nn.silu(h @ columns["gate"]) * (h @ columns["up"])) @ rows["mlp"], "data")
        return (x, keys, values, index + 1), None

    keys, values = (None, None) if cache is None else (cache.keys, cache.values)
    carry = split(embedding[tokens], "data"), keys, values, 0
    (x, keys, values, _), _ = jax.lax.scan(layer, carry, layers)
    logits = jnp.einsum("btd,vd->btv", normalize(x, last), embedding, preferred_element_type=jnp.float32)
    return logits, None if cache is None else Cache(keys, values, cache.length + tokens.shape[1])


def normalize(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Divide by the root mean square of the last dimension, in f32, and scale."""
    wide = x.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)
    return (wide * scale).astype(x.dtype)


def rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Turn pairs of elements of each head by angles in proportion to the position: [sequence,position,head,element]."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * WAVELENGTH ** (-jnp.arange(half) / half)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def split(x: jax.Array, *axes: str | None) -> jax.Array:
    """Say over which axis of the mesh each dimension is split; nothing where there is no mesh."""
    return x if jax.sharding.get_abstract_mesh().empty else jax.lax.with_sharding_constraint(x, P(*axes))
