"""A Bazel workspace with functions to build, and the plain script that builds the same."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from benchmarks import models
from stagec.hardware.x86 import ISA
from stagec.pjrt import host
from tests.nested import NestedBazel, workspace_files

NO_WORKER = tuple(f"--strategy=Stagec{stage}=sandboxed" for stage in ("Export", "Compile", "Bundle"))
"""Options of a build in which every action is a sandboxed process of its own."""


class Workspace(NestedBazel):
    """A workspace, and the Bazel that builds it. actions: how many of stagec's ran in the last build."""

    def __init__(self, folder: Path, functions: list[models.Function], targets: Mapping[str, str]) -> None:
        super().__init__(folder, folder / "workspace", startup=())  # as users start it
        self.folder = folder
        models.write(functions, targets, self.root)
        for file, text in workspace_files("benchmark").items():
            (self.root / file).write_text(text)
        (self.root / ".bazelrc").write_text("build --nosandbox_debug\n")

    def build(self, *arguments: str) -> float:
        """Build the bundle; return the seconds that it took, Bazel's own included."""
        started = time.monotonic()
        done = self.run("build", "//models", *arguments)
        seconds = time.monotonic() - started
        if done.returncode:
            raise RuntimeError(done.stderr)
        self.actions = sum(map(int, re.findall(r"processes: .*?(\d+) (?:worker|linux-sandbox)", done.stderr)))
        return seconds

    def clean_build(self, *arguments: str) -> float:
        """Build without what was built before, and without its workers; Bazel itself and its fetches stay."""
        self.run("clean")
        return self.build(*arguments)

    def plain_script(self, cache: Path | None = None) -> float:
        """Build the same with the plain script, in a new process; return the seconds."""
        output = self.folder / "plain"
        shutil.rmtree(output, ignore_errors=True)
        script = Path(__file__).with_name("plain.py")
        words = [script, self.root, output, *([cache] if cache else [])]
        command = [sys.executable, "-s", "-P", *map(str, words)]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        started = time.monotonic()
        subprocess.run(command, check=True, env=environment, capture_output=True)
        return time.monotonic() - started

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
    """Return a target that is this machine, as near as stagec knows it: the plain script compiles for it too."""
    return {"host": [name for name, isa in ISA.items() if set(isa.requires) <= host.cpu_flags()][-1]}


@contextmanager
def workspace(folder: Path, functions: list[models.Function], targets: Mapping[str, str]) -> Iterator[Workspace]:
    """Make a workspace in a new folder, fetch what it needs, and end its Bazel afterwards."""
    made = Workspace(folder, functions, targets)
    try:
        fetched = made.run("build", "--nobuild", "//models")
        if fetched.returncode:
            raise RuntimeError(fetched.stderr)
        yield made
    finally:
        made.run("shutdown")
