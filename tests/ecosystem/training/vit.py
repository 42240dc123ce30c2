"""A vision transformer, trained as flax's guide on the functional API does it: split into structure and state."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx


class Block(nnx.Module):
    def __init__(self, width: int, heads: int, *, rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, dropout_rate=0.1, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.mlp = nnx.Sequential(
            nnx.Linear(width, 2 * width, rngs=rngs), nnx.gelu, nnx.Linear(2 * width, width, rngs=rngs)
        )

    def __call__(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nnx.Module):
    def __init__(self, patch: int = 4, width: int = 32, depth: int = 2, *, rngs: nnx.Rngs):
        self.patches = nnx.Conv(3, width, (patch, patch), strides=(patch, patch), padding="VALID", rngs=rngs)
        self.position = nnx.Param(jax.random.normal(rngs.params(), (1, 17, width)) * 0.02)
        self.token = nnx.Param(jnp.zeros((1, 1, width)))
        self.blocks = nnx.List([Block(width, 4, rngs=rngs) for _ in range(depth)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, 10, rngs=rngs)

    def __call__(self, images):
        x = self.patches(images)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        token = jnp.broadcast_to(self.token[...], (x.shape[0], 1, x.shape[-1]))
        x = jnp.concatenate([token, x], axis=1) + self.position[...]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


def train_step(graphdef, state, images, labels):
    model, optimizer, metrics = nnx.merge(graphdef, state)
    model.train()

    def loss_fn(model):
        logits = model(images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), logits

    (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
    metrics.update(loss=loss, logits=logits, labels=labels)
    optimizer.update(model, grads)
    return loss, nnx.state((model, optimizer, metrics))


def predict(model, images):
    """A module is a pytree, so that jax.jit takes it as it is."""
    model.eval()
    return model(images)


def train_step_arguments():
    model = ViT(rngs=nnx.Rngs(0, dropout=1))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3, weight_decay=0.05), wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    graphdef, state = nnx.split((model, optimizer, metrics))
    return graphdef, state, jax.random.normal(jax.random.key(2), (8, 16, 16, 3)), jnp.arange(8)


def predict_arguments():
    return ViT(rngs=nnx.Rngs(0)), jax.random.normal(jax.random.key(2), (2, 16, 16, 3))


def train_step_avals():
    return jax.eval_shape(train_step_arguments)


def predict_avals():
    return jax.eval_shape(predict_arguments)
