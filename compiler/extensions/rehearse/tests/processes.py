"""Processes that rehearse a program, build what it compiled, and run it again with that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from stagec_rehearse import programs
from tests.building import COMPILER

HITS = """
import json, runpy, sys
import jax
from jax._src import hardware_utils, monitoring
hardware_utils.has_visible_nvidia_gpu = lambda: True
import stagec.jax_cache
counts = {}
monitoring.register_event_listener(lambda event, **_: counts.__setitem__(event, counts.get(event, 0) + 1))
runpy.run_path(sys.argv[1])
print(json.dumps({event.rpartition("/")[2]: count for event, count in counts.items() if "compilation_cache" in event}))
"""
EXTENSION = Path(programs.__file__).parents[1]


def run(*words: str | Path, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python without the settings of JAX and XLA that this process has."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    path = os.pathsep.join([str(COMPILER), str(EXTENSION), *filter(None, sys.path)])
    command = [sys.executable, *map(str, words)]
    environment |= {"PYTHONPATH": path, **variables}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)


def stagec(*words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command of stagec."""
    return run("-m", "stagec", *words, cwd=cwd, JAX_PLATFORMS="cpu")


def specified(rehearsal: Path, target: str, keys: list[Path], cwd: Path) -> subprocess.CompletedProcess[str]:
    """Write spec.json, with which to compile the programs of a rehearsal."""
    words = ["--programs", rehearsal / programs.NAME, "--target", target, "--output", cwd / "spec.json"]
    return stagec("action", "program-spec", *words, "--label", "//a:b", *_each("--key", keys), cwd=cwd)


def built(rehearsal: Path, target: str, cwd: Path) -> tuple[Path, int]:
    """Build a rehearsal as `aot_programs` does; return the folder for JAX, and how many programs are in it."""
    keys = sorted((rehearsal / "programs").iterdir())
    done = specified(rehearsal, target, keys, cwd)
    assert done.returncode == 0, done.stderr
    entries: list[str | Path] = []
    for key in keys:
        names, executable = cwd / f"{key.stem}.json", cwd / f"{key.stem}.xla"
        compiled = ["--spec", cwd / "spec.json", "--key", key, "--entry", names, "--output", executable]
        done = stagec("action", "jax-compile", *compiled, cwd=cwd)
        assert done.returncode == 0, done.stderr
        entries.append(f"{key.stem}:{names}:{executable}")
    done = stagec("action", "jax-cache", *_each("--entry", entries), "--output", cwd / "cache", cwd=cwd)
    assert done.returncode == 0, done.stderr
    return cwd / "cache", len(keys)


def hits(program: str, cache: Path, cwd: Path, **variables: str) -> dict[str, int]:
    """Run a program with such a folder; return the events of JAX's cache, by name."""
    found_by_jax = {
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none",
    }
    done = run("-c", HITS, program, cwd=cwd, **found_by_jax, **variables)
    assert done.returncode == 0, done.stderr
    counts: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return counts


def _each(option: str, values: list[Path] | list[str | Path]) -> list[str | Path]:
    return [word for value in values for word in (option, value)]
