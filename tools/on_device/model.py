"""What a device is timed with: a product, a sum that reads much memory, a layer with both, and convolutions."""

import jax
import jax.numpy as jnp


def product(x, y):
    """The product of two matrices."""
    return x @ y


def stream(x, y):
    """What reads and writes memory, and computes little."""
    return x * 2 + y


def layer(params, x):
    """Two products, and what a model does between them."""
    hidden = jax.nn.gelu(x @ params["up"])
    out = x + hidden @ params["down"]
    return out * jax.lax.rsqrt((out.astype(jnp.float32) ** 2).mean(-1, keepdims=True) + 1e-6).astype(out.dtype)


def convolved(x, w):
    """A convolution: products, or cuDNN with results of autotuning."""
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def gradient(x, w, above):
    """The gradient of a convolution by its kernel, which has a tap for each pixel."""
    return jax.vjp(lambda w: convolved(x, w), w)[1](above)[0]


def update(state, x):
    """A state that the call consumes."""
    return jax.tree.map(lambda s: s + x, state)
