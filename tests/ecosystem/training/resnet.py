"""A ResNet with batch statistics in a TrainState, trained as flax's ImageNet example does it."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training import train_state


class TrainState(train_state.TrainState):
    batch_stats: Any


class Block(nn.Module):
    filters: int
    strides: int = 1

    @nn.compact
    def __call__(self, x, train: bool):
        conv = partial(nn.Conv, use_bias=False)
        norm = partial(nn.BatchNorm, use_running_average=not train, momentum=0.9)
        residual = x
        y = nn.relu(norm()(conv(self.filters, (3, 3), self.strides)(x)))
        y = norm(scale_init=nn.initializers.zeros_init())(conv(self.filters, (3, 3))(y))
        if residual.shape != y.shape:
            residual = norm(name="norm_proj")(conv(self.filters, (1, 1), self.strides, name="conv_proj")(residual))
        return nn.relu(residual + y)


class ResNet(nn.Module):
    classes: int = 10

    @nn.compact
    def __call__(self, x, train: bool = True):
        x = nn.Conv(16, (3, 3), use_bias=False, name="conv_init")(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, name="bn_init")(x))
        for filters, strides in ((16, 1), (32, 2)):
            x = Block(filters, strides)(x, train)
        return nn.Dense(self.classes)(jnp.mean(x, axis=(1, 2)))


def train_step(state, batch):
    def loss_fn(params):
        logits, new_model_state = state.apply_fn(
            {"params": params, "batch_stats": state.batch_stats}, batch["image"], mutable=["batch_stats"]
        )
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
        penalty = 1e-4 * 0.5 * sum(jnp.sum(x**2) for x in jax.tree.leaves(params) if x.ndim > 1)
        return loss + penalty, (new_model_state, logits)

    (loss, (new_model_state, logits)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    accuracy = jnp.mean(jnp.argmax(logits, -1) == batch["label"])
    new_state = state.apply_gradients(grads=grads, batch_stats=new_model_state["batch_stats"])
    return new_state, {"loss": loss, "accuracy": accuracy}


def arguments():
    model = ResNet()
    variables = model.init(jax.random.key(0), jnp.ones((1, 16, 16, 3)))
    tx = optax.sgd(optax.warmup_cosine_decay_schedule(0.0, 0.1, 10, 100), momentum=0.9, nesterov=True)
    state = TrainState.create(
        apply_fn=model.apply, params=variables["params"], tx=tx, batch_stats=variables["batch_stats"]
    )
    return state, {"image": jax.random.normal(jax.random.key(1), (8, 16, 16, 3)), "label": jnp.arange(8)}


def avals():
    return jax.eval_shape(arguments)
