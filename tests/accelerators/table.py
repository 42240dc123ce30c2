"""What compilers decided for the functions of decided.toml, run on CPUs: a table in docs/hardware.md.

    python -m tests.accelerators.table [FUNCTION ...]

It builds the functions, or all, for each of their targets, without a device, and needs the packages of
compiler/cuda.lock and tpu.lock. For all it writes the table; for some it prints it. All take 20 minutes on two cores.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stagec.costs import hlo
from stagec.stages import optimized
from tests.building import ROOT, build, stagec

MANIFEST = "tests/accelerators/decided.toml"
PAGE = ROOT / "docs" / "hardware.md"
_BEGIN, _END = "<!-- decided -->\n", "<!-- end -->"
_DEVICES = ("h200", "b200", "v5e", "v6e")


def instructions(program: bytes) -> int:
    """Return how many instructions a program has, with those in its computations."""
    text = optimized.readable(optimized.module(program))
    return sum(len(computation.instructions) for computation in hlo.parse(text).computations.values())


def compare(bundle: Path) -> dict[str, Any]:
    """Return what `stagec run --golden --optimized --json` says of a bundle, with the programs beside it."""
    programs = sorted(bundle.parent.glob("*.hlo_after.pb"))
    names = {path: path.name.removesuffix(".hlo_after.pb").partition(".")[2] for path in programs}
    words = [word for path, name in names.items() for word in ("--hlo", f"{name}={path}")]
    done = stagec("run", bundle, "--golden", "--optimized", *words, "--json")
    assert done.returncode in (0, 1), done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def table(told: Mapping[str, Any], counts: Mapping[str, int]) -> str:
    """Return a row for each function: for each device how many instructions, and the largest difference.

    counts: of instructions, by the names of executables.
    """
    functions = sorted({name.partition(".")[0] for name in counts})
    cells: dict[tuple[str, str], str] = {}
    for name, count in counts.items():
        function, _, target = name.partition(".")
        rows = [row for row in told["checks"] if (row["function"], row["target"]) == (function, f"{target}, on CPUs")]
        refused = [
            row["why"] for row in told.get("refused", ()) if (row["function"], row["target"]) == (function, target)
        ]
        if refused:
            calls = dict.fromkeys(re.findall(r'"(\w+)"', refused[0]))
            cell = f"refused: {', '.join(calls)}"
        else:
            worst = max(row["absolute"] for row in rows)
            cell = f"{count}, {worst:.1g}" if all(row["ok"] for row in rows) else f"{count}, **{worst:.1g}**"
        cells[function, next(device for device in _DEVICES if target.startswith(device))] = cell
    lines = [f"| function | {' | '.join(_DEVICES)} |", f"| --- |{' --- |' * len(_DEVICES)}"]
    lines += [f"| {name} | {' | '.join(cells.get((name, of), '') for of in _DEVICES)} |" for name in functions]
    return "\n".join([*lines, ""])


def main(functions: Sequence[str]) -> int:
    """Build, run, and write or print the table; return 1 where a result is too far from JAX's."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        bundle = build(MANIFEST, out, only=functions, hlo=("cuda", "tpu"))
        told = compare(bundle)
        suffix = ".hlo_after.pb"
        counts = {
            path.name.removesuffix(suffix).partition(".")[2]: instructions(path.read_bytes())
            for path in out.glob(f"*{suffix}")
        }
    made = table(told, counts)
    if functions:
        print(made)
    else:
        before, _, rest = PAGE.read_text("utf-8").partition(_BEGIN)
        PAGE.write_text(f"{before}{_BEGIN}{made}{_END}{rest.partition(_END)[2]}", "utf-8")
    return 0 if all(row["ok"] for row in told["checks"]) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
