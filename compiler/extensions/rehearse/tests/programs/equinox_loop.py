"""Train a small network with Equinox and Optax."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax


class Classifier(eqx.Module):
    layers: list
    norm: eqx.nn.LayerNorm
    dropout: eqx.nn.Dropout

    def __init__(self, key):
        keys = jr.split(key, 3)
        self.layers = [eqx.nn.Linear(16, 32, key=keys[0]), eqx.nn.Linear(32, 32, key=keys[1])]
        self.layers.append(eqx.nn.Linear(32, 4, key=keys[2]))
        self.norm = eqx.nn.LayerNorm(32)
        self.dropout = eqx.nn.Dropout(0.1)

    def __call__(self, x, key=None):
        x = jax.nn.relu(self.layers[0](x))
        x = self.norm(jax.nn.gelu(self.layers[1](x)))
        return self.layers[2](self.dropout(x, key=key, inference=key is None))


def batches(key, size=64, count=4):
    centers = jr.normal(jr.key(1), (4, 16)) * 3
    for key in jr.split(key, count):
        labels = jr.randint(key, (size,), 0, 4)
        yield centers[labels] + jr.normal(jr.fold_in(key, 1), (size, 16)), labels


@eqx.filter_value_and_grad
def loss_of(model, x, y, keys):
    logits = jax.vmap(model)(x, keys)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


@eqx.filter_jit
def step(model, state, x, y, key):
    loss, grads = loss_of(model, x, y, jr.split(key, x.shape[0]))
    updates, state = optimizer.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
    return eqx.apply_updates(model, updates), state, loss


@eqx.filter_jit
def accuracy(model, x, y):
    return jnp.mean(jnp.argmax(jax.vmap(model)(x), axis=-1) == y)


key = jr.key(0)
model = Classifier(jr.fold_in(key, 0))
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-2, 100)))
state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
running = jnp.zeros(())
for number, (x, y) in enumerate(batches(jr.fold_in(key, 1))):
    model, state, loss = step(model, state, x, y, jr.fold_in(key, number))
    running = 0.9 * running + 0.1 * loss
print("loss", float(running), "accuracy", float(accuracy(model, x, y)))
