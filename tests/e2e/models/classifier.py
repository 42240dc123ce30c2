"""A Flax model: its parameters are an argument."""

import jax
import jax.numpy as jnp
from flax import linen as nn


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(8)(x))
        return nn.Dense(3)(x)


def classify(variables, x):
    return Classifier().apply(variables, x).argmax(axis=-1)


def classify_avals():
    x = jax.ShapeDtypeStruct((2, 4), jnp.float32)
    variables = jax.eval_shape(Classifier().init, jax.random.key(0), x)
    return variables, x
