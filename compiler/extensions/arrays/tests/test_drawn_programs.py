"""Programs that Hypothesis draws: traced, untraced and JAX's agree, in values and gradients.

Modules: `stagec_arrays/namespace/*.py`, `stagec_arrays/primitives/*.py`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings, strategies as st

import stagec
import stagec_arrays
import stagec_arrays.lax
import stagec_arrays.nn
import stagec_arrays.numpy as xp

SHAPE = (3, 4)
WEIGHTS = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32) / 2
Step = Callable[[Any, Any, Any, Any, Any], Any]
STEPS: dict[str, Step] = {
    "sin": lambda n, lax, nn, x, y: n.sin(x),
    "tanh": lambda n, lax, nn, x, y: n.tanh(x),
    "add": lambda n, lax, nn, x, y: x + y,
    "multiply": lambda n, lax, nn, x, y: x * n.tanh(y),
    "matmul": lambda n, lax, nn, x, y: x @ WEIGHTS,
    "maximum": lambda n, lax, nn, x, y: n.maximum(x, y),
    "where": lambda n, lax, nn, x, y: n.where(x > y, x, y * 0.5),
    "mean": lambda n, lax, nn, x, y: x - n.mean(x, axis=1, keepdims=True),
    "flip": lambda n, lax, nn, x, y: n.flip(x, axis=0) + y[:, ::-1],
    "take": lambda n, lax, nn, x, y: x[n.asarray([2, 0, 2])] - y,
    "update": lambda n, lax, nn, x, y: x.at[1].set(y[0]),
    "relu": lambda n, lax, nn, x, y: nn.relu(x),
    "silu": lambda n, lax, nn, x, y: nn.silu(x),
    "softmax": lambda n, lax, nn, x, y: nn.softmax(x, axis=0),
    "logsumexp": lambda n, lax, nn, x, y: x - nn.logsumexp(x, axis=1, keepdims=True),
    "cumsum": lambda n, lax, nn, x, y: lax.cumsum(x, 1) * 0.3,
    "sort": lambda n, lax, nn, x, y: lax.sort((x, y), num_keys=1, dimension=0)[1],
    "window": lambda n, lax, nn, x, y: lax.reduce_window(x, -np.inf, lax.max, (2, 1), (1, 1), "SAME"),
    "slice": lambda n, lax, nn, x, y: x * lax.dynamic_slice(y, (n.argmax(x[:, 0]), 0), (1, 4)),
    "cond": lambda n, lax, nn, x, y: lax.cond(x[0, 0] > 0, lambda a, b: a * b, lambda a, b: a - b, x, y),
    "scan": lambda n, lax, nn, x, y: lax.scan(lambda c, row: (n.tanh(c + row), c), y[0], x)[1],
    "loop": lambda n, lax, nn, x, y: lax.fori_loop(0, 3, lambda i, v: v * 0.5 + y, x),
}


@given(
    st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=6),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=8)
def test_drawn_programs_agree(steps: list[tuple[str, int, int]], seed: int) -> None:
    def program(n: Any, lax: Any, nn: Any, x: Any, y: Any) -> Any:
        values = [x, y]
        for name, first, second in steps:
            values.append(STEPS[name](n, lax, nn, values[-1 - first % len(values)], values[second % len(values)]))
        return n.sum(n.sin(values[-1]) * values[-1])

    rng = np.random.default_rng(seed)
    x, y = (rng.normal(size=SHAPE).astype(np.float32) for _ in range(2))
    wanted = jax.jit(jax.value_and_grad(lambda x, y: program(jnp, jax.lax, jax.nn, x, y), (0, 1)))(x, y)
    ours = stagec_arrays.value_and_grad(lambda x, y: program(xp, stagec_arrays.lax, stagec_arrays.nn, x, y), (0, 1))
    for found in (stagec.jit(ours, frontend="arrays")(x, y), ours(x, y)):
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(np.asarray(a), b, 1e-4, 1e-4, err_msg=str(steps))
