"""What each release of jaxlib costs that one bundle is for: time of a clean build, and bytes.

Either each release compiles, or the oldest one, and the build tries what it made with the others (`runs_on`). From
Python 3.12 on there are wheels of three releases, before that of two.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack

from benchmarks import models
from benchmarks.measuring import Options, Row, interleaved, ratio
from benchmarks.workspace import Workspace, host_target, workspace

COUNT = 20
LOCKS = ("older", "newest") if sys.version_info >= (3, 12) else ("older",)
"""The locks in tests/ of releases besides the build's own."""


def measure(options: Options) -> list[Row]:
    """Return rows for each number of releases after the first: its clean build and its bundle, by those of one."""
    with ExitStack() as opened:

        def made(count: int, tried: bool) -> Workspace:
            folder = options.folder / f"fleet{count}{tried}"
            return opened.enter_context(workspace(folder, models.alike(COUNT), host_target(), LOCKS[:count], tried))

        built = {"1 release": made(0, False)}
        for count in range(1, len(LOCKS) + 1):
            built[f"{count + 1} releases, each compiles"] = made(count, False)
            built[f"{count + 1} releases, one compiles"] = made(count, True)
        seconds = interleaved(options.rounds, {name: made.clean_build for name, made in built.items()})
        sizes = {name: (made.root / "bazel-bin/models/models.aot").stat().st_size for name, made in built.items()}
    first, *others = built
    rows = []
    for name in others:
        kept = {releases: seconds[releases] for releases in (name, first)}
        what = f"{COUNT} functions of eight layers for {name}"
        rows.append(Row(f"clean build of {what}", first, ratio(seconds, name, first), None, kept))
        note = f"{sizes[name]:,} bytes for {sizes[first]:,}"
        rows.append(Row(f"bundle of {what}", first, sizes[name] / sizes[first], None, note=note))
    return rows
