"""Bazel inside of a test: a user's workspace with stagec checked out beside it."""

import os
import re
import shutil
import subprocess
from pathlib import Path

from tests.building import ROOT


class NestedBazel:
    """A workspace in a temporary folder, and the Bazel that builds it.

    folder: where stagec's sources are copied to, as `stagec`, and where Bazel keeps its files.
    root: the workspace.
    """

    def __init__(self, folder: Path, root: Path) -> None:
        ignored = shutil.ignore_patterns("__pycache__", "bazel-*")
        for name in ("compiler", "rules"):
            shutil.copytree(ROOT / name, folder / "stagec" / name, ignore=ignored)
        for name in ("BUILD", "MODULE.bazel", "WORKSPACE", "bazelw"):
            shutil.copy(ROOT / name, folder / "stagec" / name)
        self.root = root
        self._command = [folder / "stagec" / "bazelw", f"--output_user_root={folder / 'bazel'}", "--max_idle_secs=300"]
        # Of the variables that a test of Bazel's has, those that describe that test are not the nested Bazel's.
        mine = re.compile(r"TEST|RUNFILES|PYTHON|BAZEL_|BUILD_|XML_|JAVA_RUNFILES|RUN_UNDER|GTEST|JAX_")
        self._env = {name: value for name, value in os.environ.items() if not mine.match(name)}

    def run(self, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command of Bazel."""
        process = self.start(command, *arguments)
        output, errors = process.communicate()
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)

    def start(self, command: str, *arguments: str) -> subprocess.Popen[str]:
        """Start a command of Bazel."""
        return subprocess.Popen(
            [*self._command, command, "--color=no", *arguments],
            cwd=self.root,
            env=self._env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
