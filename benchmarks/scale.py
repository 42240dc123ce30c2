"""Growth with the number of functions, each for two targets: clean and null builds, one edit, and memory."""

from __future__ import annotations

import itertools
import statistics

from benchmarks import models
from benchmarks.measuring import Options, Row, interleaved
from benchmarks.workspace import Workspace, workspace

_TARGETS = {"small": "SSE4_2", "large": "AVX2"}


def measure(options: Options) -> list[Row]:
    """Return rows of measurements, and of how they grow from the smallest workspace to the largest.

    A clean build is measured once in each size: the large one takes minutes.
    """
    clean: dict[str, list[float]] = {}
    memory: dict[str, list[float]] = {"Bazel's memory": [], "memory of bundling": []}
    for count in options.sizes:
        with workspace(options.folder / f"scale{count}", models.small(count), _TARGETS) as built:
            clean[f"{count:,} functions"] = [built.build()]
            if count == options.sizes[-1]:
                large = _interactive(built, options.rounds)
            memory["Bazel's memory"].append(built.server_memory() / 2**20)
            memory["memory of bundling"].append(built.bundling_memory() / 2**20)
    least, most = options.sizes[0], options.sizes[-1]
    times = [clean[f"{count:,} functions"][0] / count for count in (least, most)]
    both = f"{most:,} functions x 2 targets"
    growth = f"{least:,} to {most:,} functions"
    return [
        Row(f"null build of {both}", "", statistics.median(large["null"]), 1.5, {"null": large["null"]}, "s"),
        Row(f"plan and analyze {both}", "", statistics.median(large["plan"]), None, {"plan": large["plan"]}, "s"),
        Row(f"edit one of {both}", "", statistics.median(large["edit"]), None, {"edit": large["edit"]}, "s"),
        Row(
            f"time of a function, {growth}",
            f"that of one of {least:,}",
            times[1] / times[0],
            1.0,
            clean,
            note="1 round",
        ),
        *(
            Row(
                f"{name}, {growth}",
                f"{most // least:,} times that of {least:,}",
                values[-1] / values[0] / (most / least),
                1.0,
                note=", ".join(f"{value:,.0f} MiB of {n:,}" for n, value in zip(options.sizes, values, strict=True)),
            )
            for name, values in memory.items()
        ),
    ]


def _interactive(built: Workspace, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of a build after an edit of one function, with nothing to do, and of analysis after a plan."""
    built.build()  # Bazel looks at all files that it wrote
    numbers = itertools.count(1)

    def edit() -> float:
        built.append("models/f0000.py", f"def f0000(w, x):\n    return layers.mlp(w, x, 1) + {next(numbers)}")
        return built.build()

    def plan() -> float:
        built.append("models/models.toml", f"# {next(numbers)}")
        return built.build("--nobuild")

    return interleaved(rounds, {"edit": edit, "null": built.build, "plan": plan})
