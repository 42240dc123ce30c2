"""Functions that a program with JAX calls: see serve.py."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P


def predict(params, x):
    hidden = jax.nn.relu(x @ params["hidden"])
    return {"scores": jax.nn.softmax(hidden @ params["output"])}


def step(params, x, y, *, rate=0.1):
    loss, slopes = jax.value_and_grad(lambda p: jnp.mean((predict(p, x)["scores"] - y) ** 2))(params)
    return jax.tree.map(lambda p, s: p - rate * s, params, slopes), loss


def power(x, *, exponent):
    return jnp.power(x, exponent).sum()


def wide(x):
    return jnp.linspace(0, 1, 5) * x


def scale(x, factor):
    return x * factor


def sharded(params, x, y):
    x = jax.lax.with_sharding_constraint(x, P("data"))
    return step(params, x, y)


def explicit(params, x, scale):
    assert jax.typeof(x).sharding.spec == P("data", None)
    hidden = jax.nn.relu(x @ params["hidden"])
    assert jax.typeof(hidden).sharding.spec == P("data", "model")
    return jnp.einsum("bh,ho->bo", hidden, params["output"], out_sharding=P("data")) * scale


@jax.jit
def explicit_step(params, x, y):
    slopes = jax.grad(lambda p: jnp.mean((explicit(p, x, 1.0) - y) ** 2))(params)
    return jax.tree.map(lambda p, s: p - 0.1 * s, params, slopes)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(nn.relu(nn.Dense(8)(x)))


def flax_state():
    net = Net()
    return TrainState.create(
        apply_fn=net.apply, params=net.init(jax.random.key(0), jnp.zeros((1, 6)))["params"], tx=optax.adam(1e-2)
    )


def flax_step(state, x, y):
    def loss(params):
        return jnp.mean((state.apply_fn({"params": params}, x) - y) ** 2)

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), value


def flax_avals():
    return jax.eval_shape(flax_state), jax.ShapeDtypeStruct((3, 6), "f4"), jax.ShapeDtypeStruct((3, 4), "f4")


OPTIMIZER = optax.sgd(1e-2)


def equinox_state():
    model = eqx.nn.MLP(6, 4, 8, 2, key=jax.random.key(1))
    return model, OPTIMIZER.init(eqx.filter(model, eqx.is_array))


@eqx.filter_jit
def equinox_step(model, state, x, y):
    def loss(model):
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    value, grads = eqx.filter_value_and_grad(loss)(model)
    updates, state = OPTIMIZER.update(grads, state)
    return eqx.apply_updates(model, updates), state, value


def equinox_avals():
    return *eqx.filter_eval_shape(equinox_state), jax.ShapeDtypeStruct((3, 6), "f4"), jax.ShapeDtypeStruct((3, 4), "f4")


class Layers(nnx.Module):
    def __init__(self, rngs):
        self.first, self.second = nnx.Linear(6, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.relu(self.first(x)))


@nnx.jit
def nnx_loss(model, x, y):
    return jnp.mean((model(x) - y) ** 2)


def nnx_avals():
    model = nnx.eval_shape(lambda: Layers(nnx.Rngs(0)))
    return model, jax.ShapeDtypeStruct((3, 6), "f4"), jax.ShapeDtypeStruct((3, 4), "f4")
