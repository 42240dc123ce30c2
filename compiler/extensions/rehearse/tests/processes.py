"""Processes that rehearse a program, build what it compiled, and run it again with that."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from stagec_rehearse import programs
from tests.building import COMPILER

HITS = """
import json, runpy, sys
import jax
from jax._src import hardware_utils, monitoring
hardware_utils.has_visible_nvidia_gpu = lambda: True
hardware_utils.num_available_amd_gpus = lambda **_: 1
import stagec.jax_cache
counts = {}
monitoring.register_event_listener(lambda event, **_: counts.__setitem__(event, counts.get(event, 0) + 1))
runpy.run_path(sys.argv[1])
print(json.dumps({event.rpartition("/")[2]: count for event, count in counts.items() if "compilation_cache" in event}))
"""
SERIES = """
import json, sys
from stagec import cli
for words in json.load(open(sys.argv[1])):
    assert cli.main(words) == 0, words
"""
EXTENSION = Path(programs.__file__).parents[1]


def run(*words: str | Path, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python without the settings of JAX and XLA that this process has."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    path = os.pathsep.join([str(COMPILER), str(EXTENSION), *filter(None, sys.path)])
    command = [sys.executable, *map(str, words)]
    environment |= {"PYTHONPATH": path, **variables}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=1800)


def stagec(*words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command of stagec."""
    return run("-m", "stagec", *words, cwd=cwd, JAX_PLATFORMS="cpu")


def specified(rehearsal: Path, target: str, keys: list[Path], cwd: Path) -> subprocess.CompletedProcess[str]:
    """Write spec.json, with which to compile the programs of a rehearsal."""
    words = ["--programs", rehearsal / programs.NAME, "--target", target, "--output", cwd / "spec.json"]
    return stagec("action", "program-spec", *words, "--label", "//a:b", *_each("--key", keys), cwd=cwd)


def built(rehearsal: Path, target: str, cwd: Path) -> tuple[Path, int]:
    """Build a rehearsal as `aot_programs` does; return the folder for JAX, and how many programs are in it.

    One process compiles all, as a worker of Bazel's does.
    """
    keys = sorted((rehearsal / "programs").iterdir())
    done = specified(rehearsal, target, keys, cwd)
    assert done.returncode == 0, done.stderr
    compiling = [
        [
            *("action", "jax-compile", "--spec", cwd / "spec.json", "--key", key),
            *("--entry", cwd / f"{key.stem}.json", "--output", cwd / f"{key.stem}.xla"),
            *("--costs", cwd / f"{key.stem}.costs.json"),
        ]
        for key in keys
    ]
    entries: list[str | Path] = [f"{key.stem}:{cwd / key.stem}.json:{cwd / key.stem}.xla" for key in keys]
    (cwd / "series.json").write_text(json.dumps(compiling, default=str))
    done = run("-c", SERIES, cwd / "series.json", cwd=cwd, JAX_PLATFORMS="cpu")
    assert done.returncode == 0, done.stderr
    done = stagec("action", "jax-cache", *_each("--entry", entries), "--output", cwd / "cache", cwd=cwd)
    assert done.returncode == 0, done.stderr
    return cwd / "cache", len(keys)


def reported(rehearsal: Path, target: str, costs: list[Path], cwd: Path) -> subprocess.CompletedProcess[str]:
    """Write report.html, the page of a build. costs: what `built` wrote of each program."""
    given: list[str | Path] = [f"{path.name.partition('.')[0]}:{path}:{target}" for path in costs]
    words = ["--programs", rehearsal / programs.NAME, "--output", cwd / "report.html", *_each("--costs", given)]
    return stagec("action", "program-report", *words, cwd=cwd)


def rows(page: Path) -> list[list[str]]:
    """Return the cells of the table of a page."""
    lines = re.findall(r"<tr>(<td.*)</tr>", page.read_text("utf-8"))
    return [re.findall(r"<td.*?>(.*?)</td>", line) for line in lines]


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


@dataclass(frozen=True)
class Found:
    """What a program found in the folder that was built of its rehearsal.

    programs: that were rehearsed. built: those that differ. found, compiled: of its second run, how often JAX found
    what it would have compiled, and how often it was to compile. said, status: of that run.
    """

    programs: int
    built: int
    found: int
    compiled: int
    said: str
    status: int


PROGRAMS = {"equinox_loop": 1, "paged_decode": 1, "blackjax_nuts": 1, "fsdp": 8, "many": 1}
"""Programs as people write them, in the folder `programs`, and the devices of each."""
BY_HAND = {"mjx_rollout": 1, "maxtext_train": 1}
"""More of them, whose packages no lock of the suite has."""
ALL = "STAGEC_ALL_PROGRAMS" in os.environ
"""Whether each program is tried on each device, as //tests:release does. Otherwise most are tried on one."""


def found_again(name: str, device: str, target: str, devices: int, cwd: Path, *words: str) -> Found:
    """Rehearse one of the programs, build what it compiled, and rehearse it again with that. words: more options."""
    shutil.copy(Path(__file__).with_name("programs") / f"{name}.py", cwd)
    command = ("--", sys.executable, f"{name}.py")
    rehearse = ("-m", "stagec", "rehearse", "--device", device, "--devices", str(devices), *words)
    first = run(*rehearse, *command, cwd=cwd)
    assert first.returncode == 0, first.stdout + first.stderr
    listed = programs.read(str(cwd / "rehearsal" / programs.NAME))
    cache, count = built(cwd / "rehearsal", target, cwd)
    compared = ("-o", "again", "--compare", Path("rehearsal", programs.NAME))
    second = run(*rehearse, *compared, "--jax-cache", cache, *command, cwd=cwd)
    said = second.stdout + second.stderr
    ((found, compiled),) = re.findall(r"found in JAX's cache:\n  (\d+) of (\d+) compilations", said) or [(0, 0)]
    return Found(len(listed.programs), count, int(found), int(compiled), said, second.returncode)


def _each(option: str, values: list[Path] | list[str | Path]) -> list[str | Path]:
    return [word for value in values for word in (option, value)]


if __name__ == "__main__":
    device, target, *names = sys.argv[1:]
    for word in names or PROGRAMS:  # a program, and how many devices: "fsdp:4"
        name, _, count = word.partition(":")
        devices = int(count or (PROGRAMS | BY_HAND)[name])
        with tempfile.TemporaryDirectory() as folder:
            result = found_again(name, device, target, devices, Path(folder))
        row = name, device, devices, result.programs, result.built, f"{result.found} of {result.compiled}"
        print(f"| {' | '.join(map(str, row))} |", flush=True)
        if result.status:
            print(result.said, flush=True)
