"""What a function and a build cost beyond XLA: clean builds of several sizes, beside the same in one script."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial

from benchmarks import models
from benchmarks.measuring import Options, Row, interleaved, ratio
from benchmarks.small_functions import clean_build, script
from benchmarks.workspace import Workspace, workspace

COUNTS = (5, 20, 40, 80)
"""How many functions of eight small layers each."""
_TARGET = {"host": "AVX2"}
"""LLVM takes another time for another instruction set, and this one is on most machines."""
_WHERE = "jit, compile, serialize in one process, for the same instruction set"


def measure(options: Options) -> list[Row]:
    """Return the CPU seconds of a function and of a build beside its functions, and ratios for each size.

    The sizes of a round are measured with one Bazel server, which has built before.
    """
    cpu: dict[str, list[float]] = {}
    with workspace(options.folder / "overhead", models.alike(max(COUNTS)), _TARGET) as built:
        built.clean_build()

        def of(name: str, count: int, run: Callable[[Workspace, list[float]], float]) -> float:
            models.write(models.alike(count), _TARGET, built.root)
            built.build("--nobuild")
            return run(built, cpu.setdefault(name, []))

        ways = {"build": clean_build, "script": partial(script, isa=_TARGET["host"])}
        names = {f"{way} of {count}": (count, run) for count in COUNTS for way, run in ways.items()}
        seconds = interleaved(options.rounds, {name: partial(of, name, *each) for name, each in names.items()})
    return rows(seconds, cpu)


def rows(seconds: dict[str, list[float]], cpu: dict[str, list[float]]) -> list[Row]:
    """Return the table of what was measured: seconds and CPU seconds of each round by way and count."""
    lines = {
        way: [line(COUNTS, [cpu[f"{way} of {count}"][number] for count in COUNTS]) for number in range(len(several))]
        for way, several in (("build", cpu[f"build of {COUNTS[0]}"]), ("script", cpu[f"script of {COUNTS[0]}"]))
    }
    of_a_function = {way: [slope for slope, _ in both] for way, both in lines.items()}
    beside = {way: [start for _, start in both] for way, both in lines.items()}
    table = [
        Row("a function, CPU seconds", "script", ratio(of_a_function, "build", "script"), 1.42, of_a_function),
        Row("a build beside its functions", "", statistics.median(beside["build"]), 2.5, beside, "s", "CPU seconds"),
    ]
    for count, most in zip(COUNTS, (None, None, 1.4, 1.35), strict=True):
        for what, of_all, wanted in (("", seconds, most), (", CPU seconds", cpu, None)):
            measured = {way: of_all[f"{way} of {count}"] for way in ("build", "script")}
            name = f"clean build of {count} functions of eight layers{what}"
            table.append(Row(name, _WHERE, ratio(measured, "build", "script"), wanted, measured))
    return table


def line(counts: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Return slope and start of the line that is nearest to what each count takes."""
    fitted = statistics.linear_regression(counts, seconds)
    return fitted.slope, fitted.intercept
