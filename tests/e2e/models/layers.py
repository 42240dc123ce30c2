"""Small functions that share one file."""

import jax
import jax.numpy as jnp


def affine(weights, bias, x):
    return x @ weights + bias


def softmax(x):
    return jax.nn.softmax(x, axis=-1)


def layer_norm(x):
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred / jnp.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-6)


def gelu(x):
    return jax.nn.gelu(x)


def cosine(x, y):
    return jnp.dot(x, y) / (jnp.linalg.norm(x) * jnp.linalg.norm(y))


def decay(x, rate):
    return x * rate


def squared_error(x, y):
    return ((x - y) ** 2).sum()
