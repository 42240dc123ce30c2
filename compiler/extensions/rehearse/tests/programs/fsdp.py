"""Train a transformer's block, its weights split over all devices, by `jax.make_mesh`."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

mesh = jax.make_mesh((jax.device_count(),), ("fsdp",))
jax.set_mesh(mesh)
split, whole = NamedSharding(mesh, P("fsdp", None)), NamedSharding(mesh, P())


def init(key):
    shapes = {"qkv": (64, 192), "out": (64, 64), "up": (64, 256), "down": (256, 64)}
    keys = jax.random.split(key, len(shapes))
    made = {name: jax.random.normal(k, shape) * 0.02 for (name, shape), k in zip(shapes.items(), keys)}
    return jax.tree.map(lambda x: jax.device_put(x, split), made)


def block(params, x):
    gathered = jax.tree.map(lambda w: jax.sharding.reshard(w, P()), params)  # as FSDP does before it multiplies
    q, k, v = jnp.split(x @ gathered["qkv"], 3, axis=-1)
    weights = jax.nn.softmax(jnp.einsum("bld,bsd->bls", q, k) / 8)
    x = x + jnp.einsum("bls,bsd->bld", weights, v) @ gathered["out"]
    return x + jax.nn.gelu(x @ gathered["up"]) @ gathered["down"]


@jax.jit
def step(params, state, x):
    loss, grads = jax.value_and_grad(lambda params: jnp.mean((block(params, x) - x) ** 2))(params)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


params = init(jax.random.key(0))
optimizer = optax.adamw(1e-3)
state = optimizer.init(params)
for number in range(3):
    x = jax.random.normal(jax.random.key(number), (8, 16, 64))
    x = jax.device_put(x, NamedSharding(mesh, P("fsdp", None, None)))
    params, state, loss = step(params, state, x)
print("loss", float(loss), params["up"].sharding.spec)
