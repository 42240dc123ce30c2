"""Functions that a server is tested with."""

import jax
import jax.numpy as jnp


def predict(params, x):
    hidden = jnp.tanh(x @ params["w1"] + params["b1"])
    logits = hidden @ params["w2"]
    return {"label": jnp.argmax(logits, -1).astype(jnp.int32), "logits": logits}


def structured(batch, *, scale):
    image, (ids, flags) = batch["image"], batch["rest"]
    return [image * scale, {"ids": jnp.where(flags[:, None], ids, -ids)}]


def narrow(half, brain, byte, flag):
    return half + 1, brain * 2, byte + 1, ~flag


def running(x):
    return jnp.cumsum(x, axis=0)


def centred(x):
    return x - x.mean(axis=0)


def ordered(x):
    """Each row alone, which no proof sees: XLA takes one after the other."""
    return jax.lax.map(lambda row: row * 2, x)


def scarce(x):
    """Its rows are declared to be independent, and are not, where two are alike."""
    same = (x[:, None] == x[None]).all(-1).sum(-1, keepdims=True)
    return jnp.where(same > 1, 0, x)


def counted(x, *, count):
    return x / count


def turned(z):
    return z * 1j


def raised(x, *, exponent):
    return x**exponent


def draw(key):
    return jax.random.uniform(key, (4,))


def pooled(x, *, valid):
    return jnp.where(valid[:, None], x, 0).sum(0)


def scaled(x):
    return x * 2 + 1


def filled(x):
    return jnp.full(8_000_000, x)


def begin(x):
    return x, x.sum()


def add(total, x):
    total = total["total"]
    return total * 2, {"total": total + x}


def peek(total):
    return total


def learned(state, rate):
    return {"loss": jnp.sum(state**2), "state": state - rate * state}
