"""Models whose dependencies are targets of Bazel's own Python rules, and an interpreter of a toolchain of theirs.

What rules_python makes of a locked package, a py_library over an unpacked wheel, is written here.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pip
import pytest

from tests.nested import NestedBazel, actions, environment, telling, workspace_files
from tests.users import User

# A package that the environment does not have.
LOCK = "toolz==1.0.0 --hash=sha256:292c8f1c4e7516bf9086f8850935c799a874039c8bcf959d47b600e4c44a6236\n"
MANIFEST = """[manifest]
name = "models"
version = "1"
[functions.library]
entry = "models.library:f"
args = ["f32[4,2]"]
platforms = ["cpu"]
[functions.providers]
entry = "models.providers:f"
args = ["f32[4]"]
platforms = ["cpu"]
"""
FILES = {
    ".bazelrc": "build --nosandbox_debug\nbuild --@stagec//rules:python_rules=//tools:python_rules\n",
    "models/models.toml": MANIFEST,
    "models/BUILD": """load("@models_manifest//:defs.bzl", "aot_manifest")

aot_manifest(
    name = "models",
    deps = glob(["*.py"]) + ["//lib", "//lib:given", "//lib:other"],
)
""",
    "models/library.py": "import scaling\n\ndef f(x):\n    return scaling.scaled(x)\n",
    "models/providers.py": "import given_module, other_module\n\ndef f(x):\n"
    "    return x * given_module.two + other_module.three\n",
    # toolz is a dependency of a dependency, by way of an alias as rules_python declares them.
    "lib/BUILD": """load("//tools:rules.bzl", "given_library", "other_library")

package(default_visibility = ["//visibility:public"])

py_library(
    name = "lib",
    srcs = ["src/scaling.py"],
    imports = ["src"],
    deps = [":deep"],
)

py_library(
    name = "deep",
    srcs = ["deep/source/factors.py"],
    data = ["deep/source/factor.txt"],
    imports = ["deep/source"],
    deps = ["@pip//:toolz"],
)

given_library(
    name = "given",
    srcs = ["given/given_module.py"],
)

other_library(
    name = "other",
    srcs = ["other/other_module.py"],
)
""",
    "lib/src/scaling.py": "import toolz\nimport factors\n\ndef scaled(x):\n"
    "    return toolz.pipe(x, lambda x: x.reshape(-1)) * factors.factor\n",
    "lib/deep/source/factors.py": "import importlib.resources\nimport pathlib\n\n"
    'factor = int(pathlib.Path(__file__).with_name("factor.txt").read_text())\n',
    "lib/deep/source/factor.txt": "5",
    "lib/given/given_module.py": "two = 2\n",
    "lib/other/other_module.py": "three = 3\n",
    # Rules that name no imports in an attribute: one hands all over in the built-in provider, one in its own.
    "tools/rules.bzl": """load("@stagec//rules:providers.bzl", "PythonRulesInfo")

OtherInfo = provider(fields = ["imports"])

def _root(ctx):
    return depset(["/".join([ctx.workspace_name, ctx.label.package, ctx.label.name])])

def _given_impl(ctx):
    return [PyInfo(transitive_sources = depset(ctx.files.srcs), imports = _root(ctx))]

def _other_impl(ctx):
    return [DefaultInfo(files = depset(ctx.files.srcs)), OtherInfo(imports = _root(ctx))]

_ATTRS = {"srcs": attr.label_list(allow_files = True)}

given_library = rule(implementation = _given_impl, attrs = _ATTRS)
other_library = rule(implementation = _other_impl, attrs = _ATTRS)

def _python_rules_impl(ctx):
    return [PythonRulesInfo(providers = [PyInfo, OtherInfo])]

python_rules = rule(implementation = _python_rules_impl)
""",
    "tools/BUILD": """load("@bazel_tools//tools/python:toolchain.bzl", "py_runtime_pair")
load("@stagec//rules:defs.bzl", "python_interpreter", "stagec_toolchain")
load(":rules.bzl", "python_rules")

python_rules(
    name = "python_rules",
    visibility = ["//visibility:public"],
)

py_runtime(
    name = "runtime",
    interpreter_path = "INTERPRETER",
    python_version = "PY3",
)

py_runtime_pair(
    name = "runtimes",
    py3_runtime = ":runtime",
)

toolchain(
    name = "python",
    toolchain = ":runtimes",
    toolchain_type = "@bazel_tools//tools/python:toolchain_type",
)

python_interpreter(name = "interpreter")

stagec_toolchain(
    name = "staging",
    compiler = "@stagec//compiler:actions",
    entry = "@stagec//compiler:stagec/__main__.py",
    environment = "@stagec_python//:environment",
    interpreter = ":interpreter",
)

toolchain(
    name = "stagec",
    toolchain = ":staging",
    toolchain_type = "@stagec//rules:toolchain_type",
)
""",
    "pip/WORKSPACE": "",
    "pip/MODULE.bazel": "",
    "pip/BUILD": """package(default_visibility = ["//visibility:public"])

py_library(
    name = "pkg",
    srcs = glob(["site-packages/**/*.py"]),
    data = glob(["site-packages/**"], exclude = ["**/*.py"]),
    imports = ["site-packages"],
)

alias(
    name = "toolz",
    actual = ":pkg",
)
""",
}
REPOSITORIES = {
    "WORKSPACE": 'local_repository(name = "pip", path = "pip")\n',
    "MODULE.bazel": """use_repo(stagec, "stagec_python")
local_repository = use_repo_rule(
    "@bazel_tools//tools/build_defs/repo:local.bzl",
    "local_repository",
)
local_repository(name = "pip", path = "pip")
""",
}
TOOLCHAINS = "--extra_toolchains=//tools:python,//tools:stagec"


class Workspace(NestedBazel):
    """A workspace with targets of Python rules, and the Bazel that builds it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, folder / "workspace")
        self.interpreter = folder / "python-of-a-toolchain"
        self.interpreter.symlink_to(os.path.realpath(sys.executable))
        for name, text in {
            **{file: text + REPOSITORIES[file] for file, text in workspace_files("user").items()},
            **FILES,
            "tools/BUILD": FILES["tools/BUILD"].replace("INTERPRETER", str(self.interpreter)),
        }.items():
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            (self.root / name).write_text(text)
        (folder / "pip.lock").write_text(LOCK)
        install = [sys.executable, Path(pip.__file__).parent, "install", "--quiet", "--no-deps", "--require-hashes"]
        packages = self.root / "pip" / "site-packages"
        environ = {**os.environ, "PYTHONPATH": ""}
        subprocess.run([*install, "--target", packages, "-r", folder / "pip.lock"], check=True, env=environ)
        self.environment = environment(folder / "environment", User(None, sys.executable))
        self.options = self.with_packages(self.environment)
        self.events = folder / "events.json"

    def build(self, *options: str) -> list[str]:
        """Build the bundle; return the functions that were exported."""
        done = self.run("build", "//models", *telling(self.events), *self.options, *options)
        assert done.returncode == 0, done.stderr
        return [name.removeprefix("models.") for _, name in actions(self.events, ["StagecExport"])]

    def refusal(self, *options: str) -> str:
        """What Bazel says of a function that it does not export."""
        done = self.run("build", "//models:models.library", *self.options, *options)
        assert done.returncode == 1, done.stderr
        return done.stderr


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    workspace = Workspace(tmp_path_factory.mktemp("python_rules"))
    try:
        yield workspace
    finally:
        workspace.run("shutdown")


def test_a_py_library_is_imported_as_its_own_rules_would(workspace: Workspace) -> None:
    assert workspace.build() == ["library", "providers"]
    (workspace.root / "lib" / "deep" / "source" / "factor.txt").write_text("7")
    assert workspace.build() == ["library"]
    (workspace.root / "lib" / "other" / "other_module.py").write_text("three = 33\n")
    assert workspace.build() == ["providers"]


def test_a_sandbox_finds_the_same(workspace: Workspace) -> None:
    workspace.build()
    exported = workspace.root / "bazel-bin" / "models" / "models.library.exported"
    before = exported.read_bytes()
    exported.unlink()
    assert workspace.build("--strategy=StagecExport=sandboxed") == ["library"]
    assert exported.read_bytes() == before


def test_packages_are_found_where_artifacts_are_reproduced(workspace: Workspace) -> None:
    target = "//models:models.reproducibility_test"
    done = workspace.run("build", target, *workspace.options)
    assert done.returncode == 0, done.stderr
    program = workspace.root / "bazel-bin" / "models" / "models.reproducibility_test"
    subprocess.run([program], check=True, env={"PATH": os.environ["PATH"]})


def test_another_version_of_a_package_is_told(workspace: Workspace) -> None:
    installed = next((workspace.environment / "site-packages").glob("opt_einsum-*.dist-info"))
    version = re.sub(r".*-(.*)\.dist-info", r"\1", installed.name)
    folder = workspace.root / "pip" / "site-packages" / "opt_einsum-0.1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Name: opt_einsum\nVersion: 0.1\n")
    try:
        said = workspace.refusal()
    finally:
        (folder / "METADATA").unlink()
        folder.rmdir()
    assert re.search(
        r"models/models.toml: functions.library: external/\S*pip/site-packages in deps has opt_einsum 0.1, "
        rf"stagec's environment has {version}, and Python takes that\n"
        rf"  write opt_einsum=={version} in the lock of external/\S*pip/site-packages,\n"
        r"  or opt_einsum==0.1 in stagec's: stagec.python\(lock = ...\)\n",
        said,
    )


def test_actions_run_the_interpreter_of_a_toolchain(workspace: Workspace) -> None:
    workspace.build()
    exported = workspace.root / "bazel-bin" / "models" / "models.library.exported"
    before = exported.read_bytes()
    query = ("aquery", 'mnemonic("StagecExport", //models:models.library)', *workspace.options)
    assert str(workspace.interpreter) not in workspace.run(*query).stdout
    assert str(workspace.interpreter) in workspace.run(*query, TOOLCHAINS).stdout
    assert workspace.build(TOOLCHAINS) == ["library", "providers"]
    assert exported.read_bytes() == before


def test_an_interpreter_of_another_version_is_told(workspace: Workspace) -> None:
    file, here = workspace.environment / "BUILD", ".".join(map(str, sys.version_info[:3]))
    text = file.read_text()
    file.write_text(text.replace(f"version = {here!r}", "version = '3.11.99'"))
    try:
        said = workspace.refusal(TOOLCHAINS, "--strategy=StagecExport=sandboxed")
    finally:
        file.write_text(text)
    assert f"stagec: {workspace.interpreter} is Python {here} (" in said
    assert "and this action is for Python 3.11.99 (" in said
