"""Run benchmarks, print their table, and write results.json, and README's chart results.svg, beside this file's source.

bazel run //benchmarks
bazel run //benchmarks -- clean_build edits --rounds 7
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import signal
import sys
import tempfile
from pathlib import Path

from benchmarks import chart, measuring

BENCHMARKS = (
    "clean_build",
    "small_functions",
    "without_bazel",
    "overhead",
    "edits",
    "scale",
    "tracing",
    "caches",
    "cold_start",
    "call_latency",
    "load_latency",
    "bundle_size",
    "fleet",
    "environment",
    "inputs",
    "remote",
    "serving",
    "serving_cpu",
    "weights",
)
"""The modules, each with `measure(options) -> list[Row]`, in the order of the table."""


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="benchmarks", description="Measure builds and bundles against plain JAX.")
    parser.add_argument("names", nargs="*", metavar="BENCHMARK", help=f"which of {', '.join(BENCHMARKS)}; all of them")
    parser.add_argument("--rounds", type=int, default=5, help="how often each is measured; 5")
    parser.add_argument("--sizes", type=int, nargs=3, default=(10, 100, 1000), help="numbers of functions; 10 100 1000")
    given = parser.parse_args()
    unknown = set(given.names) - set(BENCHMARKS)
    if unknown:
        parser.error(f"there is no {', '.join(sorted(unknown))}: write some of {', '.join(BENCHMARKS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # a benchmark ends the Bazel that it started
    rows: dict[str, list[measuring.Row]] = {}
    for name in given.names or BENCHMARKS:
        print(f"{name} ...", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="stagec-benchmarks-", ignore_cleanup_errors=True) as folder:
            options = measuring.Options(Path(folder), given.rounds, tuple(given.sizes))
            rows[name] = importlib.import_module(f"benchmarks.{name}").measure(options)
        print(measuring.as_table(rows[name]), flush=True)
    write(rows, Path(os.environ.get("BUILD_WORKSPACE_DIRECTORY", ".")) / "benchmarks")


def write(rows: dict[str, list[measuring.Row]], folder: Path) -> None:
    """Write the rows of benchmarks to the results in a folder; those of benchmarks that were not run stay."""
    results = folder / "results.json"
    known = json.loads(results.read_text("utf-8")) if results.is_file() else {}
    known |= {name: [dataclasses.asdict(row) for row in some] for name, some in rows.items()}
    ordered = {name: known[name] for name in BENCHMARKS if name in known}
    results.write_text(json.dumps(ordered, indent=1) + "\n", "utf-8")
    if "cold_start" in rows:
        (folder / "results.svg").write_text(chart.as_svg(rows["cold_start"]), "utf-8")


if __name__ == "__main__":
    main()
