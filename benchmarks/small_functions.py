"""Clean builds of functions of eight small layers each, against a plain script: wall clock and CPU seconds."""

from __future__ import annotations

import resource
from collections.abc import Callable

from benchmarks import models
from benchmarks.measuring import Options, Row, interleaved, ratio
from benchmarks.workspace import Workspace, host_target, workspace

COUNTS = (40, 100)
"""How many functions, where the command line says nothing else."""


def measure(options: Options) -> list[Row]:
    """Return the rows of both numbers of functions."""
    return [row for count in COUNTS for row in _rows(options, count)]


def _rows(options: Options, count: int) -> list[Row]:
    """The script compiles for the instruction set of the target: XLA takes another time for another one.

    It runs a second time for all that this machine has, as it would without a flag.
    """
    target = host_target()
    cpu: dict[str, list[float]] = {"build": [], "script": []}
    with workspace(options.folder / f"small{count}", models.alike(count), target) as built:
        runs: dict[str, Callable[[], float]] = {
            "build": lambda: clean_build(built, cpu["build"]),
            "script": lambda: script(built, cpu["script"], target["host"]),
            "script without a flag": built.plain_script,
        }
        seconds = interleaved(options.rounds, runs)
    name, plain = f"clean build of {count} functions of eight layers", "jit, compile, serialize in one process"

    def row(what: str, other: str, against: str, measured: dict[str, list[float]], most: float | None) -> Row:
        kept = {way: measured[way] for way in ("build", other)}
        return Row(what, against, ratio(measured, "build", other), most, kept)

    return [
        row(name, "script", f"{plain}, for the same instruction set", seconds, 1.0),
        row(f"{name}, CPU seconds", "script", f"{plain}, for the same instruction set", cpu, None),
        row(f"{name}, against this CPU", "script without a flag", f"{plain}, for this CPU", seconds, None),
    ]


def clean_build(built: Workspace, cpu: list[float]) -> float:
    """Build what was built before again; return the seconds, and add the CPU seconds to a list."""
    built.run("clean")
    before = built.cpu_seconds()
    seconds = built.build()
    cpu.append(built.cpu_seconds() - before)
    return seconds


def script(built: Workspace, cpu: list[float], isa: str) -> float:
    """Build the same with the plain script, for an instruction set; return and add as `clean_build` does."""
    built.prepare_script()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = built.plain_script(isa=isa)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return seconds
