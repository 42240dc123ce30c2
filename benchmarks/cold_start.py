"""From the start of a process to its first result: a bundle, the ways that JAX has, and its cache built by stagec."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from benchmarks import bundles
from benchmarks.measuring import Options, Row, interleaved, ratio

JAX = ("jit", "cached", "exported", "serialized")
FLOORS = {"load": 1.3, "load_and_run": None}
OWN = ("import stagec", "index", "description")
"""The steps of a start, of those that `starts.steps` names, that no floor has."""


def measure(options: Options) -> list[Row]:
    """Measure a perceptron, a transformer's block and 24 of them; ways are functions of starts.py."""
    rows = []
    for function in ("mlp", "block", "model"):
        folder = options.folder / function
        bundles.build(function, folder, sized=function == "mlp")
        _seconds("prepare", function, folder)
        ways = ("stagec", *JAX, "built", "warm", *FLOORS)
        for way in ways:  # byte code and pages of files
            _seconds(way, function, folder)
        seconds = interleaved(options.rounds, {way: partial(_seconds, way, function, folder) for way in ways})
        best = min(JAX, key=lambda way: statistics.median(seconds[way]))
        shown = {way: seconds[way] for way in ("stagec", *JAX)}
        name = f"process start to first result, {function}"
        rows.append(Row(name, f"best of JAX's ways: {best}", ratio(seconds, "stagec", best), 0.3, shown))
        built = {way: seconds[way] for way in ("built", "cached", "jit")}
        against = "jit with JAX's own warm cache"
        rows.append(
            Row(f"the same in a program with JAX, {function}", against, ratio(seconds, "built", "cached"), 1.1, built)
        )
        untraced = {way: seconds[way] for way in ("warm", "cached", "jit")}
        name = f"the same in a program with JAX, untraced, {function}"
        rows.append(Row(name, against, ratio(seconds, "warm", "cached"), 0.6, untraced))
        for floor, target in FLOORS.items():
            against = f"numpy, jaxlib, {floor.replace('_', ' ')}"
            row = f"the same, by its floor: {floor.replace('_', ' ')}"
            rows.append(Row(row, against, ratio(seconds, "stagec", floor), target, {floor: seconds[floor]}))
        if function != "mlp":  # whose bundle has several sizes
            rows.append(_steps(options.rounds, function, folder))
    rows.append(_without_ynnpack(options))
    rows.append(_of_many(options))
    return rows


def _of_many(options: Options) -> Row:
    """The start with a bundle of 1,000 functions, of which a process calls one."""
    folders = {}
    for count in (10, 1000):
        folders[f"{count:,} functions"] = folder = options.folder / f"of{count}"
        folder.mkdir()
        bundles.repeat(options.folder / "block" / "functions.aot", count, folder / "functions.aot")
        _seconds("stagec", "block", folder)
    ways = {name: partial(_seconds, "stagec", "block", folder) for name, folder in folders.items()}
    seconds = interleaved(options.rounds, ways)
    few, many = folders
    return Row(
        "process start to first result, block, one of 1,000 functions", few, ratio(seconds, many, few), 1.2, seconds
    )


def _without_ynnpack(options: Options) -> Row:
    """Compare a bundle whose matrix products are Eigen's with what XLA does by itself: see docs/performance.md."""
    folder, other = options.folder / "model", options.folder / "model_without_ynnpack"
    bundles.build("model", other, compiler_options={"xla_cpu_experimental_ynn_fusion_type": ""})
    _seconds("stagec", "model", other)
    folders = {"without YNNPACK": other, "with YNNPACK": folder}
    seconds = interleaved(options.rounds, {n: partial(_seconds, "stagec", "model", f) for n, f in folders.items()})
    cost = ratio(seconds, *folders)
    return Row("process start to first result, model without YNNPACK", "the same with it", cost, None, seconds)


def _steps(rounds: int, function: str, folder: Path) -> Row:
    starts = [json.loads(_start("steps", function, folder)[1]) for _ in range(rounds)]
    seconds = {step: [start[step] for start in starts] for step in starts[0]}
    own = statistics.median(sum(start[step] for step in OWN) for start in starts)
    return Row("the same, what is stagec's own", "", own, None, seconds, "s", ", ".join(OWN))


def _seconds(way: str, function: str, folder: Path) -> float:
    return _start(way, function, folder)[0]


def _start(way: str, function: str, folder: Path) -> tuple[float, str]:
    """Return the seconds from the start of a process to its first line, which it writes with its result; and the line.

    Raises RuntimeError when it writes none.
    """
    # Without `site`: it would run files of the machine's own packages, which belong to none of the ways.
    command = [sys.executable, "-s", "-S", str(Path(__file__).with_name("starts.py")), way, function, str(folder)]
    start = time.perf_counter()
    with subprocess.Popen(command, env=bundles.environment(folder), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        seconds = time.perf_counter() - start
    if not line:
        raise RuntimeError(f"{way} of {function} ended with {process.returncode}")
    return seconds, line
