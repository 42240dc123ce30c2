"""What programs.toml lists: `stagec rehearse --device mi300x --output . -- python program.py` here writes it."""

import jax
import jax.numpy as jnp

x = jax.random.normal(jax.random.key(0), (64, 64))
print(jax.jit(lambda x: jnp.tanh(x @ x).sum())(x))
