"""What a device is timed with: a product, a sum that reads much memory, and a layer with both."""

import jax
import jax.numpy as jnp


def product(x, y):
    return x @ y


def stream(x, y):
    return x * 2 + y


def layer(params, x):
    hidden = jax.nn.gelu(x @ params["up"])
    out = x + hidden @ params["down"]
    return out * jax.lax.rsqrt((out.astype(jnp.float32) ** 2).mean(-1, keepdims=True) + 1e-6).astype(out.dtype)


def update(state, x):
    return jax.tree.map(lambda s: s + x, state)
