"""A classifier of handwritten digits with weights of 32, 8 and 4 bits, which are multiplied by their scales."""

import jax
import jax.numpy as jnp

GROUP = 32
"""Rows of a 4-bit matrix that share a scale."""


def predict(params: dict, images: jax.Array) -> jax.Array:
    """Return the score of each digit (f32[batch,64] -> f32[batch,10]); w: f32[in,out]."""
    return _layers(params, images, lambda layer, x: x @ layer["w"])


def predict_scaled(params: dict, images: jax.Array) -> jax.Array:
    """Return the same with w: i8[in,out] or f8_e4m3fn[in,out], and scale: f32[out]."""
    # The scale of a column is a factor of its sum: it is multiplied once, and not with each weight.
    return _layers(params, images, lambda layer, x: x @ layer["w"].astype(x.dtype) * layer["scale"])


def predict_int4(params: dict, images: jax.Array) -> jax.Array:
    """Return the same with w: u8[in/2,out], two weights in a byte, and scale: f32[in/GROUP,out]."""
    return _layers(params, images, lambda layer, x: x @ _unpacked(layer["w"], layer["scale"]))


def _layers(params: dict, images: jax.Array, product) -> jax.Array:
    hidden = jax.nn.relu(product(params["hidden"], images) + params["hidden"]["b"])
    return product(params["output"], hidden) + params["output"]["b"]


def _unpacked(packed: jax.Array, scale: jax.Array) -> jax.Array:
    """Return f32[in,out]: of each byte the low half is an even row, the high half the next; 0 to 15 are -8 to 7."""
    halves = jnp.stack([packed & 15, packed >> 4], axis=1).astype(jnp.float32) - 8  # f32[in/2,2,out]
    rows, columns = 2 * packed.shape[0], packed.shape[1]
    return (halves.reshape(rows // GROUP, GROUP, columns) * scale[:, None]).reshape(rows, columns)
