"""A Bazel workspace with functions to build, and the plain script that builds the same."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import jaxlib

from benchmarks import models
from benchmarks.bundles import environment
from stagec.hardware.x86 import ISA, Isa
from stagec.manifest.workspace import SETTINGS
from stagec.pjrt import host
from tests.building import ROOT
from tests.nested import NestedBazel, workspace_files

NO_WORKER = tuple(f"--strategy=Stagec{stage}=sandboxed" for stage in ("Export", "Compile", "Bundle"))
"""Options of a build in which every action is a sandboxed process of its own."""


_PYTHON = (sys.executable, "-s", "-P")
_WRITE_BYTE_CODE = """import jax
from jax.experimental import serialize_executable

serialize_executable.serialize(jax.jit(lambda x: x + 1).lower(1.0).compile())
"""
"""Imports what the plain script imports. Without byte code, that takes three times as long."""


class Workspace(NestedBazel):
    """A workspace, and the Bazel that builds it. actions: how many of stagec's ran in the last build."""

    def __init__(
        self,
        folder: Path,
        functions: list[models.Function],
        targets: Mapping[str, str],
        locks: Sequence[str] = (),
        tried: bool = False,
    ) -> None:
        super().__init__(folder, folder / "workspace", startup=())  # as users start it: .bazelrc has the options
        self.folder = folder
        texts = {lock: (ROOT / "tests" / f"{lock}.lock").read_text() for lock in locks}
        releases = [re.search(r"^jaxlib==(\S+)", text, re.MULTILINE)[1] for text in texts.values()]  # type: ignore[index]
        all_of_them = [jaxlib.__version__, *releases] if locks else []
        if tried:
            first, *rest = sorted(all_of_them, key=lambda release: [int(part) for part in release.split(".")])
            models.write(functions, targets, self.root, [first], rest)
        else:
            models.write(functions, targets, self.root, all_of_them)
        for file, text in workspace_files("benchmark", locks).items():
            (self.root / file).write_text(text)
        for lock, text in texts.items():
            (self.root / f"{lock}.lock").write_text(text)
        (self.root / "BUILD").write_text('exports_files(glob(["*.lock"], allow_empty = True))\n')
        (self.root / ".bazelrc").write_text(SETTINGS)

    def build(self, *arguments: str) -> float:
        """Build the bundle; return the seconds that it took, Bazel's own included."""
        started = time.monotonic()
        done = self.run("build", "//models", *arguments)
        seconds = time.monotonic() - started
        if done.returncode:
            raise RuntimeError(done.stderr)
        self.actions = sum(map(int, re.findall(r"processes: .*?(\d+) (?:worker|[a-z]+-sandbox|remote)", done.stderr)))
        return seconds

    def clean_build(self, *arguments: str) -> float:
        """Build without what was built before, and without its workers; Bazel itself and its fetches stay."""
        self.run("clean")
        return self.build(*arguments)

    def plain_script(self, cache: Path | None = None, isa: str = "") -> float:
        """Build the same with the plain script, in a new process; return the seconds.

        isa: the instruction set that XLA may use, by its name; "" for all that this machine has.
        """
        output = self.folder / "plain"
        shutil.rmtree(output, ignore_errors=True)
        script = Path(__file__).with_name("plain.py")
        words = [script, self.root, output, *([cache] if cache else [])]
        self.prepare_script()
        env = environment(self.folder, XLA_FLAGS=isa and f"--xla_cpu_max_isa={isa}")
        started = time.monotonic()
        subprocess.run([*_PYTHON, *map(str, words)], check=True, env=env, capture_output=True)
        return time.monotonic() - started

    def prepare_script(self) -> None:
        """Write the byte code of what the plain script imports, if it is not there."""
        env = environment(self.folder)
        if not Path(env["PYTHONPYCACHEPREFIX"]).exists():
            subprocess.run([*_PYTHON, "-c", _WRITE_BYTE_CODE], check=True, env=env, capture_output=True)

    def cpu_seconds(self) -> float:
        """Return the CPU seconds so far of Bazel's server, and of all processes that it started."""
        server = int(self.run("info", "server_pid").stdout)
        parents, ticks = dict[int, int](), dict[int, int]()
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # it has ended
                fields = stat.read_text().rpartition(")")[2].split()
                parents[int(stat.parent.name)] = int(fields[1])
                ticks[int(stat.parent.name)] = sum(map(int, fields[11:15]))  # its own, and of children that ended

        def is_ours(process: int) -> bool:
            return process == server or (process in parents and is_ours(parents[process]))

        return sum(used for process, used in ticks.items() if is_ours(process)) / os.sysconf("SC_CLK_TCK")

    def server_memory(self) -> int:
        """Return the bytes of memory that Bazel's server has had at the most."""
        status = Path("/proc", self.run("info", "server_pid").stdout.strip(), "status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]

    def bundling_memory(self) -> int:
        """Return the bytes of memory that the last action that wrote the bundle had at the most."""
        profile = json.loads((self.root / "bazel-bin" / "models" / "models.profile.json").read_text())
        return int(profile["max_rss"])

    def append(self, file: str, text: str) -> None:
        """Add a line to a source, as a user who edits it would."""
        with (self.root / file).open("a") as source:
            source.write(text + "\n")


def host_target() -> dict[str, str]:
    """Return a target that is this machine, as near as stagec knows it: the plain script compiles for it too.

    Only what XLA makes vectors with counts: a machine may lack rdseed, which code of XLA's has no use for.
    """

    def vectors(isa: Isa) -> set[str]:
        return {flag for flag in isa.requires if flag.startswith(("sse", "avx", "amx"))}

    return {"host": [name for name, isa in ISA.items() if vectors(isa) <= host.cpu_flags()][-1]}


@contextmanager
def workspace(
    folder: Path,
    functions: list[models.Function],
    targets: Mapping[str, str],
    locks: Sequence[str] = (),
    tried: bool = False,
) -> Iterator[Workspace]:
    """Make a workspace in a new folder, fetch what it needs, and end its Bazel afterwards.

    locks: in tests/, of other releases of jaxlib, for which the bundle is too. tried: the oldest release compiles, and
    the others run that; otherwise each compiles.
    """
    made = Workspace(folder, functions, targets, locks, tried)
    try:
        fetched = made.run("build", "--nobuild", "//models")
        if fetched.returncode:
            raise RuntimeError(fetched.stderr)
        yield made
    finally:
        made.run("shutdown")
