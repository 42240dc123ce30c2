"""Calls of what is loaded: how long one takes, of a function of one number and of one of 200 arrays."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import bundles
from benchmarks.measuring import Options, Row, interleaved, ratio

CALLS = {"scalar": 5000, "tree": 200}
"""In one round."""

PAIRS = (
    ("call, device arrays", "jit, device arrays"),
    ("flat, device arrays", "jit, device arrays"),
    ("flat, numpy arrays", "jit, numpy arrays"),
    ("call, numpy arrays", "jit, numpy arrays, results read"),
    ("call, JAX's arrays", "jit, device arrays"),
)
"""What is compared: calls that do the same. A call with numpy arrays waits and returns numpy arrays; the others leave
their results on the device, as `jax.jit` does."""
TARGETS = {("scalar", "call, JAX's arrays"): 1.3, ("tree", "call, JAX's arrays"): 1.1}
"""Others are 1."""


def measure(options: Options) -> list[Row]:
    """Measure both each in a separate process; at least 15 rounds, for they are short."""
    rows = []
    for function in CALLS:
        folder = options.folder / function
        bundles.build(function, folder)
        command = [sys.executable, "-s", "-S", __file__, function, str(folder), str(max(15, options.rounds))]
        done = subprocess.run(command, env=bundles.environment(folder), stdout=subprocess.PIPE, text=True, check=True)
        seconds: dict[str, list[float]] = json.loads(done.stdout)
        for way, other in PAIRS:
            pair = {name: seconds[name] for name in (way, other)}
            against = "jax.jit, results read" if other.endswith("read") else "jax.jit"
            rows.append(
                Row(f"{function}: {way}", against, ratio(seconds, way, other), TARGETS.get((function, way), 1.0), pair)
            )
    return rows


def _measured(function: str, folder: Path, rounds: int) -> dict[str, list[float]]:
    import jax
    import numpy as np

    import stagec
    from benchmarks import functions, starts

    arrays = starts.arguments(function)
    leaves = jax.tree.leaves(arrays)
    ours, of_jax = (stagec.load(folder / "functions.aot", policy="executable_only")[function] for _ in range(2))
    theirs = jax.jit(getattr(functions, function))
    flat = ours.flat(*arrays)
    # The quickest ways to read what jax.jit returns; `jax.device_get` takes longer.
    read = np.asarray if function == "scalar" else partial(jax.tree.map, np.asarray)
    ways: dict[str, tuple[Callable[..., Any], Any]] = {
        "call, device arrays": (ours, stagec.device_put(arrays)),
        "flat, device arrays": (flat, stagec.device_put(leaves)),
        "flat, numpy arrays": (flat, leaves),
        "call, numpy arrays": (ours, arrays),
        "call, JAX's arrays": (of_jax, jax.device_put(arrays)),
        "jit, device arrays": (theirs, jax.device_put(arrays)),
        "jit, numpy arrays": (theirs, arrays),
        "jit, numpy arrays, results read": (lambda *given: read(theirs(*given)), arrays),
    }
    for called, given in ways.values():
        jax.block_until_ready([called(*given) for _ in range(2)])
    timed = {way: partial(_per_call, called, given, CALLS[function]) for way, (called, given) in ways.items()}
    return interleaved(rounds, timed)


def _per_call(called: Callable[..., Any], arguments: tuple[Any, ...], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        called(*arguments)
    return (time.perf_counter() - start) / calls


if __name__ == "__main__":
    print(json.dumps(_measured(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))))
