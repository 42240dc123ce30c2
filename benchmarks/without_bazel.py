"""`stagec build`, which needs no Bazel, against a plain script: clean builds, a null build, and the first export."""

from __future__ import annotations

import compileall
import json
import shutil
import statistics
import subprocess
import sys
import time

from benchmarks import models
from benchmarks.bundles import environment
from benchmarks.measuring import Options, Row, interleaved, ratio
from benchmarks.workspace import Workspace, host_target

COUNTS = (1, 40)
"""How many functions of eight layers: a first export, and a build that both cores share."""


def measure(options: Options) -> list[Row]:
    """Return the rows of both numbers of functions. Each clean build has an empty store and a new process."""
    rows = []
    for count, most in zip(COUNTS, (1.3, 1.1), strict=True):
        target = host_target()
        built = Workspace(options.folder / f"local{count}", models.alike(count), target)
        isa = target["host"]
        # As pip leaves an installed stagec: an action writes no byte code.
        compileall.compile_dir(built.folder / "stagec" / "compiler" / "stagec", quiet=1)
        _build(built)
        seconds = interleaved(
            options.rounds,
            {
                "build": lambda built=built: _build(built),  # type: ignore[misc]
                "null": lambda built=built: _build(built, clean=False),  # type: ignore[misc]
                "script": lambda built=built, isa=isa: built.plain_script(isa=isa),  # type: ignore[misc]
            },
        )
        what = f"{count} function{'s' if count > 1 else ''} of eight layers"
        kept = {way: seconds[way] for way in ("build", "script")}
        against = "jit, compile, serialize in one process, for the same instruction set"
        rows.append(Row(f"stagec build of {what}", against, ratio(seconds, "build", "script"), most, kept))
        null = seconds["null"]
        rows.append(Row(f"null build of {what}", "", statistics.median(null), 0.3, {"null": null}, "s"))
    return rows


def _build(built: Workspace, clean: bool = True) -> float:
    """Build; return the seconds. clean: with an empty store."""
    store = built.folder / "store"
    if clean:
        shutil.rmtree(store, ignore_errors=True)
    program = built.folder / "stagec" / "compiler" / "stagec" / "__main__.py"
    command = [sys.executable, "-s", str(program), "build", "models/models.toml", "--json"]
    env = environment(built.folder, XDG_CACHE_HOME=str(store))
    started = time.monotonic()
    done = subprocess.run(command, cwd=built.root, env=env, check=True, stdout=subprocess.PIPE, text=True)
    seconds = time.monotonic() - started
    if bool(json.loads(done.stdout)["ran"]) != clean:
        raise RuntimeError(done.stdout)
    return seconds
