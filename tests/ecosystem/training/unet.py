"""A UNet with batch normalization, trained as Equinox's page "Stateful operations" does it: with eqx.nn.State."""

from itertools import pairwise

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

optim = optax.adam(1e-3)


class Down(eqx.Module):
    conv: eqx.nn.Conv2d
    norm: eqx.nn.BatchNorm
    pool: eqx.nn.MaxPool2d

    def __init__(self, inputs, outputs, *, key):
        self.conv = eqx.nn.Conv2d(inputs, outputs, 3, padding=1, key=key)
        self.norm = eqx.nn.BatchNorm(outputs, axis_name="batch", mode="batch")
        self.pool = eqx.nn.MaxPool2d(2, 2)

    def __call__(self, x, state):
        x, state = self.norm(self.conv(x), state)
        x = jax.nn.relu(x)
        return self.pool(x), x, state


class UNet(eqx.Module):
    down: list[Down]
    middle: eqx.nn.Conv2d
    up: list[eqx.nn.ConvTranspose2d]
    join: list[eqx.nn.Conv2d]
    head: eqx.nn.Conv2d

    def __init__(self, channels=(3, 8, 16), *, key):
        keys = iter(jax.random.split(key, 16))
        self.down = [Down(a, b, key=next(keys)) for a, b in pairwise(channels)]
        self.middle = eqx.nn.Conv2d(channels[-1], channels[-1], 3, padding=1, key=next(keys))
        self.up = [eqx.nn.ConvTranspose2d(c, c, 2, stride=2, key=next(keys)) for c in channels[:0:-1]]
        outputs = (*channels[-2:0:-1], channels[1])
        self.join = [eqx.nn.Conv2d(2 * a, b, 3, padding=1, key=next(keys)) for a, b in zip(channels[:0:-1], outputs)]
        self.head = eqx.nn.Conv2d(channels[1], 1, 1, key=next(keys))

    def __call__(self, x, state):
        skips = []
        for down in self.down:
            x, skip, state = down(x, state)
            skips.append(skip)
        x = jax.nn.relu(self.middle(x))
        for up, join in zip(self.up, self.join):
            x = jax.nn.relu(join(jnp.concatenate([up(x), skips.pop()])))
        return self.head(x), state


def compute_loss(model, state, xs, ys):
    batch_model = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    predictions, state = batch_model(xs, state)
    return optax.sigmoid_binary_cross_entropy(predictions, ys).mean(), state


@eqx.filter_jit
def make_step(model, state, opt_state, xs, ys):
    (loss, state), grads = eqx.filter_value_and_grad(compute_loss, has_aux=True)(model, state, xs, ys)
    updates, opt_state = optim.update(grads, opt_state)
    return loss, eqx.apply_updates(model, updates), state, opt_state


def arguments():
    model, state = eqx.nn.make_with_state(UNet)(key=jax.random.key(0))
    opt_state = optim.init(eqx.filter(model, eqx.is_inexact_array))
    xs = jax.random.normal(jax.random.key(1), (4, 3, 16, 16))
    return model, state, opt_state, xs, (xs[:, :1] > 0).astype(jnp.float32)


def avals():
    return eqx.filter_eval_shape(arguments)
