"""Bazel inside of a test: a user's workspace with stagec checked out beside it."""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.building import ROOT

_WORKSPACE = """workspace(name = "NAME")

local_repository(
    name = "stagec",
    path = "../stagec",
)

load("@stagec//rules:repositories.bzl", "stagec_manifest", "stagec_offline_repositories", "stagec_repositories")

stagec_offline_repositories()

stagec_repositories()

stagec_manifest(
    name = "models_manifest",
    manifest = "//models:models.toml",
)
"""
_MODULE = """module(name = "NAME")

bazel_dep(name = "platforms", version = "0.0.11")
bazel_dep(name = "stagec", version = "0.1.0")
local_path_override(
    module_name = "stagec",
    path = "../stagec",
)

stagec = use_extension("@stagec//rules:extensions.bzl", "stagec")
stagec.manifest(
    name = "models_manifest",
    manifest = "//models:models.toml",
)
use_repo(stagec, "models_manifest")
"""


def workspace_files(name: str) -> dict[str, str]:
    """Return WORKSPACE and MODULE.bazel of a workspace with a manifest //models:models.toml, and stagec beside it."""
    texts = {"WORKSPACE": _WORKSPACE, "MODULE.bazel": _MODULE}
    return {file: text.replace("NAME", name) for file, text in texts.items()}


class NestedBazel:
    """A workspace in a temporary folder, and the Bazel that builds it.

    folder: where stagec's sources are copied to, as `stagec`, and where Bazel keeps its files.
    root: the workspace.
    user: who runs it, by number; None: the user of the tests. The folder is that user's.
    """

    def __init__(self, folder: Path, root: Path, user: int | None = None) -> None:
        ignored = shutil.ignore_patterns("__pycache__", "bazel-*")
        for name in ("compiler", "rules"):
            shutil.copytree(ROOT / name, folder / "stagec" / name, ignore=ignored)
        for name in ("BUILD", "MODULE.bazel", "WORKSPACE", "bazelw"):
            shutil.copy(ROOT / name, folder / "stagec" / name)
        self.root, self.user = root, user
        start = [f"--output_user_root={folder / 'bazel'}", "--max_idle_secs=300"]
        self._command = [str(folder / "stagec" / "bazelw"), *start]
        # Of the variables that a test of Bazel's has, those that describe that test are not the nested Bazel's.
        mine = re.compile(r"TEST|RUNFILES|PYTHON|BAZEL_|BUILD_|XML_|JAVA_RUNFILES|RUN_UNDER|GTEST|JAX_")
        self._env = {name: value for name, value in os.environ.items() if not mine.match(name)}
        if user is not None:
            self._env.update(HOME=str(folder), USER=str(user))

    def run(
        self, command: str, *arguments: str, before: Sequence[str] = (), cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of Bazel. before: a command that runs it. cwd: where, if not in the workspace."""
        process = self.start(command, *arguments, before=before, cwd=cwd)
        output, errors = process.communicate()
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)

    def start(
        self, command: str, *arguments: str, before: Sequence[str] = (), cwd: Path | None = None
    ) -> subprocess.Popen[str]:
        """Start a command of Bazel. before: a command that runs it. cwd: where, if not in the workspace."""
        return subprocess.Popen(
            [*before, *self._command, command, "--color=no", *arguments],
            cwd=cwd or self.root,
            env=self._env,
            user=self.user,
            group=self.user,
            extra_groups=None if self.user is None else (),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
