"""Programs for which compilers of two architectures write other instructions."""

from typing import Any

import jax
import jax.numpy as jnp


def dense(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return jax.nn.softmax(jnp.tanh(x @ params["w"] + params["b"]))


def dtypes(double: Any, half: Any, brain: Any, small: Any, complex_: Any) -> dict[str, Any]:
    return {
        "c64": jnp.exp(complex_ / 8) @ complex_,
        "bf16": jnp.tanh(brain) @ brain,
        "f16": jnp.sqrt(jnp.abs(half)) @ half,
        "f64": jnp.sort(jnp.exp(double / 4) @ double, axis=1),
        "i8": jax.lax.dot(small, small, preferred_element_type=jnp.int32),
    }


def factorize(x: jax.Array) -> jax.Array:
    factor = jnp.linalg.cholesky(x @ x.T + 16 * jnp.eye(16))
    return jax.lax.fori_loop(0, 4, lambda i, y: y * 0.5 + x[i] / (1 + jnp.abs(y)), factor)
