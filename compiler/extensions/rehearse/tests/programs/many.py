"""Compile the helper programs of a server at start: each for every bucket, some three hundred with all of them."""

import os

import jax
import jax.numpy as jnp

BUCKETS = [size for power in range(4, 10) for size in (1 << power, 3 << (power - 1))]  # 16, 24, 32, ... 768
BUCKETS = BUCKETS[: int(os.environ.get("BUCKETS", "12"))]


@jax.jit
def select(table, rows):
    return table[rows]


@jax.jit
def write(table, rows, values):
    return table.at[rows].set(values)


@jax.jit
def mask(lengths, tokens):
    return jnp.arange(tokens.shape[0])[None] < lengths[:, None]


@jax.jit
def penalize(logits, counts):
    return logits - 0.5 * (counts > 0) - 0.1 * counts


@jax.jit
def top(logits):
    return jax.lax.top_k(logits, 8)


for size in BUCKETS:
    rows = jnp.arange(size) % 16
    table = jnp.ones((size + 16, 8))
    values = select(table, rows)
    table = write(table, rows, values * 2)
    lengths = jnp.minimum(jnp.arange(4) * 5, size)
    seen = mask(lengths, rows)
    logits = penalize(jnp.zeros((4, size)), seen.astype(jnp.int32))
    best, where = top(logits)
    logits = jnp.concatenate([logits, jnp.zeros((4, 16))], axis=1)
    probabilities = jax.nn.softmax(logits / 0.7)
    ordered = jnp.sort(probabilities, axis=-1)[:, ::-1]
    kept = jnp.cumsum(ordered, axis=-1) < 0.9
    padded = jnp.pad(rows, (0, 16))
    shifted = jnp.roll(padded, 1)
    change = jnp.where(padded == shifted, 0, padded)
    total = change.sum() + kept.sum() + jnp.isfinite(best).all()
    print(size, int(total), end=" ")
print()
