"""The measurements of `stagec bench`: the seconds to load a bundle, to call it first, and to call it from threads.

All numbers hold for this machine in its present state. Each number has a spread, which says how far to trust it.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stagec.bundle.description import Description
from stagec.checking import trials
from stagec.core.builds import naming
from stagec.core.messages.refusal import LoadError
from stagec.loader.function import Function
from stagec.pjrt import compatibility

_WARM_UP = 0.2
"""Seconds of calls before the measurement, with at least `_WARM_CALLS`."""
_WARM_CALLS = 3
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Starts:
    """Seconds of each step before the first result, in each of several new processes.

    imported: numpy, jaxlib and the loader. loaded: `stagec.load`. called: the first call, which hands the executable to
    XLA.
    """

    imported: tuple[float, ...]
    loaded: tuple[float, ...]
    called: tuple[float, ...]


@dataclass(frozen=True)
class Calls:
    """Calls of one bucket from several threads at a time, with numpy arrays.

    bucket: sizes; empty if the function has none. calls: how many were measured. per_second: in each round.
    percentiles: of all calls, percent -> seconds. longest: seconds.
    """

    bucket: Mapping[str, int]
    threads: int
    calls: int
    per_second: tuple[float, ...]
    percentiles: Mapping[str, float]
    longest: float

    @property
    def spread(self) -> float:
        """The spread of the rounds, as a share of the median of calls a second."""
        return (max(self.per_second) - min(self.per_second)) / float(np.median(self.per_second))


def machine() -> dict[str, Any]:
    """Return the facts that the numbers depend on: the CPU, the cores that this process may use, and versions."""
    rows = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    names = (row.partition(":")[2].strip() for row in rows if row.startswith("model name"))
    return {
        "cpu": next(names, platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "jaxlib": compatibility.version(),
    }


def starts(bundle: str, function: str, target: str | None, processes: int, once: str) -> Starts:
    """Start `processes` processes, one after the other. Each loads the bundle and calls the function once.

    once: the option of `stagec bench` that makes a process run `start`. Raises LoadError when one fails.
    """
    flags = [f"-{letter}" for letter, name in _FLAGS.items() if getattr(sys.flags, name)]
    words = [sys.executable, *flags, "-m", "stagec", "bench", bundle, function, once]
    words += ["--target", target] if target else []
    rows = []
    for _ in range(processes):
        done = subprocess.run(words, env=_environment(), check=False, capture_output=True, text=True)
        if done.returncode:
            raise LoadError("executable", f"a process that calls {function} failed: {done.stderr.strip()}")
        rows.append(json.loads(done.stdout))
    return Starts(*(tuple(row[key] for row in rows) for key in ("imported", "loaded", "called")))


_FLAGS = {"B": "dont_write_bytecode", "s": "no_user_site", "S": "no_site"}


def _environment() -> dict[str, str]:
    """Return the environment of this process, so that the new one imports the same stagec."""
    root = str(Path(__file__).parent.parent.parent)
    path = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(path))}


def measure(function: Function, description: Description, threads: int, rounds: int, seconds: float) -> Calls:
    """Call a function with random arguments from several threads, in timed rounds after a warm-up."""
    arrays = trials.random_arguments(description, 0, function.weights)
    args, kwargs = trials.structured(function, description, arrays)

    def call() -> None:
        function(*args, **kwargs)

    began = time.perf_counter()
    for number in range(10**9):
        if number >= _WARM_CALLS and time.perf_counter() - began > _WARM_UP:
            break
        call()
    lengths: list[float] = []
    rates = []
    for _ in range(rounds):
        round_lengths, elapsed = _round(call, threads, seconds)
        lengths += round_lengths
        rates.append(len(round_lengths) / elapsed)
    percentiles = {str(percent): float(np.percentile(lengths, percent)) for percent in PERCENTILES}
    return Calls(description.bucket, threads, len(lengths), tuple(rates), percentiles, max(lengths))


def _round(call: Callable[[], None], threads: int, seconds: float) -> tuple[list[float], float]:
    """Call from several threads for some seconds; return the seconds of each call and of the round."""
    # All begin at once: one that was started first would call alone for a while, and faster.
    ready = threading.Barrier(threads + 1)

    def run() -> list[float]:
        lengths: list[float] = []
        ready.wait()
        now = time.perf_counter()
        end = now + seconds
        # At least once, however long a call takes: of none there is no rate.
        while not lengths or now < end:
            before = now
            call()
            now = time.perf_counter()
            lengths.append(now - before)
        return lengths

    with ThreadPoolExecutor(threads) as pool:
        running = [pool.submit(run) for _ in range(threads)]
        ready.wait()
        began = time.perf_counter()
    elapsed = time.perf_counter() - began  # the pool has waited for all
    return [length for calls in running for length in calls.result()], elapsed


def descriptions(function: Function, bucket: Mapping[str, int]) -> Sequence[Description]:
    """Return the executables to measure: that of `bucket`, or all where it is empty. Raises CallError ("shape")."""
    return [trials.of_bucket(function, bucket)] if bucket else function.descriptions


def as_text(name: str, target: str, started: Starts | None, calls: Sequence[Calls]) -> Iterator[str]:
    """Yield lines for a person."""
    yield f"{name} for {target}"
    if started:
        yield f"  {len(started.imported)} starts of a new process, median (least to most)"
        for what, row in (("import", started.imported), ("load", started.loaded), ("first call", started.called)):
            yield f"    {what:<10}  {_told(float(np.median(row)))} ({_told(min(row))} to {_told(max(row))})"
    table = [
        ("bucket", "threads", "calls/s", "spread", *(f"p{percent}" for percent in PERCENTILES), "longest", "calls")
    ]
    for measured in calls:
        lengths = (*measured.percentiles.values(), measured.longest)
        rate = f"{np.median(measured.per_second):,.0f}"
        table.append(
            (
                naming.bucket(measured.bucket) or "-",
                str(measured.threads),
                rate,
                f"{measured.spread:.0%}",
                *map(_told, lengths),
                f"{measured.calls:,}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for first, *rest in table:
        cells = (f"{cell:>{width}}" for cell, width in zip(rest, widths[1:], strict=True))
        yield "  ".join([f"  {first:<{widths[0]}}", *cells])


def _told(seconds: float) -> str:
    factor, unit = next((f, u) for f, u in ((1, "s"), (1e3, "ms"), (1e6, "us")) if seconds * f >= 1 or u == "us")
    return f"{seconds * factor:.3g} {unit}"
