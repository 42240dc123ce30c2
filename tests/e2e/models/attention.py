"""A function whose avals come from Python."""

import jax
import jax.numpy as jnp


def attention(query, key, value):
    scores = query @ key.T / jnp.sqrt(query.shape[-1])
    return jax.nn.softmax(scores, axis=-1) @ value


def attention_avals():
    return (jax.ShapeDtypeStruct((4, 8), jnp.float32),) * 3
