"""The interpreter that actions run: what depends on it, and what they say where another one is there, or none."""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.building import another_release
from tests.nested import NestedBazel, actions, environment, spawns, telling, workspace_files
from tests.users import User

HERE = ".".join(map(str, sys.version_info[:3]))
MNEMONICS = ("StagecExport", "StagecGolden", "StagecCompile", "StagecBundle")
SANDBOXED = [f"--strategy={mnemonic}=sandboxed" for mnemonic in MNEMONICS]
FILES = {
    ".bazelrc": "build --nosandbox_debug\n",
    "models/models.toml": """[manifest]
name = "models"
version = "1"
[functions.f]
entry = "models.f:f"
args = ["f32[4]"]
targets = ["cpu-avx2"]
golden = { seed = 1 }
""",
    "models/BUILD": """load("@models_manifest//:defs.bzl", "aot_manifest")

aot_manifest(
    name = "models",
    deps = ["f.py"],
)
""",
    "models/f.py": "import jax.numpy as jnp\n\ndef f(x):\n    return jnp.sin(x) @ jnp.exp(x)\n",
}


class Workspace(NestedBazel):
    """A workspace whose actions run the interpreter at a path of an image: what is there, a test says."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, folder / "workspace")
        for name, text in {**workspace_files("user"), **FILES}.items():
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            (self.root / name).write_text(text)
        self.interpreter = folder / "opt" / "python"
        self.interpreter.parent.mkdir()
        self.environment = environment(folder / "environment", User(None, sys.executable))
        self.options = self.with_packages(self.environment)
        self._build = (self.environment / "BUILD").read_text()
        self.events, self.log = folder / "events.json", folder / "execution.json"
        self.outputs = self.root / "bazel-bin" / "models"

    def declare(self, version: str, there: str | None, abi: str = "", packages: Path | None = None) -> None:
        """Declare the interpreter's version and the packages of its image; put a program in its place, or none."""
        more = f"execution_interpreter = {str(self.interpreter)!r},\n    execution_version = {version!r},"
        more += f"\n    execution_packages = {str(packages)!r}," if packages else ""
        text = self._build.replace("    abi = ", f"    {more}\n    abi = ")
        (self.environment / "BUILD").write_text(re.sub("abi = .*", f"abi = {abi!r},", text) if abi else text)
        self.interpreter.unlink(missing_ok=True)
        if there:
            self.interpreter.symlink_to(os.path.realpath(there))

    def build(self, *options: str) -> list[str]:
        """Build the bundle; return the mnemonics of what ran."""
        words = [*telling(self.events), *self.options, *options]
        done = self.run("build", "//models", "//models:models.f.golden", *words)
        assert done.returncode == 0, done.stderr
        return sorted({kind for kind, _ in actions(self.events, MNEMONICS)})

    def spawns(self) -> list[dict[str, Any]]:
        """Build the bundle; return what the log says of what ran."""
        assert self.build(f"--execution_log_json_file={self.log}") == sorted(MNEMONICS)
        return spawns(self.log, MNEMONICS)

    def refusal(self, target: str, *options: str) -> str:
        """What Bazel says of a target that it does not build."""
        done = self.run("build", target, *self.options, *options)
        assert done.returncode == 1, done.stderr
        return done.stderr

    def artifacts(self) -> dict[str, bytes]:
        """What was built, but the seconds of phases."""
        files = filter(Path.is_file, self.outputs.glob("models*"))
        return {file.name: file.read_bytes() for file in files if not file.name.endswith((".profile.json", ".params"))}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    workspace = Workspace(tmp_path_factory.mktemp("interpreter"))
    try:
        yield workspace
    finally:
        workspace.run("shutdown")


def test_actions_run_the_declared_interpreter(workspace: Workspace) -> None:
    workspace.declare(HERE, sys.executable)
    for spawn in workspace.spawns():
        assert str(workspace.interpreter) in spawn["commandArgs"]
        variables = {one["name"]: one["value"] for one in spawn["environmentVariables"]}
        depends = spawn["mnemonic"] in ("StagecExport", "StagecGolden")
        assert variables.get("STAGEC_PYTHON_VERSION") == (HERE if depends else None), spawn["mnemonic"]
        assert variables["STAGEC_PYTHON_ABI"]


@pytest.mark.pinned
def test_only_what_traces_depends_on_the_release(workspace: Workspace) -> None:
    another = another_release()
    if not another:
        pytest.skip("there is no other release of this Python on this machine")
    path, version = another
    workspace.declare(HERE, sys.executable)
    workspace.build()
    before = workspace.artifacts()
    workspace.declare(version, path)
    assert workspace.build() == ["StagecBundle", "StagecExport", "StagecGolden"]
    assert differing(before, workspace.artifacts()) == ["models.f.exported.json"]
    # What was not built again would have been the same.
    assert workspace.run("clean").returncode == 0
    assert workspace.build(*SANDBOXED) == sorted(MNEMONICS)
    assert differing(before, workspace.artifacts()) == ["models.f.exported.json"]


def differing(before: dict[str, bytes], after: dict[str, bytes]) -> list[str]:
    """The names of files that differ, or are in one alone."""
    return sorted(name for name in before | after if before.get(name) != after.get(name))


@pytest.mark.pinned
@pytest.mark.parametrize("strategy", ["worker", "sandboxed"])
def test_an_image_with_another_release_is_refused(workspace: Workspace, strategy: str) -> None:
    workspace.declare("3.11.99", sys.executable)
    said = workspace.refusal("//models:models.f", f"--strategy=StagecExport={strategy}")
    abi = re.search("abi = '(.*)'", (workspace.environment / "BUILD").read_text())
    assert abi
    assert (
        f"stagec: {workspace.interpreter} is Python {HERE} ({abi[1]}), and this action is for Python 3.11.99 "
        f"({abi[1]})\n"
        "  if an image is stale, run the action where that Python is; if the declaration is, change it:\n"
        f"  stagec.python(interpreter_version = '{HERE}')\n"
        "  if Python was updated on this machine, bazel clean --expunge lets stagec install its packages again\n"
    ) in said
    assert not (workspace.outputs / "models.f.exported").exists()


@pytest.mark.pinned
@pytest.mark.parametrize("strategy", ["worker", "sandboxed"])
def test_an_image_with_another_abi_is_refused(workspace: Workspace, strategy: str) -> None:
    workspace.declare(HERE, sys.executable)
    workspace.build()
    workspace.declare(HERE, sys.executable, "cpython-399-x86_64-linux-gnu")
    said = workspace.refusal(
        "//models:models.f.cpu-avx2", f"--strategy=StagecCompile={strategy}", "--strategy=StagecExport=local"
    )
    assert "and this action is for Python" in said
    assert "cpython-399-x86_64-linux-gnu" in said


@pytest.mark.pinned
@pytest.mark.parametrize("strategy", ["worker", "sandboxed"])
def test_an_image_without_the_interpreter_is_refused(workspace: Workspace, strategy: str) -> None:
    workspace.declare(HERE, None)
    if strategy == "worker":
        workspace.run("shutdown")  # one that it has is as good as ever
    said = workspace.refusal("//models:models.f", f"--strategy=StagecExport={strategy}")
    assert (
        f"stagec: the machine that runs this action has no {workspace.interpreter}\n"
        "  run it where there is one, or name the one that is there: stagec.python(interpreter = ...), "
        "docs/remote-packages.md\n"
    ) in said


@pytest.mark.pinned
def test_packages_of_an_image_are_no_inputs(workspace: Workspace) -> None:
    workspace.declare(HERE, sys.executable)
    workspace.build()
    before = workspace.artifacts()
    image = workspace.interpreter.parent / "stagec"
    image.mkdir()
    (image / "site-packages").symlink_to((workspace.environment / "site-packages").resolve())
    (workspace.environment / "fingerprint.txt").write_text("of the lock\n")
    workspace.declare(HERE, sys.executable, packages=image)

    def stale() -> str:
        said = workspace.refusal("//models:models.f", "--strategy=StagecExport=sandboxed")
        told = "  build that layer of the image again, from @stagec_python//:layer, and run the action where it is\n"
        assert told in said
        return said.partition(told)[0].splitlines()[-1]

    assert stale() == (
        f"stagec: {image} does not have the packages of the lock ([Errno 2] No such file or directory: "
        f"'{image}/fingerprint.txt')"
    )
    (image / "fingerprint.txt").write_text("another\n")
    told = "(its fingerprint is another..., not of the lock...)"
    assert stale() == f"stagec: {image} does not have the packages of the lock {told}"
    (image / "fingerprint.txt").write_text("of the lock\n")
    for spawn in workspace.spawns():
        assert [one["path"] for one in spawn["inputs"] if "site-packages" in one["path"]] == []
    assert differing(before, workspace.artifacts()) == []


# The packages of the toolchain, and packages of the user's own.
DECLARATIONS = {
    "//models:models.f": (
        "stagec_repositories({attributes})",
        "stagec.python({attributes})",
    ),
    "@mine//:environment": (
        'stagec_repositories()\n\nload("@stagec//rules:repositories.bzl", "python_environment")\n\n'
        'python_environment(name = "mine", lock = "@stagec//compiler:planning.lock", {attributes})',
        'stagec.environment(name = "mine", lock = "@stagec//compiler:planning.lock", {attributes})\n'
        'use_repo(stagec, "mine")',
    ),
}


@pytest.mark.parametrize("target", DECLARATIONS)
@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        (
            'interpreter = "opt/python", interpreter_version = "3.11.9"',
            'interpreter = "opt/python" is not an absolute path; write the one where actions run, such as '
            "/opt/python/bin/python3.11",
        ),
        (
            'interpreter = "/opt/python"',
            'interpreter = "/opt/python", interpreter_version = "": write both, or none; the version has three '
            "numbers, such as 3.11.9, as the interpreter prints it for --version",
        ),
    ],
)
def test_a_declaration_that_is_not_whole(workspace: Workspace, attributes: str, said: str, target: str) -> None:
    kept = {name: (workspace.root / name).read_text() for name in ("WORKSPACE", "MODULE.bazel")}
    declaration, tag = (text.format(attributes=attributes) for text in DECLARATIONS[target])
    declared = kept["WORKSPACE"].replace("stagec_repositories()", declaration)
    (workspace.root / "WORKSPACE").write_text(declared)
    module = kept["MODULE.bazel"].replace("stagec.manifest(", f"{tag}\nstagec.manifest(")
    (workspace.root / "MODULE.bazel").write_text(module)
    try:
        planning, _ = workspace.options  # and stagec's packages are to be installed
        done = workspace.run("build", "--nobuild", target, planning)
    finally:
        for name, text in kept.items():
            (workspace.root / name).write_text(text)
    assert said in done.stderr


def without_python(folder: Path) -> list[str]:
    """The start of a command that finds all programs of this machine but Python."""
    folder.mkdir()
    for path in map(Path, os.get_exec_path()):
        for program in path.iterdir() if path.is_dir() else ():
            if not program.name.startswith("python") and not os.path.lexists(folder / program.name):
                (folder / program.name).symlink_to(program)
    return ["env", "--unset=STAGEC_PYTHON", f"PATH={folder}"]


def test_a_python_of_a_repository_is_enough(tmp_path: Path) -> None:
    """Planning has its packages installed, and runs."""
    bazel, before = NestedBazel(tmp_path, tmp_path / "user"), without_python(tmp_path / "bin")
    python = 'python = "//:python"'
    declared = {"WORKSPACE": ("stagec_repositories()", f"stagec_repositories({python})")}
    declared["MODULE.bazel"] = ("stagec.manifest(", f"stagec.python({python})\nstagec.manifest(")
    files = {**workspace_files("user"), **FILES, "BUILD": 'exports_files(["python"])\n'}
    for name, text in files.items():
        (bazel.root / name).parent.mkdir(parents=True, exist_ok=True)
        (bazel.root / name).write_text(text)
    (bazel.root / "python").symlink_to(os.path.realpath(sys.executable))
    try:
        done = bazel.run("query", "//models:all", before=before)
        assert "no Python 3.11 or newer with pip was found\n  there is no python3 on PATH\n" in done.stderr
        for name, (old, new) in declared.items():
            (bazel.root / name).write_text(files[name].replace(old, new))
        done = bazel.run("query", "//models:all", before=before)
        assert done.returncode == 0, done.stderr
        assert "//models:models.f.cpu-avx2" in done.stdout.split()
        (bazel.root / "python").unlink()
        (bazel.root / "python").symlink_to("/bin/true")
        done = bazel.run("query", "//models:all", before=before)
        assert re.search(r'python = "@*//:python": .*/python: does not run', done.stderr), done.stderr
    finally:
        bazel.run("shutdown")
