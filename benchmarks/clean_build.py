"""A clean build of functions of mixed sizes, against a plain script."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks import models
from benchmarks.measuring import Options, Row, interleaved, ratio
from benchmarks.workspace import NO_WORKER, host_target, workspace


def measure(options: Options) -> list[Row]:
    """Return the rows with workers and without; the runs of both and of the script are interleaved."""
    count = options.sizes[1]
    script = "jit, compile, serialize in one process"
    with workspace(options.folder / "clean", models.mixed(count), host_target()) as built:
        runs: dict[str, Callable[[], float]] = {
            "script": built.plain_script,
            "build": built.clean_build,
            "no worker": lambda: built.clean_build(*NO_WORKER),
        }
        seconds = interleaved(options.rounds, runs)
    names = {"build": 1.0, "no worker": None}
    return [
        Row(
            f"clean build of {count} functions" + ("" if name == "build" else ", no worker"),
            script,
            ratio(seconds, name, "script"),
            target,
            {way: seconds[way] for way in (name, "script")},
        )
        for name, target in names.items()
    ]
