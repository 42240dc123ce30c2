"""A train step of Llama (https://arxiv.org/abs/2407.21783): its estimated time is compared with published ones.

Layers are a scan, and a layer is computed again backwards. Attention and the loss go over a sequence in pieces, so that
no array has all scores or all logits: published runs have kernels for that.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from examples.transformer import model
from examples.transformer.model import State, normalize, rotate, split

PIECE = 512
"""Positions of a sequence that attention and loss take at a time."""
SIZES = {"width": 8_192, "layers": 80, "heads": 64, "kv_heads": 8, "head": 128, "hidden": 28_672}
"""Of both models with 70 billion parameters, but for their vocabularies."""


def llama_2_70b() -> tuple:
    """Two sequences of 4,096 tokens for each of 64 devices."""
    return _avals({**SIZES, "vocabulary": 32_000}, 128, 4_096)


def llama_2_70b_pod() -> tuple:
    """Three sequences of 4,096 tokens for each of 256 devices."""
    return _avals({**SIZES, "vocabulary": 32_000}, 768, 4_096)


def llama_3_70b() -> tuple:
    """Two sequences of 8,192 tokens for each of 128 devices."""
    return _avals({**SIZES, "vocabulary": 128_256}, 256, 8_192)


def train_step(state: State, tokens: jax.Array) -> tuple[State, jax.Array]:
    """Take one step of Adam on a batch (i32[sequence,position]); return the loss before it too."""
    loss, gradient = jax.value_and_grad(_loss)(state.params, tokens)
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state.mean, gradient)
    variance = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g**2, state.variance, gradient)
    params = jax.tree.map(lambda p, m, v: p - 1e-4 * m / (jnp.sqrt(v) + 1e-8), state.params, mean, variance)
    return State(params, mean, variance, state.step + 1), loss


def _avals(sizes: dict[str, int], sequences: int, positions: int) -> tuple:
    state = jax.eval_shape(functools.partial(model.init, **sizes), jax.ShapeDtypeStruct((), jnp.uint32))
    return state, jax.ShapeDtypeStruct((sequences, positions), jnp.int32)


def _loss(params: dict[str, Any], tokens: jax.Array) -> jax.Array:
    positions = jnp.arange(tokens.shape[1])
    embedding = split(params["embedding"].astype(jnp.bfloat16), None, None)
    norms = dict(params["norms"])
    last = norms.pop("last")

    @jax.checkpoint
    def layer(x: jax.Array, weights: dict[str, Any]) -> tuple[jax.Array, None]:
        columns, rows = (
            jax.tree.map(lambda w: split(w.astype(jnp.bfloat16)), weights[kind]) for kind in ("columns", "rows")
        )
        h = normalize(x, weights["norms"]["attention"])
        query, key, value = (jnp.einsum("btd,dhk->bthk", h, columns[name]) for name in ("query", "key", "value"))
        attended = _attend(rotate(query, positions), rotate(key, positions), value)
        x = split(x + attended.reshape(*x.shape[:2], -1) @ rows["attention"], "data")
        h = normalize(x, weights["norms"]["mlp"])
        return split(x + (jax.nn.silu(h @ columns["gate"]) * (h @ columns["up"])) @ rows["mlp"], "data"), None

    layers = {"columns": params["columns"], "rows": params["rows"], "norms": norms}
    x, _ = jax.lax.scan(layer, split(embedding[tokens], "data"), layers)

    @jax.checkpoint
    def piece(total: jax.Array, part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        x, wanted = part
        logits = jnp.einsum("btd,vd->btv", x, embedding, preferred_element_type=jnp.float32)
        chosen = jnp.take_along_axis(logits, wanted[..., None], axis=2)[..., 0]
        return total + (jax.nn.logsumexp(logits, axis=2) - chosen).sum(), None

    total, _ = jax.lax.scan(piece, jnp.float32(0), (_pieces(normalize(x, last)), _pieces(jnp.roll(tokens, -1, 1))))
    return total / tokens.size


def _attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Causal attention, of [sequence,position,head,element]; each piece of queries sees all keys, and masks some."""
    starts = jnp.arange(0, query.shape[1], PIECE)

    @jax.checkpoint
    def piece(_: None, part: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        query, start = part
        seen = start + jnp.arange(PIECE)[:, None] >= jnp.arange(key.shape[1])
        return None, jax.nn.dot_product_attention(query, key, value, mask=seen[None, None])

    _, attended = jax.lax.scan(piece, None, (_pieces(query), starts))
    return jnp.moveaxis(attended, 0, 1).reshape(query.shape)


def _pieces(x: jax.Array) -> jax.Array:
    """Put pieces of the second dimension into a new first one."""
    return jnp.moveaxis(x.reshape(x.shape[0], -1, PIECE, *x.shape[2:]), 1, 0)
