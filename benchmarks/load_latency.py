"""Calls while other executables of the bundle load, and loading them ahead in several threads."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import bundles
from benchmarks.measuring import Options, Row, interleaved, ratio

FUNCTION = "model"
LONGEST = "longest call like an earlier one"
NEW = "call of a new kind"


def measure(options: Options) -> list[Row]:
    """Measure in one process, a new bundle for each round: 24 blocks for three sizes."""
    folder = options.folder / FUNCTION
    bundles.build(FUNCTION, folder, sized=True)
    command = [sys.executable, "-s", "-S", __file__, str(folder), str(options.rounds)]
    done = subprocess.run(command, env=bundles.environment(folder), stdout=subprocess.PIPE, text=True, check=True)
    seconds: dict[str, list[float]] = json.loads(done.stdout)
    rows = []
    for name, target in ((LONGEST, None), (NEW, 10.0)):
        pair = {when: seconds[f"{name}, {when}"] for when in ("while others load", "alone")}
        rows.append(Row(f"{name}, while others load", "alone", ratio(pair, *pair), target, pair))
    pair = {threads: seconds[f"preload, {threads}"] for threads in ("two threads", "one thread")}
    rows.append(Row("preload, two threads", "one thread", ratio(pair, *pair), 0.9, pair))
    return rows


def _measured(folder: Path, rounds: int) -> dict[str, list[float]]:
    import numpy as np

    import stagec
    from benchmarks import starts

    path = folder / "functions.aot"
    params, _ = starts.arguments(FUNCTION)
    sizes = {rows: np.zeros((rows, starts.WIDTH), np.float32) for rows in bundles.ROWS}
    small, *others = bundles.ROWS
    seconds: dict[str, list[float]] = {}

    def timed(called: Callable[..., Any], *arguments: Any) -> float:
        start = time.perf_counter()
        called(*arguments)
        return time.perf_counter() - start

    for _ in range(rounds):
        # Each is measured with a bundle of its own, on which the other kind of call is new.
        for when in ("alone", "while others load"):
            with stagec.load(path, policy="executable_only") as bundle:
                called = bundle[FUNCTION]
                for _ in range(3):
                    called(params, sizes[small])
                new = stagec.device_put((params, sizes[small]))
                loading = threading.Thread(target=lambda f=called: [f(params, sizes[rows]) for rows in others])
                if when != "alone":
                    loading.start()
                    time.sleep(0.005)  # it is with XLA by now
                seconds.setdefault(f"{NEW}, {when}", []).append(timed(called, *new))
                calls = [timed(called, params, sizes[small]) for _ in range(100)]
                seconds.setdefault(f"{LONGEST}, {when}", []).append(max(calls))
                if when != "alone":
                    loading.join()

    def preload(threads: int) -> float:
        with stagec.load(path, policy="executable_only") as bundle:
            return timed(bundle.preload, [FUNCTION], threads)

    ways = {"preload, one thread": lambda: preload(1), "preload, two threads": lambda: preload(2)}
    return seconds | interleaved(rounds, ways)


if __name__ == "__main__":
    print(json.dumps(_measured(Path(sys.argv[1]), int(sys.argv[2]))))
