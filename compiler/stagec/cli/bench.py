"""Measure on this machine how long a bundle takes to load, its first call, and calls from several threads."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from typing import Any

from stagec.cli.files import Answer
from stagec.cli.options import at_least, more_than_0
from stagec.cli.run import bucket

_ONCE = "--start"


def arguments(parser: argparse.ArgumentParser) -> None:
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("bundle", help="the bundle (.aot)")
    parser.add_argument(
        "function", nargs="*", help="name of the function; of a variant, FUNCTION-VARIANT (default: all)"
    )
    parser.add_argument("--bucket", nargs="+", metavar="DIM=SIZE", default=[], help="only this bucket (default: all)")
    parser.add_argument(
        "--threads",
        type=at_least(1),
        nargs="+",
        default=sorted({1, cores}),
        help="from how many threads at a time (default: 1, and as many as there are cores)",
    )
    parser.add_argument("--seconds", type=more_than_0, default=0.5, help="how long a round takes (default: 0.5)")
    parser.add_argument("--rounds", type=at_least(1), default=5, help="rounds of each measurement (default: 5)")
    parser.add_argument(
        "--starts", type=at_least(0), default=5, help="new processes that load and call once (default: 5)"
    )
    parser.add_argument("--target", help="which of the bundle's targets to run (default: the best for this machine)")
    parser.add_argument(_ONCE, action="store_true", dest="once", help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> Answer:
    if options.once:
        return _start(options)
    from stagec.core.telling.progress import Progress
    from stagec.loader import latency, trials
    from stagec.loader.serving import load

    rows: list[dict[str, Any]] = []
    lines: list[str] = []
    sizes = bucket(options.bucket)
    bundle = load(options.bundle, options.target, policy="executable_only")
    every = (variant.name for function in bundle.values() for variant in function.variants.values() or [function])
    names = options.function or list(every)
    with Progress("bench", len(names)) as progress:
        for name in names:
            progress.step(name)
            function = trials.find(bundle, name)
            started = None
            if options.starts:
                started = latency.starts(options.bundle, name, options.target, options.starts, _ONCE)
            calls = [
                latency.measure(function, description, threads, options.rounds, options.seconds)
                for description in latency.descriptions(function, sizes)
                for threads in options.threads
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


def _start(options: argparse.Namespace) -> Answer:
    """Load, call once, and say the seconds of both and of imports, as JSON."""
    began = time.perf_counter()
    from stagec.loader import trials
    from stagec.loader.serving import load

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
