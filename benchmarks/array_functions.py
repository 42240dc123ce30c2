"""Functions that are written once for jax.numpy and stagec_arrays.numpy, and the CPU seconds that each takes.

As a program: `array_functions.py jax|arrays ROUNDS` prints the seconds as JSON. Each has its own process, so neither
finds what the other has imported.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from typing import Any

LAYERS, WIDTH, HEADS, LENGTH = 24, 64, 4, 16
SMALL = 100


def gelu(n: Any, x: Any) -> Any:
    """A smooth step, by tanh."""
    return 0.5 * x * (1.0 + n.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


def softmax(n: Any, x: Any) -> Any:
    """Shares that add up to 1 along the last axis."""
    e = n.exp(x - n.max(x, axis=-1, keepdims=True))
    return e / n.sum(e, axis=-1, keepdims=True)


def normalized(n: Any, x: Any) -> Any:
    """Rows of length one."""
    return x / n.sqrt(n.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def block(n: Any, params: dict[str, Any], x: Any) -> Any:
    """One block of a transformer, on f32[position,width]: attention and a perceptron, each behind a normalization."""
    h = normalized(n, x)
    heads = (n.reshape(h @ params[name], (x.shape[0], HEADS, -1)) for name in ("query", "key", "value"))
    query, key, value = (n.permute_dims(head, (1, 0, 2)) for head in heads)
    scores = query @ n.permute_dims(key, (0, 2, 1)) / query.shape[-1] ** 0.5
    mask = n.tril(n.ones((x.shape[0], x.shape[0]), dtype=bool))
    attended = softmax(n, n.where(mask, scores, -1e9)) @ value
    x = x + n.reshape(n.permute_dims(attended, (1, 0, 2)), x.shape) @ params["out"]
    return x + gelu(n, normalized(n, x) @ params["up"]) @ params["down"]


def model(n: Any, params: list[dict[str, Any]], x: Any) -> Any:
    """24 blocks, written out."""
    for layer in params:
        x = block(n, layer, x)
    return x


def small(n: Any, number: int, w: Any, x: Any) -> Any:
    """Eight small layers, another function for each number."""
    for layer in range(8):
        h = gelu(n, x @ w["kernel"] + w["bias"])
        x = x + h * (number + layer) if number % 2 else normalized(n, h)
    return x * (1.0 + number / 1024)


def shapes(number: int) -> tuple[dict[str, tuple[int, ...]], tuple[int, ...]]:
    """Those of the arguments of `small`."""
    width = 8 + number
    return {"kernel": (width, width), "bias": (width,)}, (4, width)


def main(which: str, rounds: int) -> None:
    """Measure and print."""
    import numpy as np

    start = time.process_time()
    import jaxlib.mlir.dialects.stablehlo  # noqa: F401
    import ml_dtypes  # noqa: F401
    from jaxlib import xla_client  # noqa: F401

    seconds: dict[str, list[float]] = {"jaxlib": [time.process_time() - start]}
    start = time.process_time()
    if which == "jax":
        import jax
        import jax.export
        import jax.numpy as n

        struct: Callable[..., Any] = jax.ShapeDtypeStruct
        seconds["import"] = [time.process_time() - start]

        def export(function: Callable[..., Any], *args: Any) -> bytes:
            return bytes(jax.export.export(jax.jit(function))(*args).serialize())
    else:
        import stagec
        import stagec_arrays
        import stagec_arrays.numpy as n

        seconds["import"] = [time.process_time() - start]
        struct = stagec_arrays.ShapeDtypeStruct

        def export(function: Callable[..., Any], *args: Any) -> bytes:
            return bytes(stagec.jit(function, frontend="arrays").trace(*args).export().serialize())

    square, wide = (WIDTH, WIDTH), (WIDTH, 4 * WIDTH)
    of_layer = {"query": square, "key": square, "value": square, "out": square, "up": wide, "down": wide[::-1]}

    def of(tree: dict[str, tuple[int, ...]]) -> dict[str, Any]:
        return {name: struct(shape, np.float32) for name, shape in tree.items()}

    def transformer() -> None:
        x = struct((LENGTH, WIDTH), np.float32)
        export(lambda params, x: model(n, params, x), [of(of_layer) for _ in range(LAYERS)], x)

    def functions() -> None:
        for number in range(SMALL):
            params, x = shapes(number)
            export(lambda w, x, number=number: small(n, number, w, x), of(params), struct(x, np.float32))

    x, y = n.asarray(np.ones((8, 8), np.float32)), n.asarray(np.ones((8, 8), np.float32))

    def operation() -> float:
        start = time.process_time()
        for _ in range(1000):
            result = n.add(x, y)
        np.asarray(result)
        return (time.process_time() - start) / 1000

    export(n.tanh, struct((2,), np.float32))  # what the first of a process takes is in no round
    operation()
    for name, run in (("transformer", transformer), ("functions", functions)):
        seconds[name] = [_timed(run) for _ in range(rounds)]
    seconds["operation"] = [operation() for _ in range(5 * rounds)]
    print(json.dumps(seconds))


def _timed(run: Callable[[], None]) -> float:
    gc.collect()  # what was imported is looked at in no round, or by chance in one: for JAX that takes 75 ms
    start = time.process_time()
    run()
    return time.process_time() - start


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
