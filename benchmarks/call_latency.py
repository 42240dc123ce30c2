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


def measure(options: Options) -> list[Row]:
    """Measure both in a process of their own each; at least 15 rounds, for they are short."""
    rows = []
    for function in CALLS:
        folder = options.folder / function
        bundles.build(function, folder)
        command = [sys.executable, "-s", "-S", __file__, function, str(folder), str(max(15, options.rounds))]
        done = subprocess.run(command, env=bundles.environment(folder), stdout=subprocess.PIPE, text=True, check=True)
        seconds: dict[str, list[float]] = json.loads(done.stdout)
        for given in ("device", "numpy"):
            for way in ("call", "flat"):
                one, other = f"{way}, {given}", f"jit, {given}"
                told = {name: seconds[name] for name in (one, other)}
                name = f"{way} of {function}, {given} arrays"
                rows.append(Row(name, "jax.jit", ratio(seconds, one, other), 1.0, told))
    return rows


def _measured(function: str, folder: Path, rounds: int) -> dict[str, list[float]]:
    import jax

    import stagec
    from benchmarks import functions, starts

    numpy = starts.arguments(function)
    ours = stagec.load(folder / "functions.aot", policy="executable_only")[function]
    theirs = jax.jit(getattr(functions, function))
    flat = ours.flat(*numpy)
    timed: dict[str, Callable[[], float]] = {}
    for given, mine, jaxs in (("numpy", numpy, numpy), ("device", stagec.device_put(numpy), jax.device_put(numpy))):
        ways = (("call", ours, mine), ("flat", flat, jax.tree.leaves(mine)), ("jit", theirs, jaxs))
        for way, called, arguments in ways:
            jax.block_until_ready(theirs(*jaxs))
            called(*arguments)
            timed[f"{way}, {given}"] = partial(_per_call, called, arguments, CALLS[function])
    return interleaved(rounds, timed)


def _per_call(called: Callable[..., Any], arguments: tuple[Any, ...], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        called(*arguments)
    return (time.perf_counter() - start) / calls


if __name__ == "__main__":
    print(json.dumps(_measured(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))))
