"""A small classifier of handwritten digits: 8x8 grey images, one hidden layer, trained with momentum."""

import jax
import jax.numpy as jnp

HIDDEN = 64
LEARNING_RATE = 0.1
MOMENTUM = 0.9


def init(seed: jax.Array) -> dict:
    """Return a new training state from a seed (u32[])."""
    first, second = jax.random.split(jax.random.key(seed))
    params = {
        "hidden": {"w": 0.1 * jax.random.normal(first, (64, HIDDEN)), "b": jnp.zeros(HIDDEN)},
        "output": {"w": 0.1 * jax.random.normal(second, (HIDDEN, 10)), "b": jnp.zeros(10)},
    }
    return {"params": params, "velocity": jax.tree.map(jnp.zeros_like, params)}


def logits(params: dict, images: jax.Array) -> jax.Array:
    """Return the score of each digit: f32[batch,64] -> f32[batch,10]."""
    hidden = jax.nn.relu(images @ params["hidden"]["w"] + params["hidden"]["b"])
    return hidden @ params["output"]["w"] + params["output"]["b"]


def predict(params: dict, images: jax.Array) -> dict:
    """Return the likeliest digit and its probability for each image (f32[batch,64], values from 0 to 1)."""
    probabilities = jax.nn.softmax(logits(params, images))
    return {"digit": jnp.argmax(probabilities, axis=1), "probability": jnp.max(probabilities, axis=1)}


def train_step(state: dict, images: jax.Array, labels: jax.Array) -> tuple[dict, jax.Array]:
    """Take one step on a batch (f32[32,64], i32[32]); return the new state and the mean loss before the step."""

    def loss(params: dict) -> jax.Array:
        scores = jax.nn.log_softmax(logits(params, images))
        return -jnp.mean(jnp.take_along_axis(scores, labels[:, None], axis=1))

    value, gradient = jax.value_and_grad(loss)(state["params"])
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v - LEARNING_RATE * g, state["velocity"], gradient)
    params = jax.tree.map(jnp.add, state["params"], velocity)
    return {"params": params, "velocity": velocity}, value


def train_step_avals() -> tuple:
    """Return the avals of `train_step`'s arguments: the state is whatever `init` makes."""
    state = jax.eval_shape(init, jax.ShapeDtypeStruct((), jnp.uint32))
    return state, jax.ShapeDtypeStruct((32, 64), jnp.float32), jax.ShapeDtypeStruct((32,), jnp.int32)
