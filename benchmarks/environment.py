"""The installation of a Python environment by uv, against pip: stagec's packages, and a hundred of JAX's ecosystem."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.measuring import Options, Row, interleaved, ratio
from tests.building import COMPILER, INSTALLER

LOCKS = (COMPILER / "requirements.lock", Path(__file__).with_name("libraries.lock"))


def measure(options: Options) -> list[Row]:
    """Return two rows for each lock: uv that has kept nothing, and uv after an edit of the lock.

    pip stands for what there was before uv: its cache has the wheels, and each installation compiles all modules.
    """
    run_installer(COMPILER / "installer.lock", options.folder / "uv")
    uv = ["--uv", str(options.folder / "uv" / "site-packages" / "bin" / "uv")]
    rows = []
    for lock in LOCKS:
        out, cache, nothing = (options.folder / name for name in ("out", "cache", "nothing"))
        install: Callable[..., float] = partial(run_installer, lock, out)
        install()
        timed = {
            "pip": partial(install, empty=nothing, UV_CACHE_DIR=str(nothing)),
            "uv": partial(install, *uv, empty=cache, UV_CACHE_DIR=str(cache)),
            "uv, again": partial(install, *uv, UV_CACHE_DIR=str(cache)),
        }
        seconds = interleaved(options.rounds, timed)
        packages = len(json.loads((out / "packages.json").read_text("utf-8"))["packages"])
        for which, what in (("uv", "the first time"), ("uv, again", "after an edit of the lock")):
            of_both = {name: seconds[name] for name in ("pip", which)}
            rows.append(Row(f"install {packages} packages, {what}", "pip", ratio(seconds, which, "pip"), 1.0, of_both))
    return rows


def run_installer(lock: Path, out: Path, *words: str, empty: Path | None = None, **env: str) -> float:
    """Install a lock into an empty folder. empty: a folder that is removed before. Returns the seconds."""
    for folder in (out, empty):
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
    out.mkdir(parents=True)
    command = [sys.executable, "-B", "-E", str(INSTALLER), str(lock), lock.name, *words]
    start = time.monotonic()
    environment = {**os.environ, "PIP_NO_CACHE_DIR": "", **env}
    subprocess.run(command, cwd=out, env=environment, stdout=subprocess.DEVNULL, check=True)
    return time.monotonic() - start
