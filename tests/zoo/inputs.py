"""Inputs of the zoo's functions, as numpy arrays: name of the case -> (function, args, kwargs). No JAX."""

from typing import Any

import ml_dtypes
import numpy as np

Case = tuple[str, tuple[Any, ...], dict[str, Any]]


def cases() -> dict[str, Case]:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray[Any, Any]:
        return rng.normal(size=shape).astype(np.float32)

    params = {"w": normal(16, 4), "b": normal(4)}
    weights = {"dense": {"kernel": normal(3, 2), "bias": normal(3)}}
    return {
        "mlp_1": ("mlp", (params, normal(1, 16)), {}),
        "mlp_4": ("mlp", (params, normal(4, 16)), {}),
        "attention_3": ("attention", (normal(2, 3, 8),), {}),
        "attention_5": ("attention", (normal(2, 5, 8),), {}),
        "loop": ("loop", (normal(8),), {}),
        "factorize": ("factorize", (normal(5, 5),), {}),
        "fourier": ("fourier", ((normal(16) + 1j * normal(16)).astype(np.complex64),), {}),
        "draw": ("draw", (np.array([0, 7], np.uint32),), {}),
        "narrow": (
            "narrow",
            (
                normal(4).astype(ml_dtypes.bfloat16),
                np.arange(4, dtype=np.int8),
                np.array([True, False, True, True]),
                np.zeros((0, 3), np.float32),
            ),
            {},
        ),
        "update": ("update", ({"x": normal(4), "y": [np.float32(1)]}, np.float32(2)), {}),
        "square": ("named", (normal(3), normal(7)), {"shift": np.float32(0.5), "power": 2}),
        "cube": ("named", (normal(3), normal(7)), {"shift": np.float32(0.5), "power": 3}),
        "typed": (
            "typed",
            ({"mean": normal(3), "points": [{"x": normal(3), "y": normal(3)} for _ in range(2)]}, np.float32(2)),
            {},
        ),
        "turned": (
            "turned",
            (
                {"dial": (normal(3), normal(3)), "table": {"a": normal(3), "b": normal(3)}, "unit": {}},
                np.float32(2),
            ),
            {},
        ),
        "effectful_3": ("effectful", (normal(4), normal(2), normal(3)), {}),
        "effectful_5": ("effectful", (normal(4), normal(2), normal(5)), {}),
        "sharded": ("sharded", ({"w": normal(6, 4), "b": normal(4)}, normal(8, 6)), {}),
        "scale": ("scale", (normal(4, 3), normal(3)), {}),
        "precise": ("precise", (normal(8, 8),), {}),
        "pooled": ("pooled", (normal(8, 3),), {"valid": np.arange(8) < 5}),
        "halves": ("halves", (normal(4, 3),), {}),
        "from_file": ("from_file", (weights, normal(2)), {}),
    }
