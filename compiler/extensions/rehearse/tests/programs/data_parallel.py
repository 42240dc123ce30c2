"""Train on the devices of all processes, each with its part of a batch."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

jax.distributed.initialize()
mesh = jax.make_mesh((jax.device_count(),), ("d",))
split = NamedSharding(mesh, P("d", None))
local = np.ones((8 * jax.local_device_count(), 16), np.float32) * (jax.process_index() + 1)
x = jax.make_array_from_process_local_data(split, local)
w = jax.device_put(jnp.ones((16, 4)), NamedSharding(mesh, P()))


@jax.jit
def step(w, x):
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return w - 0.01 * grad, loss


for _ in range(2):
    w, loss = step(w, x)
print(jax.process_index(), jax.device_count(), jax.local_device_count(), float(loss))
