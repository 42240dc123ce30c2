"""Functions of arrays beside JAX, in CPU seconds: trace, lower and export; importing; operations outside a trace."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks import models
from benchmarks.measuring import Options, Row, interleaved, ratio
from benchmarks.workspace import Workspace, workspace

_TARGET = {"small": "SSE4_2"}
PROGRAM = Path(__file__).with_name("array_functions.py")


def measure(options: Options) -> list[Row]:
    """Return the rows. Each round is a process for JAX and one for stagec, as the export of a function is."""
    spent: dict[str, dict[str, list[float]]] = {}
    for _ in range(options.rounds):
        for which in ("arrays", "jax"):
            command = [sys.executable, str(PROGRAM), which, "1"]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            for name, seconds in json.loads(done.stdout).items():
                # Of what is measured often in a process, the least: other programs make it longer, and none shorter.
                spent.setdefault(name, {}).setdefault(which, []).append(min(seconds))

    def row(name: str, what: str, most: float | None) -> Row:
        return Row(
            what, "the same with jax.numpy and jax.export", ratio(spent[name], "arrays", "jax"), most, spent[name]
        )

    imports = statistics.median(spent["import"]["arrays"])
    return [
        row("transformer", "trace, lower and export 24 layers of a transformer", 0.3),
        row("functions", "trace, lower and export 100 functions of eight layers", 0.3),
        row("operation", "one operation outside a trace", 1.5),
        _exports(options),
        Row(
            "import stagec_arrays.numpy, after numpy and jaxlib",
            "",
            imports,
            0.15,
            {"arrays": spent["import"]["arrays"]},
            "s",
        ),
    ]


def _exports(options: Options) -> Row:
    """Return the seconds of all export actions of a clean build, as their profiles have them."""
    count = options.sizes[0]
    with (
        workspace(options.folder / "arrays", models.of_frontend(count, "arrays"), _TARGET) as arrays,
        workspace(options.folder / "jax", models.of_frontend(count, "jax"), _TARGET) as jax,
    ):
        seconds = interleaved(options.rounds, {"arrays": lambda: _exporting(arrays), "jax": lambda: _exporting(jax)})
    what = f"export actions of a clean build of {count} functions"
    return Row(what, "the same with jax.numpy", ratio(seconds, "arrays", "jax"), None, seconds)


def _exporting(built: Workspace) -> float:
    built.clean_build("--output_groups=+profile")
    profiles = [json.loads(file.read_text()) for file in (built.root / "bazel-bin" / "models").glob("*.profile.json")]
    return sum(float(profile["seconds"]) for profile in profiles if profile["command"] == "export")
