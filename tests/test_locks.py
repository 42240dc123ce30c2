"""The JAX that a workspace builds with where it names no lock: its Python decides."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stagec.bundle.archive import Archive
from tests.building import COMPILER
from tests.nested import NestedBazel, workspace_files

FILES = {
    ".bazelrc": "build --nosandbox_debug\n",
    "BUILD": 'exports_files(["python3.11", "python3.12"])\n',
    "models/models.toml": """[manifest]
name = "models"
version = "1"
[functions.f]
entry = "models.f:f"
args = ["f32[4]"]
targets = ["cpu-avx2"]
""",
    "models/BUILD": """load("@models_manifest//:defs.bzl", "aot_manifest")

aot_manifest(
    name = "models",
    deps = ["f.py"],
)
""",
    "models/f.py": "import jax.numpy as jnp\n\ndef f(x):\n    return jnp.sin(x)\n",
}
# It says what stagec asks an interpreter, and has no packages.
PYTHON = """#!/bin/sh
printf '%s\\n' {version} "$(realpath "$0")" cpython-x-x86_64-linux-gnu True
"""
LOCKS = {"requirements": "jaxlib", "cuda": "jax-cuda13-pjrt", "rocm": "jax-rocm7-pjrt", "tpu": "libtpu"}


def pinned(file: Path, package: str) -> str:
    """The version of a package in a lock."""
    match = re.search(rf"^{package}==(\S+)", file.read_text(), re.MULTILINE)
    assert match, file
    return match[1]


OLDER, NEWEST = (pinned(folder / "requirements.lock", "jaxlib") for folder in (COMPILER, COMPILER / "newest"))


class Workspace(NestedBazel):
    """A workspace without a lock, with programs that say they are Python."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, folder / "workspace")
        self.files = {**workspace_files("user"), **FILES}
        for version in ("3.11.2", "3.12.1", "3.14.0rc1"):
            self.files[f"python{version[:4]}"] = PYTHON.format(version=version)
        self.files["MODULE.bazel"] += 'use_repo(stagec, "stagec_aarch64", "stagec_jaxlibs", "stagec_locks")\n'
        for name, text in self.files.items():
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            (self.root / name).write_text(text)
            (self.root / name).chmod(0o755)

    def declare(self, attributes: str) -> None:
        """Give stagec's Python environment these attributes."""
        texts = {
            "WORKSPACE": ("stagec_repositories()", f"stagec_repositories({attributes})"),
            "MODULE.bazel": ("stagec.manifest(", f"stagec.python({attributes})\nstagec.manifest("),
        }
        for file, (old, new) in texts.items():
            assert old in self.files[file]
            (self.root / file).write_text(self.files[file].replace(old, new))

    def locked(self, python: str) -> dict[str, str]:
        """The versions in the locks, where this Python is named, and the build's own jaxlib."""
        done = self.run(
            "build",
            "--nobuild",
            "@stagec_locks//:all",
            "@stagec_jaxlibs//:all",
            before=["env", f"STAGEC_PYTHON={self.root / python}"],
        )
        assert done.returncode == 0, done.stderr
        folders = self.fetched()
        versions = {
            package: pinned(folders["stagec_locks"] / "compiler" / f"{name}.lock", package)
            for name, package in LOCKS.items()
        }
        release = re.search(r'in \[\("(.*?)"', (folders["stagec_jaxlibs"] / "defs.bzl").read_text())
        assert release
        return versions | {"own": release[1]}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    workspace = Workspace(tmp_path_factory.mktemp("locks"))
    try:
        yield workspace
    finally:
        workspace.run("shutdown")


def versions(release: str) -> dict[str, str]:
    """What the locks have with a jaxlib."""
    folder = COMPILER / "newest" if release == NEWEST else COMPILER
    names = {name: folder if name != "rocm" else COMPILER for name in LOCKS}
    return {package: pinned(names[name] / f"{name}.lock", package) for name, package in LOCKS.items()} | {
        "own": release
    }


@pytest.mark.parametrize(
    ("python", "attributes", "release"),
    [
        ("python3.11", "", OLDER),
        ("python3.12", "", NEWEST),
        ("python3.14", "", NEWEST),
        # What actions run decides, and not what installs.
        ("python3.11", 'interpreter = "/opt/python", interpreter_version = "3.12.1"', NEWEST),
        ("python3.12", 'interpreter = "/opt/python", interpreter_version = "3.11.9"', OLDER),
        ("python3.11", 'python = "//:python3.12"', NEWEST),
        # The compilers for devices are those of the lock's jaxlib.
        ("python3.12", 'lock = "@stagec//compiler:requirements.lock"', OLDER),
        ("python3.11", 'lock = "@stagec//compiler:newest/requirements.lock"', NEWEST),
    ],
)
def test_the_python_decides(workspace: Workspace, python: str, attributes: str, release: str) -> None:
    workspace.declare(attributes)
    assert workspace.locked(python) == versions(release)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="Python 3.11 unpacks the wheels for aarch64")
def test_the_newest_has_no_wheels_for_debians_python(workspace: Workspace) -> None:
    workspace.declare('lock = "@stagec//compiler:newest/requirements.lock"')
    done = workspace.run("build", "--nobuild", "@stagec_aarch64//:environment")
    assert done.returncode == 1
    assert (
        "  jaxlib from 0.11 on has none for Debian's Python 3.11, which compiles for aarch64: build with an older "
        'one,\n  lock = "@stagec//compiler:requirements.lock", or declare a Python for aarch64 (docs/aarch64.md)\n'
    ) in done.stderr


def test_a_workspace_without_a_lock_is_built_with_it(workspace: Workspace) -> None:
    workspace.declare("")
    done = workspace.run("build", "//models")
    assert done.returncode == 0, done.stderr
    archive = Archive(workspace.root / "bazel-bin" / "models" / "models.aot")
    (executable,) = archive.index["functions"]["f"]["executables"]
    assert executable["versions"]["jaxlib"] == (NEWEST if sys.version_info >= (3, 12) else OLDER)
