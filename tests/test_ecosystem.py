"""tests/ecosystem: models of many libraries as their own pages write them, built by Bazel and compared with jax.jit."""

import re
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.building import ROOT
from tests.nested import NestedBazel

SOURCE = ROOT / "tests" / "ecosystem"
MODELS = "\n".join(path.read_text() for path in sorted(SOURCE.glob("*/*.py")))
GROUPS = ("training", "science", "serving")
FUNCTIONS = [
    name for group in GROUPS for name in tomllib.loads((SOURCE / group / f"{group}.toml").read_text())["functions"]
]
LIBRARIES = re.findall(
    r"^import (\w+)|^from (\w+)", "\n".join(p.read_text() for p in SOURCE.glob("*/*.py")), re.MULTILINE
)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NestedBazel]:
    folder = tmp_path_factory.mktemp("ecosystem")
    root = folder / "stagec" / "tests" / "ecosystem"
    shutil.copytree(SOURCE, root, ignore=shutil.ignore_patterns("__pycache__", "bazel-*"))
    bazel = NestedBazel(folder, root)
    try:
        built = bazel.run("build", "//...")
        assert built.returncode == 0, built.stderr
        yield bazel
    finally:
        bazel.run("shutdown")


@pytest.fixture(scope="module")
def calls(workspace: NestedBazel) -> tuple[Path, str]:
    """What jax.jit took and returned, and what reference.py printed."""
    stored = workspace.root.parent / "calls.npz"
    done = workspace.run("run", "//:reference", "--", "bazel-bin", str(stored))
    assert done.returncode == 0, done.stdout + done.stderr
    return stored, done.stdout


def test_there_are_many_libraries() -> None:
    named = set(re.findall(r"^(?:import|from) (\w+)", MODELS, re.MULTILINE)) - {"jax"} - sys.stdlib_module_names
    assert len(named) >= 15, named
    assert len(FUNCTIONS) >= 16


def test_results_are_those_of_jit(calls: tuple[Path, str]) -> None:
    assert re.findall(r"^(\w+) +with classes .* are equal$", calls[1], re.MULTILINE) == FUNCTIONS


def test_results_are_those_of_jit_without_the_libraries(workspace: NestedBazel, calls: tuple[Path, str]) -> None:
    done = workspace.run("run", "//:serve", "--", "bazel-bin", str(calls[0]))
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"^(\w+) +without classes .* are equal$", done.stdout, re.MULTILINE) == FUNCTIONS
