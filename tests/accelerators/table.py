"""What compilers decided for the functions of decided.toml, run on CPUs, and their kernels: tables in docs/hardware.md.

    python -m tests.accelerators.table [FUNCTION ...]

It builds the functions, or all, for each of their targets, without a device, and needs the packages of
compiler/cuda.lock and tpu.lock. For all it writes the tables; for some it prints them. All take 20 minutes on two
cores.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stagec.backends.analysis import UNKNOWN, of_kernels
from stagec.costs import hlo
from stagec_insight import emulation
from tests.building import ROOT, build, stagec

MANIFEST = "tests/accelerators/decided.toml"
PAGE = ROOT / "docs" / "hardware.md"
_NVIDIA = ("h200", "b200")
_DEVICES = (*_NVIDIA, "v5e", "v6e")


def for_amd(manifest: str) -> str:
    """Return the text of the manifest with AMD devices in the place of all others."""
    of_amd = manifest.replace('"cuda"', '"rocm"').replace("h200", "mi300x").replace("b200", "mi355x")
    return re.sub(r', "v\d[ep]:[^"]+"', "", of_amd)


def instructions(program: bytes) -> int:
    """Return how many instructions a program has, with those in its computations."""
    text = emulation.readable(emulation.module(program))
    return sum(len(computation.instructions) for computation in hlo.parse(text).computations.values())


def compare(bundle: Path) -> dict[str, Any]:
    """Return what `stagec emulate --json` says of a bundle, with the programs beside it."""
    programs = sorted(bundle.parent.glob("*.hlo_after.pb"))
    names = {path: path.name.removesuffix(".hlo_after.pb").partition(".")[2] for path in programs}
    words = [word for path, name in names.items() for word in ("--hlo", f"{name}={path}")]
    done = stagec("emulate", bundle, *words, "--json")
    assert done.returncode in (0, 1), done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def table(told: Mapping[str, Any], counts: Mapping[str, int]) -> str:
    """Return a row for each function: for each device how many instructions, and the largest difference.

    counts: of instructions, by the names of executables.
    """
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
    return _drawn(cells, _DEVICES)


def kernels(out: Path) -> str:
    """Return a row for each function whose inventories are in a folder, with what its kernels for NVIDIA devices take.

    A cell has how many kernels there are, the most registers of a thread, bytes of spills, and the lowest occupancy.
    """
    cells: dict[tuple[str, str], str] = {}
    for path in out.glob("*.inventory.json"):
        _, function, target = path.name.removesuffix(".inventory.json").split(".")
        rows = json.loads(path.read_text())["kernels"]
        device = next(device for device in _DEVICES if target.startswith(device))
        if device in _NVIDIA:
            taken = of_kernels(rows)
            lowest = min((row["occupancy"] for row in rows if row["occupancy"] != UNKNOWN), default=0)
            cells[function, device] = f"{len(rows)}, {taken['registers']}, {taken['spills']}, {lowest:.0%}"
    return _drawn(cells, _NVIDIA)


def _drawn(cells: Mapping[tuple[str, str], str], devices: Sequence[str]) -> str:
    lines = [f"| function | {' | '.join(devices)} |", f"| --- |{' --- |' * len(devices)}"]
    names = sorted({function for function, _ in cells})
    lines += [f"| {name} | {' | '.join(cells.get((name, of), '') for of in devices)} |" for name in names]
    return "\n".join([*lines, ""])


def shown(name: str) -> tuple[str, str, str]:
    """Return the page in three parts: what stands before the table of this name, the table, and the rest."""
    before, begin, rest = PAGE.read_text("utf-8").partition(f"<!-- {name} -->\n")
    rows, end, rest = rest.partition("<!-- end -->")
    return before + begin, rows, end + rest


def write(name: str, rows: str) -> None:
    """Write the table of this name into the page."""
    before, _, rest = shown(name)
    PAGE.write_text(f"{before}{rows}{rest}", "utf-8")


def main(functions: Sequence[str]) -> int:
    """Build, run, and write or print the tables; return 1 where a result is too far from JAX's."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        bundle = build(MANIFEST, out, only=functions, hlo=("cuda", "tpu"))
        told = compare(bundle)
        suffix = ".hlo_after.pb"
        counts = {
            path.name.removesuffix(suffix).partition(".")[2]: instructions(path.read_bytes())
            for path in out.glob(f"*{suffix}")
        }
        tables = {"decided": table(told, counts), "kernels": kernels(out)}
    for name, rows in tables.items():
        if functions:
            print(rows)
        else:
            write(name, rows)
    return 0 if all(row["ok"] for row in told["checks"]) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
