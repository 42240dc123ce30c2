"""Measure on this machine how long a bundle takes to load, its first call, and calls from several threads."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from argparse import SUPPRESS
from typing import Any

from stagec.cli.files import Answer, Options
from stagec.cli.options import at_least, more_than_0, value
from stagec.cli.run import bucket

OPTIONS = {
    "bundle": "the bundle (.aot)",
    "[function ...]": "name of the function; of a variant, FUNCTION-VARIANT (default: all)",
    "[--bucket DIM=SIZE ...]": value("only this bucket (default: all)", []),
    "[--threads THREADS ...]": value(
        "from how many threads at a time (default: 1, and as many as there are cores)", None, at_least(1)
    ),
    "[--seconds SECONDS]": value("how long a round takes (default: 0.5)", 0.5, more_than_0),
    "[--rounds ROUNDS]": value("rounds of each measurement (default: 5)", 5, at_least(1)),
    "[--starts STARTS]": value("new processes that load and call once (default: 5)", 5, at_least(0)),
    "[--target TARGET]": "which of the bundle's targets to run (default: the best for this machine)",
    "[--start]": SUPPRESS,
}


def run(options: Options) -> Answer:
    if options.start:
        return _start(options)
    from stagec.checking import latency, trials
    from stagec.core.messages.progress import Progress
    from stagec.loader.load import load

    rows: list[dict[str, Any]] = []
    lines: list[str] = []
    sizes = bucket(options.bucket)
    several = options.threads or sorted({1, len(os.sched_getaffinity(0))})
    bundle = load(options.bundle, options.target, policy="executable_only")
    every = (variant.name for function in bundle.values() for variant in function.variants.values() or [function])
    names = options.function or list(every)
    with Progress("bench", len(names)) as progress:
        for name in names:
            progress.step(name)
            function = trials.find(bundle, name)
            started = None
            if options.starts:
                started = latency.starts(options.bundle, name, options.target, options.starts, "--start")
            calls = [
                latency.measure(function, description, threads, options.rounds, options.seconds)
                for description in latency.descriptions(function, sizes)
                for threads in several
            ]
            lines += latency.as_text(name, bundle.target, started, calls)
            told = [{**dataclasses.asdict(call), "spread": call.spread} for call in calls]
            starts = dataclasses.asdict(started) if started else None
            rows.append({"function": name, "target": bundle.target, "starts": starts, "calls": told})
    here = latency.machine()
    about = f"{here['cores']} cores of {here['cpu']}, load {here['load']:.2f}, jaxlib {here['jaxlib']}"
    text = "".join(f"{line}\n" for line in (f"{bundle.name} {bundle.version} on {about}", *lines))
    head = {"kind": "bench", "bundle": bundle.name, "version": bundle.version, "machine": here}
    return Answer({**head, "functions": rows}, text)


def _start(options: Options) -> Answer:
    """Load, call once, and say the seconds of both and of imports, as JSON."""
    began = time.perf_counter()
    from stagec.checking import trials
    from stagec.loader.load import load

    imported = time.perf_counter()
    bundle = load(options.bundle, options.target, policy="executable_only")
    function = trials.find(bundle, options.function[0])
    loaded = time.perf_counter()
    description = function.descriptions[0]
    arrays = trials.random_arguments(description, 0, function.weights)
    args, kwargs = trials.structured(function, description, arrays)
    ready = time.perf_counter()
    function(*args, **kwargs)
    called = time.perf_counter()
    seconds = {"imported": imported - began, "loaded": loaded - imported, "called": called - ready}
    return Answer(seconds, json.dumps(seconds))
