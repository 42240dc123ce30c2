"""Packages of a hub, such as rules_python's `@pip//jax`, in place of stagec's lock.

rules_python is in no package registry. What its pip.parse makes is written here: for each package a repository with a
py_library over `site-packages`, `imports = ["site-packages"]` and no RECORD (its whl_library_targets.bzl), and a hub of
aliases.

Modules: rules/private/collected_packages.py, worker/server.py
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.building import ROOT
from tests.nested import NestedBazel, actions, environment, telling, workspace_files
from tests.users import User

HUB = ("flatbuffers", "jax", "jaxlib", "ml_dtypes", "numpy", "opt_einsum", "pydantic", "scipy")
"""What a user names; the others are dependencies of pydantic."""
MANIFEST = """[manifest]
name = "models"
version = "1"
[functions.scale]
entry = "models.scale:f"
args = ["f32[4]"]
targets = ["cpu-avx2"]
"""
BUILD = """load("@models_manifest//:defs.bzl", "aot_manifest")

aot_manifest(name = "models", deps = ["scale.py"])
"""
PACKAGE = """py_library(
    name = "pkg",
    srcs = glob(["site-packages/**/*.py"]),
    data = glob(["site-packages/**"], exclude = ["**/*.py", "**/*.pyc", "**/*.dist-info/RECORD"]),
    imports = ["site-packages"],
    visibility = ["//visibility:public"],
    deps = [{deps}],
)
"""
ALIAS = 'alias(name = "{name}", actual = "@pip_{name}//:pkg", visibility = ["//visibility:public"])\n'


class Workspace(NestedBazel):
    """A workspace whose packages are those of a hub, and the Bazel that builds it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, folder / "workspace")
        self.lock = environment(folder / "environment", User(None, sys.executable))
        self.packages = folder / "packages"
        names = self._unpack()
        repositories = "".join(
            f'local_repository(name = "{name}", path = "../packages/{name}")\n'
            for name in ("pip", *(f"pip_{name}" for name in names))
        )
        named = ", ".join(f'"@pip//{name}"' for name in HUB)
        files = workspace_files("user")
        workspace = files["WORKSPACE"].replace(
            "\nstagec_repositories()", f"\nstagec_repositories(environment = [{named}])"
        )
        module = files["MODULE.bazel"].replace(
            "use_repo(stagec, ", f"stagec.python(environment = [{named}])\nuse_repo(stagec, "
        )
        rule = 'local_repository = use_repo_rule("@bazel_tools//tools/build_defs/repo:local.bzl", "local_repository")\n'
        for name, text in {
            "WORKSPACE": workspace + repositories,
            "MODULE.bazel": module + rule + repositories,
            "BUILD": "",
            ".bazelrc": "build --nosandbox_debug\n",
            "models/BUILD": BUILD,
            "models/models.toml": MANIFEST,
            "models/scale.py": "def f(x):\n    return x * 2\n",
        }.items():
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            (self.root / name).write_text(text)
        # Bazel's name of the repository that plans, which would install packages.
        self.of_lock = self.with_packages(self.lock)
        self.options = self.of_lock[:1]
        self.events = folder / "events.json"

    def _unpack(self) -> list[str]:
        """Write a repository for each package, and the hub; return the names of packages."""
        names = []
        for info in sorted((self.lock / "site-packages").glob("*.dist-info")):
            name = info.name.partition("-")[0]
            names.append(name)
            root = self.packages / f"pip_{name}"
            for line in (info / "RECORD").read_text().splitlines():
                path = line.rpartition(",")[0].rpartition(",")[0]
                source, target = self.lock / "site-packages" / path, root / "site-packages" / path
                if ".." not in path and "__pycache__" not in path and source.is_file():
                    target.parent.mkdir(parents=True, exist_ok=True)
                    os.link(source, target)
        hub = self.packages / "pip"
        for name in names:
            others = [other for other in names if other not in HUB] if name == "pydantic" else []
            deps = ", ".join(f'"@pip_{other}//:pkg"' for other in others)
            (self.packages / f"pip_{name}" / "BUILD").write_text(PACKAGE.format(deps=deps))
            (hub / name).mkdir(parents=True)
            (hub / name / "BUILD").write_text(ALIAS.format(name=name))
        for root in self.packages.iterdir():
            for file in ("WORKSPACE", "MODULE.bazel"):
                (root / file).touch()
        return names

    def build(self, *options: str) -> list[tuple[str, str]]:
        """Build the bundle; return the actions that collected packages, examined and exported."""
        done = self.run("build", "//models", *telling(self.events), *(options or self.options))
        assert done.returncode == 0, done.stderr
        return actions(self.events, ["StagecPackages", "StagecExamine", "StagecExport"])

    def refusal(self) -> str:
        """What Bazel says of packages that it does not take."""
        done = self.run("build", "//models", *self.options)
        assert done.returncode == 1, done.stderr
        return done.stderr

    def bundle(self) -> str:
        """The digest of the bundle."""
        return hashlib.sha256((self.root / "bazel-bin" / "models" / "models.aot").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    workspace = Workspace(tmp_path_factory.mktemp("hub"))
    try:
        yield workspace
    finally:
        workspace.run("shutdown")


def test_a_hub_gives_the_bytes_that_a_lock_gives(workspace: Workspace) -> None:
    workspace.build(*workspace.of_lock)
    of_lock = workspace.bundle()
    assert workspace.build() == [
        ("StagecExamine", "examined_cpu"),
        ("StagecExport", "models.scale"),
        ("StagecPackages", "collected"),
    ]
    assert workspace.bundle() == of_lock
    assert workspace.build() == []
    (listed,) = workspace.root.glob("bazel-out/*/bin/external/*stagec_python/collected/packages.json")
    release = next((workspace.lock / "site-packages").glob("jaxlib-*.dist-info")).name
    packages = json.loads(listed.read_text())["packages"]
    (jaxlib,) = ({**package, "sha256": ""} for package in packages if package["name"] == "jaxlib")
    assert jaxlib == {"name": "jaxlib", "version": release[7:-10], "filename": f"{release}/RECORD", "sha256": ""}


def test_a_sandbox_finds_the_same(workspace: Workspace) -> None:
    workspace.build()
    before = workspace.bundle()
    (workspace.root / "bazel-bin" / "models" / "models.scale.exported").unlink()
    assert workspace.build(*workspace.options, "--strategy=StagecExport=sandboxed") == [
        ("StagecExport", "models.scale")
    ]
    assert workspace.bundle() == before


@pytest.mark.pinned
def test_each_file_of_a_package_is_in_the_keys(workspace: Workspace) -> None:
    workspace.build()
    before = workspace.bundle()
    module = workspace.packages / "pip_opt_einsum" / "site-packages" / "opt_einsum" / "parser.py"
    text = module.read_bytes()
    module.unlink()  # it is a link
    module.write_bytes(text + b"# edited\n")
    assert ("StagecExport", "models.scale") in workspace.build()
    assert workspace.bundle() == before
    module.write_bytes(text)


def test_packages_that_cannot_be_an_environment_are_refused(workspace: Workspace) -> None:
    jaxlib = workspace.packages / "pip_jaxlib" / "site-packages"
    info = next(jaxlib.glob("jaxlib-*.dist-info"))
    wheel = (info / "WHEEL").read_text()
    other = workspace.packages / "pip_scipy" / "site-packages" / "numpy-0.1.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Name: numpy\nVersion: 0.1\n")
    (info / "WHEEL").unlink()
    (info / "WHEEL").write_text(re.sub(r"Tag: .*", "Tag: cp39-cp39-manylinux_2_27_x86_64", wheel))
    hidden = workspace.packages / "pip_flatbuffers" / "hidden"
    shutil.move(workspace.packages / "pip_flatbuffers" / "site-packages", hidden)
    try:
        said = workspace.refusal()
    finally:
        shutil.rmtree(other)
        (info / "WHEEL").write_text(wheel)
        shutil.move(hidden, workspace.packages / "pip_flatbuffers" / "site-packages")
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert re.search(
        r"stagec: environment: numpy is there twice: \S+ in \S*pip_numpy/site-packages and 0.1 in \S*pip_scipy/", said
    )
    assert (
        "stagec: environment: there is no flatbuffers\n  name the target that has it, such as @pip//flatbuffers\n"
        in said
    )
    assert re.search(
        rf": jaxlib \S+ is for cp39-cp39-manylinux_2_27_x86_64, and actions run Python {here} on \w+\n"
        r"  name the hub's own Python: stagec.python\(python = ...\) or stagec_repositories\(python = ...\)\n",
        said,
    )


def test_a_lock_beside_a_hub_is_refused(workspace: Workspace) -> None:
    files = {name: workspace.root / name for name in ("WORKSPACE", "MODULE.bazel")}
    texts = {name: file.read_text() for name, file in files.items()}
    lock = 'lock = "@stagec//compiler:requirements.lock", environment = '
    for name, file in files.items():
        file.write_text(texts[name].replace("environment = ", lock))
    try:
        said = workspace.run("build", "//models", *workspace.options)
    finally:
        for name, file in files.items():
            file.write_text(texts[name])
    assert said.returncode != 0
    assert (
        "environment and lock are both written: packages are those of a hub or of a lock; leave one out" in said.stderr
    )


def collect(folder: Path, roots: dict[str, dict[str, str]], *options: str) -> list[str]:
    """Collect packages: files by the names of their roots; return what is wrong with them."""
    files = [
        (folder / root / "site-packages" / name, text) for root, names in roots.items() for name, text in names.items()
    ]
    for file, text in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    collector = ROOT / "rules" / "private" / "collected_packages.py"
    command = [sys.executable, "-B", "-E", collector, f"--output={folder}/out", *options]
    paths = [file.relative_to(folder) for file, _ in files]
    done = subprocess.run([*command, *paths], cwd=folder, capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    assert done.returncode == (1 if done.stderr else 0)
    return done.stderr.splitlines()


def package(name: str, **files: str) -> dict[str, str]:
    """The files of an installed package without a RECORD: modules by their names."""
    metadata = {f"{name}-1.dist-info/METADATA": f"Name: {name}\nVersion: 1\n"}
    return {f"{module}.py": text for module, text in files.items()} | metadata


def test_packages_that_do_not_go_together(tmp_path: Path) -> None:
    tiny, edited = package("tiny", tiny="A = 1\n"), package("tiny", tiny="A = 2\n")
    assert collect(tmp_path / "same", {"a": tiny | {"tiny-1.dist-info/INSTALLER": "uv"}, "b": tiny}) == []
    assert collect(tmp_path / "twice", {"a": tiny, "b": edited}) == [
        "stagec: environment: a/site-packages and b/site-packages have tiny.py with other bytes",
        "  name one of them",
    ]
    inside = {"a": package("a", **{"shared/x": "1"}), "b": package("b", **{"shared/x": "2"})}
    assert collect(tmp_path / "two", inside)[0].endswith("have shared/x.py with other bytes")
    # Packages of a lock may have these too.
    beside = {"a": package("a", **{"docs/conf": "1"}), "b": package("b", **{"docs/conf": "2"})}
    assert collect(tmp_path / "docs", beside) == []
    two = package("a") | package("b")
    assert collect(tmp_path / "unlisted", {"root": two}) == [
        "stagec: environment: root/site-packages has several packages, and no a-1.dist-info/RECORD and "
        "b-1.dist-info/RECORD",
        "  name a target for each package",
    ]
    listed = two | {f"{name}-1.dist-info/RECORD": f"{name}-1.dist-info/METADATA,,\n" for name in "ab"}
    assert collect(tmp_path / "listed", {"root": listed}) == []


def test_either_of_two_packages_is_enough(tmp_path: Path) -> None:
    needs = "--needs=jax-cuda13-pjrt|jax-cuda12-pjrt"
    assert collect(tmp_path / "12", {"a": package("jax_cuda12_pjrt")}, needs) == []
    assert collect(tmp_path / "none", {"a": package("tiny")}, needs) == [
        "stagec: environment: there is no jax-cuda13-pjrt or jax-cuda12-pjrt",
        "  name the target that has it, such as @pip//jax_cuda13_pjrt",
    ]
