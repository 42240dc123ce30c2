"""A step of a language model that decodes with a KV cache, as flax's examples do it: a mutable collection."""

import jax
import jax.numpy as jnp
from flax import linen as nn


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm()(x)
        y = nn.MultiHeadDotProductAttention(num_heads=4, decode=True)(y, y)
        x = x + y
        y = nn.gelu(nn.Dense(64)(nn.LayerNorm()(x)))
        return x + nn.Dense(32)(y)


class Transformer(nn.Module):
    vocabulary: int = 64

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(self.vocabulary, 32)
        x = embed(tokens)
        for _ in range(2):
            x = Block()(x)
        return embed.attend(nn.LayerNorm()(x))


def tokens_ids_to_logits(params, cache, token, key):
    logits, new_vars = Transformer().apply({"params": params, "cache": cache}, token, mutable=["cache"])
    return jax.random.categorical(key, logits[:, -1]), new_vars["cache"]


def arguments():
    variables = Transformer().init(jax.random.key(0), jnp.ones((2, 16), jnp.int32))
    return variables["params"], variables["cache"], jnp.array([[3], [5]]), jax.random.key(1)


def avals():
    return jax.eval_shape(arguments)
