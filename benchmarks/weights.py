"""Edits of code beside large weights that are not in the bundle, against the same edits beside small ones."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks import models
from benchmarks.measuring import Options, Row, interleaved, ratio
from benchmarks.workspace import Workspace, host_target, workspace

_COLUMNS = 2**20
_MODEL = "def f(weights, x):\n    return x * weights['w'][0, 0]\n"
_FUNCTION = """
[functions.weighted]
entry = "models.weighted:f"
args = [{{ w = "f32[{rows},{columns}]" }}, "f32[8]"]
bind = {{ weights = {{ file = "weights.safetensors", external = true }} }}
targets = ["host"]
"""


def measure(options: Options) -> list[Row]:
    """Return the row of an edit beside 10 GB of weights: 10 MB for each function of the largest workspace.

    Raises RuntimeError when another action runs than export, compile and bundle.
    """
    megabytes = 10 * options.sizes[-1]
    with (
        _beside(options.folder / "large", megabytes * 2**20) as large,
        _beside(options.folder / "small", 2**22) as small,
    ):
        numbers = itertools.count(1)

        def edited(built: Workspace) -> float:
            built.append(
                "models/weighted.py", f"def f(weights, x):\n    return x * weights['w'][0, 0] + {next(numbers)}"
            )
            seconds = built.build()
            if built.actions != 3:
                raise RuntimeError(f"{built.actions} actions ran, not 3")
            return seconds

        seconds = interleaved(options.rounds, {"large": lambda: edited(large), "small": lambda: edited(small)})
    name = f"edit of a function beside {megabytes / 1000:g} GB of weights"
    return [Row(name, "beside 4 MB", ratio(seconds, "large", "small"), 1.5, seconds)]


@contextmanager
def _beside(folder: Path, size: int) -> Iterator[Workspace]:
    """A workspace that is built, with a function whose weights take so many bytes. Their file is sparse."""
    with workspace(folder, models.alike(1), host_target()) as built:
        rows = size // (4 * _COLUMNS)
        with (built.root / "models" / "models.toml").open("a") as manifest:
            manifest.write(_FUNCTION.format(rows=rows, columns=_COLUMNS))
        (built.root / "models" / "weighted.py").write_text(_MODEL)
        build_file = built.root / "models" / "BUILD"
        own = "function_deps = {"
        build_file.write_text(build_file.read_text().replace(own, f'{own}\n        "weighted": ["weighted.py"],'))
        data = rows * _COLUMNS * 4
        entry = {"dtype": "F32", "shape": [rows, _COLUMNS], "data_offsets": [0, data]}
        header = json.dumps({"w": entry}).encode()
        with (built.root / "models" / "weights.safetensors").open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + data)
        built.build()
        yield built
