"""What each release of jaxlib costs that one bundle is for: time of a clean build, and bytes.

From Python 3.12 on there are wheels of three releases, before that of two.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack

from benchmarks import models
from benchmarks.measuring import Options, Row, interleaved, ratio
from benchmarks.workspace import host_target, workspace

COUNT = 20
LOCKS = ("older", "newest") if sys.version_info >= (3, 12) else ("older",)
"""The locks in tests/ of releases besides the build's own."""


def measure(options: Options) -> list[Row]:
    """Return rows for each number of releases after the first: its clean build and its bundle, by those of one."""
    with ExitStack() as opened:
        built = {}
        for count in range(len(LOCKS) + 1):
            folder = options.folder / f"fleet{count}"
            made = workspace(folder, models.alike(COUNT), host_target(), LOCKS[:count])
            built[f"{count + 1} of jaxlib"] = opened.enter_context(made)
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
