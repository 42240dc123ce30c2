"""Builds without Bazel: what they write, what an edit runs again, and what becomes of one that is interrupted.

tests/test_e2e.py compares bytes and command lines with those of Bazel.

Modules: `cli/build.py`, `cli/store.py`, `local/actions.py`, `local/building.py`, `local/environment.py`,
`local/pool.py`, `local/running.py`, `local/store.py`, `worker/client.py`.
"""

import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

import stagec
from stagec.bundle.archive import Archive
from stagec.core.messages.errors import StagecError
from stagec.local import actions, building, environment
from stagec.local.building import Local, Wanted
from stagec.local.environment import Workspace as Workspaces
from stagec.local.pool import Pool
from stagec.local.store import Store
from stagec.trust.attestation import Statement
from tests.building import COMPILER, PYTHON, action_environment, build as build_by_hand, build_jax_cache
from tests.local.builder import Builder
from tests.page_blocks import commands, files
from tests.users import WAYS, as_user, isolation, needs_isolation, where

PAGE = files("docs/without-bazel.md")
MANIFEST = """
[manifest]
name = "m"
version = "1"

[targets.cpu]
platform = "cpu"
isa = "AVX2"

[functions.double]
entry = "models.f:double"
args = ["f32[n]"]
buckets = { n = [1, 2] }
targets = ["cpu"]

[functions.shift]
entry = "models.g:shift"
args = ["f32[3]"]
targets = ["cpu"]
golden = { seed = 1 }
"""
PROGRAM = """
[functions.g]
entry = "g.mlir"
targets = ["cpu"]
"""
COMMAND = [*PYTHON, str(COMPILER / "stagec" / "__main__.py")]
SOURCES = {
    "models/m.toml": MANIFEST,
    "models/f.py": """import jax.numpy as jnp
from models import shared

def double(x):
    return jnp.sin(x) * shared.TWO
""",
    "models/g.py": "def shift(x):\n    return x + 1\n",
    "models/shared.py": "TWO = 2\n",
    "models/other.py": "TEN = 10\n",
    "pyproject.toml": "",
}


@functools.cache
def _builder() -> Builder:
    return Builder(PYTHON, action_environment())


class Workspace:
    """A workspace with a manifest, and a store of its own."""

    def __init__(self, folder: Path, sources: Mapping[str, str] = SOURCES) -> None:
        self.root, self.cache = folder / "workspace", folder / "cache"
        for name, text in sources.items():
            self.write(name, text)
        self.environment = {**action_environment(), "XDG_CACHE_HOME": str(self.cache)}
        self.words = [*COMMAND, "build", "models/m.toml"]

    def write(self, name: str, text: str) -> None:
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_text(text)

    def replace(self, name: str, old: str, new: str) -> None:
        text = (self.root / name).read_text()
        assert text.count(old) == 1
        self.write(name, text.replace(old, new))

    def run(self, *words: str, before: list[str] | None = None) -> subprocess.CompletedProcess[str]:
        """Build. before: a command that runs it, in a process of its own; None: with the workers of other tests."""
        arguments = [*self.words[len(COMMAND) :], *words]
        if before is None and self.environment == {**action_environment(), "XDG_CACHE_HOME": str(self.cache)}:
            return _builder().run(arguments, self.root, self.cache)
        command = [*(before or []), *COMMAND, *arguments]
        return subprocess.run(command, cwd=self.root, env=self.environment, capture_output=True, text=True)

    def build(self, *words: str, before: list[str] | None = None) -> set[str]:
        """Build; return the actions that ran. before: as of `run`."""
        done = self.run("--json", *words, before=before)
        assert done.returncode == 0, done.stderr
        return set(json.loads(done.stdout)["ran"])

    def shell(self, line: str) -> subprocess.CompletedProcess[str]:
        """Run a line of a shell that has a command stagec."""
        programs = self.cache.parent / "bin"
        programs.mkdir(exist_ok=True)
        (programs / "stagec").write_text(f'#!/bin/sh\nexec {shlex.join(COMMAND)} "$@"\n')
        (programs / "stagec").chmod(0o755)
        variables = {**self.environment, "PATH": f"{programs}:{os.environ['PATH']}"}
        return subprocess.run(["sh", "-c", line], cwd=self.root, env=variables, capture_output=True, text=True)

    def refusal(self, *words: str, status: int = 2) -> str:
        """What the build says that fails."""
        done = self.run(*words)
        assert done.returncode == status, done.stderr
        assert not done.stdout
        return done.stderr

    def sha256(self) -> str:
        return hashlib.sha256((self.root / "m.aot").read_bytes()).hexdigest()


@pytest.fixture(scope="module", autouse=True)
def isolated() -> None:
    needs_isolation()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    workspace = Workspace(tmp_path_factory.mktemp("build"))
    compiled = {f"action compile m.{name}" for name in ("double.cpu.n1", "double.cpu.n2", "shift.cpu")}
    exported = {f"action export m.{name}" for name in ("double", "shift")}
    others = {"action imports m.imports", "action golden m.shift.golden", "action bundle m"}
    assert workspace.build(before=[]) == compiled | exported | others
    return workspace


@pytest.fixture
def built(finished: Workspace, tmp_path: Path) -> Workspace:
    """A copy of a finished build: of the workspace, and of the store."""
    workspace = Workspace(tmp_path, {})
    shutil.copytree(finished.root, workspace.root)
    shutil.copytree(finished.cache, workspace.cache)
    return workspace


def test_the_bundle_is_the_one_of_its_commands(built: Workspace, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    by_hand = build_by_hand("models/m.toml", out, built.root)
    assert (built.root / "m.aot").read_bytes() == by_hand.read_bytes()
    x = np.ones(2, np.float32)
    assert np.allclose(stagec.load(built.root / "m.aot")["double"](x), np.sin(x) * 2)


def test_an_edit_runs_what_it_changes(built: Workspace) -> None:
    exported, shift = "action export m.double", "action export m.shift"
    compiled = {"action compile m.double.cpu.n1", "action compile m.double.cpu.n2"}
    assert built.build() == set()
    built.write("models/f.py", "# A comment.\n" + SOURCES["models/f.py"])
    assert built.build() == {"action imports m.imports", exported}
    built.write("models/other.py", "TEN = 11\n")
    built.write("models/new.py", "")
    assert built.build() == {"action imports m.imports"}
    before = built.sha256()
    built.write("models/shared.py", "TWO = 3\n")
    assert built.build() == {"action imports m.imports", exported, *compiled, "action bundle m"}
    assert built.sha256() != before
    built.write("models/shared.py", "TWO = 2\n")  # all of that is kept
    assert built.build() == set()
    assert built.sha256() == before
    built.replace("models/m.toml", 'version = "1"', 'version = "2"')
    assert built.build() == {"action bundle m"}
    built.write("models/shared/__init__.py", "TWO = 5\n")  # a package comes before the module
    assert built.build() == {"action imports m.imports", exported, *compiled, "action bundle m"}
    (built.root / "models" / "shared" / "__init__.py").unlink()
    (built.root / "models" / "shared").rmdir()
    built.replace("models/m.toml", 'args = ["f32[3]"]', 'args = ["f32[4]"]')  # and the imports are as before
    assert shift in built.build()


def test_another_place_and_time_change_nothing(built: Workspace, tmp_path: Path) -> None:
    moved = Workspace(tmp_path / "elsewhere", {})
    shutil.copytree(built.root, moved.root)
    shutil.copytree(built.cache, moved.cache)
    os.utime(moved.root / "models" / "f.py", (1, 1))
    assert moved.build() == set()


def test_a_part_of_a_manifest(built: Workspace) -> None:
    assert built.build("--function", "shift", "--output", "part/shift.aot") == {
        "action imports m.imports",
        "action bundle m",
    }
    assert list(stagec.load(built.root / "part" / "shift.aot")) == ["shift"]
    said = built.refusal("--function", "shifts", "--target", "cpu2")
    assert said == (
        'models/m.toml: functions: there is no function "shifts"\n  did you mean "shift"?\n'
        'models/m.toml: targets: there is no target "cpu2"\n  did you mean "cpu"?\n'
    )


def test_artifacts_are_written_too(built: Workspace) -> None:
    assert built.build("--artifacts", "all", "--output", "all/m.aot") == set()
    names = {path.name for path in (built.root / "all").iterdir() if path.is_file()}
    assert {"m.aot", "m.double.exported", "m.double.cpu.n1.xla", "m.shift.golden.safetensors"} <= names
    exported = stagec.Exported.deserialize((built.root / "all" / "m.double.exported").read_bytes())
    assert exported.fun_name == "double"


def test_jaxs_cache_is_the_one_of_its_commands(built: Workspace, tmp_path: Path) -> None:
    said = built.refusal("--jax-cache", "cache")
    assert said == (
        "models/m.toml: jax_cache: it has nothing for JAX's compilation cache\n"
        "  write jax_cache = true in it (docs/with-jax.md)\n"
    )
    built.replace("models/m.toml", 'version = "1"', 'version = "1"\njax_cache = true')
    names = ("double.cpu.n1", "double.cpu.n2", "shift.cpu")
    parts = {f"action {command} m.{name}" for command in ("jax-key", "jax-compile") for name in names}
    assert built.build("--jax-cache", "cache") == {*parts, "action jax-cache m.jax_cache"}
    by_hand = build_jax_cache("models/m.toml", tmp_path / "by-hand", built.root)
    written = {path.name: path.read_bytes() for path in (built.root / "cache").iterdir()}
    assert written == {path.name: path.read_bytes() for path in by_hand.iterdir()}
    assert len(written) > len(names)
    assert built.build("--jax-cache", "cache") == set()
    built.write("models/f.py", "# A comment.\n" + SOURCES["models/f.py"])  # the keys are as before
    assert built.build("--jax-cache", "cache") >= {"action jax-key m.double.cpu.n1"}
    assert built.build("--function", "shift", "--jax-cache", "part") >= {"action jax-cache m.jax_cache"}
    (built.root / "cache" / "jit_other-cache").write_text("JAX's own")
    built.build("--function", "shift", "--jax-cache", "cache")  # what only the build before had goes
    assert {path.name for path in (built.root / "cache").iterdir()} == {
        *(path.name for path in (built.root / "part").iterdir()),
        "jit_other-cache",
    }
    built.replace("models/m.toml", "[functions.double]", "[functions.double]\njax_cache = false")
    said = built.refusal("--function", "double", "--jax-cache", "none")
    assert said == (
        "models/m.toml: functions.double.jax_cache: it has nothing for JAX's compilation cache\n"
        "  write jax_cache = true in it (docs/with-jax.md)\n"
    )


def test_what_a_bundle_was_built_from(built: Workspace, tmp_path: Path) -> None:
    words = ["--statement", "m.intoto.json", "--sbom", "m.sbom.json"]
    done = built.run(*words)
    assert done.returncode == 0, done.stderr
    statement = json.loads((built.root / "m.intoto.json").read_text())
    archive = Archive(built.root / "m.aot")
    Statement.read(json.dumps(statement).encode(), "m").check(archive, "m", archive.sha256())  # type: ignore[arg-type]
    assert statement["predicate"]["runDetails"]["builder"]["id"] == "urn:stagec:builder:stagec-build"
    build = statement["predicate"]["buildDefinition"]
    assert set(build["internalParameters"]["slices"]) == {
        *("m.double", "m.shift", "m.double.cpu.n1", "m.double.cpu.n2", "m.shift.cpu")
    }
    assert build["internalParameters"]["python"] == [platform.python_version()]
    resolved = {each["name"]: each["digest"] for each in build["resolvedDependencies"]}
    for name in ("models/m.toml", "models/f.py", "models/g.py", "models/shared.py", "models/other.py"):
        assert resolved.pop(name) == {"sha256": hashlib.sha256((built.root / name).read_bytes()).hexdigest()}
    # Nothing says which wheels these packages came in.
    jax = importlib.metadata.distribution("jax")
    record = Path(str(jax.locate_file(f"jax-{jax.version}.dist-info/RECORD")))
    digest = {"sha256": hashlib.sha256(record.read_bytes()).hexdigest()}
    assert resolved[f"jax-{jax.version}.dist-info/RECORD"] == digest
    assert [name for name in resolved if not re.fullmatch(r"[^/]+-info/(RECORD|METADATA|PKG-INFO)", name)] == []
    assert not any(name.startswith("stagec") for name in resolved)
    said = f"m.intoto.json: {len(resolved)} packages are named by what is installed of them, because no --packages has"
    assert said in done.stderr
    (component,) = (
        each for each in json.loads((built.root / "m.sbom.json").read_text())["components"] if each["name"] == "jax"
    )
    assert "hashes" not in component
    assert component["properties"] == [{"name": "stagec:installed", "value": f"jax-{jax.version}.dist-info/RECORD"}]
    # A list has some of the wheels; and elsewhere, with all of it kept, the same bytes are written.
    wheel = {"name": "jax", "version": jax.version, "filename": "jax-py3-none-any.whl", "sha256": "0" * 64}
    (tmp_path / "some.json").write_text(json.dumps({"python": platform.python_version(), "packages": [wheel]}))
    given = [*words, "--packages", str(tmp_path / "some.json")]
    assert built.build(*given) == set()
    text = (built.root / "m.intoto.json").read_text()
    listed = {each["name"] for each in json.loads(text)["predicate"]["buildDefinition"]["resolvedDependencies"]}
    assert {*resolved} - listed == {f"jax-{jax.version}.dist-info/RECORD"}
    assert wheel["filename"] in listed
    moved = Workspace(tmp_path / "elsewhere", {})
    shutil.copytree(built.root, moved.root)
    moved.environment = built.environment
    (moved.root / "m.intoto.json").unlink()
    assert moved.build(*given) == set()
    assert (moved.root / "m.intoto.json").read_text() == text


def test_what_no_list_of_a_package_has_is_in_the_statement(tmp_path: Path) -> None:
    """A folder of somebody's own on PYTHONPATH; and in the SBOM."""
    made = Workspace(
        tmp_path, {**SOURCES, "models/f.py": "import helper\n\ndef double(x):\n    return helper.double(x)\n"}
    )
    folder, statement, bill = tmp_path / "vendored", made.root / "m.intoto.json", made.root / "m.sbom.json"
    made.environment["PYTHONPATH"] = f"{made.environment['PYTHONPATH']}:{folder}"
    digests = set()
    for factor in (2, 3):
        (folder / "own").mkdir(parents=True, exist_ok=True)
        (folder / "own" / "__init__.py").write_text("")
        (folder / "helper.py").write_text(f"def double(x):\n    return x * {factor}\n")
        assert "action export m.double" in made.build("--statement", "m.intoto.json", "--sbom", "m.sbom.json")
        resolved = json.loads(statement.read_text())["predicate"]["buildDefinition"]["resolvedDependencies"]
        named = {one["name"]: one for one in resolved if one.get("uri", "").startswith("pkg:generic/")}
        assert {name: one["uri"] for name, one in named.items()} == {
            "helper.py": "pkg:generic/helper.py",
            "own": "pkg:generic/own",
        }
        digests.add(named["helper.py"]["digest"]["sha256"])
        components = {one["name"]: one for one in json.loads(bill.read_text())["components"]}
        assert components["own"]["properties"] == [{"name": "stagec:installed", "value": "own"}]
        assert "version" not in components["own"]
    assert len(digests) == 2


def test_lists_of_packages_that_are_not_those_of_the_build(built: Workspace) -> None:
    wheel = {"name": "jax", "version": "0.0.1", "filename": "jax.whl", "sha256": "0" * 64}
    for name, python in (("other.json", "3.9.1"), ("old.json", platform.python_version())):
        built.write(name, json.dumps({"python": python, "packages": [wheel]}))
    built.write("none.json", "{}")
    before = built.sha256()
    built.write("models/shared.py", "TWO = 3\n")
    said = built.refusal("--statement", "s", "--packages", "other.json", "--packages", "old.json")
    write = "  write one, and give it: python3 -m pip install --dry-run --ignore-installed --report packages.json -r "
    here = platform.python_version()
    assert f"other.json: it is of Python 3.9.1, and this is {here}\n{write}" in said
    assert f"old.json: it lists what is not installed here: jax 0.0.1\n{write}" in said
    said = built.refusal("--sbom", "s", "--packages", "none.json")
    assert said == "none.json: not a list of packages: the key 'packages' is missing\n"
    assert built.refusal("--packages", "old.json") == "--packages is for --statement or --sbom: leave it out\n"
    assert built.sha256() == before  # it was refused before anything was built
    assert not (built.root / "s").exists()


def test_what_would_run(built: Workspace) -> None:
    assert built.run("--dry-run").stdout == "nothing to do\n"
    built.write("models/shared.py", "TWO = 4\n")
    lines = built.run("--dry-run").stdout.splitlines()
    assert [line.split() for line in lines[:2]] == [["run", "imports", "m.imports"], ["maybe", "export", "m.double"]]
    assert built.run("--dry-run").stdout.splitlines() == lines


def test_an_edit_is_explained(built: Workspace) -> None:
    assert built.build() == set()  # here, where it was copied to
    built.write("models/shared.py", "TWO = 3\n")
    built.write("models/new.py", "")
    built.replace("models/m.toml", 'args = ["f32[3]"]', 'args = ["f32[4]"]')
    lines = built.run("--dry-run", "--explain").stdout.splitlines()
    assert lines[0].split(maxsplit=3) == [
        "run",
        "imports",
        "m.imports",
        "files were added or removed, models/shared.py, models/new.py",
    ]
    lines = built.run("--explain").stdout.splitlines()
    assert "export m.double: models/shared.py" in lines
    assert "export m.shift: m.shift in the manifest" in lines
    assert "compile m.double.cpu.n1: models/m.double.exported" in lines
    assert len(built.run("--explain").stdout.splitlines()) == 1  # nothing ran
    built.write("models/shared.py", "TWO = 2\n")  # the store has it, and it is the last build then
    assert "action export m.double" not in built.build()
    built.write("models/f.py", "# A comment.\n" + SOURCES["models/f.py"])
    assert "export m.double: models/f.py" in built.run("--explain").stdout.splitlines()
    moved = Workspace(built.root.parent / "elsewhere")
    moved.environment = built.environment
    moved.write("models/shared.py", "TWO = 4\n")
    assert "export m.double: it was not built here before" in moved.run("--explain").stdout.splitlines()


def test_a_watched_workspace_is_built_after_each_edit(built: Workspace) -> None:
    words = [*built.words, "--watch"]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, cwd=built.root, env=built.environment, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout
        assert process.stderr
        try:
            assert "0 actions ran" in process.stdout.readline()
            before = built.sha256()
            built.write("models/shared.py", "TWO = 3\n")
            assert "5 actions ran" in process.stdout.readline()
            assert built.sha256() != before
            manifest = (built.root / "models" / "m.toml").read_text()
            built.write("models/m.toml", manifest + "[functions.double]\n")
            assert process.stderr.readline().startswith("models/m.toml")
            built.write("models/m.toml", manifest)
            built.write("models/shared.py", "TWO = 2\n")
            assert "actions ran" in process.stdout.readline()
            while built.sha256() != before:  # it may have seen one edit before the other
                assert "actions ran" in process.stdout.readline()
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    assert not list((built.cache / "stagec" / "builds").iterdir())
    assert built.refusal("--watch", "--dry-run").startswith("--watch builds, and --dry-run does not")


def test_a_watched_file_that_is_not_python(built: Workspace) -> None:
    """StableHLO that is mended is built, and the bundle that is written into a folder of data is not an edit."""
    program = "func.func public @main(%x: tensor<4xf32>) -> tensor<4xf32> { return %x : tensor<4xf32> }\n"
    built.write("models/m.toml", MANIFEST.partition("[functions")[0] + PROGRAM)
    built.write("models/g.mlir", "broken")
    words, pipe = [*built.words, "--watch", "--data", "models", "--output", "models/m.aot"], subprocess.PIPE
    with subprocess.Popen(words, cwd=built.root, env=built.environment, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout
        assert process.stderr
        try:
            assert "g.mlir" in process.stderr.readline()
            built.write("models/g.mlir", program)
            assert "actions ran" in process.stdout.readline()
            assert not select.select([process.stdout], [], [], 2)[0]
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130


def test_what_is_watched(tmp_path: Path) -> None:
    """A hidden manifest, and files that are not there yet."""
    (tmp_path / "pyproject.toml").write_text("")
    (manifest := tmp_path / ".m.toml").write_text("x")
    wanted, seen = building.Wanted(str(manifest), data=["none"]), []
    files: dict[str, tuple[int, ...]] = {str(tmp_path / "w.safetensors"): ()}
    for path in (manifest, tmp_path / "w.safetensors", tmp_path / "none"):
        seen.append(building.states(wanted, files))
        path.write_text("now it is there, and another")
    seen.append(building.states(wanted, files))
    (tmp_path / "tables").mkdir()  # that the plan names
    (tmp_path / "tables" / "a.npz").write_text("")
    files[str(tmp_path / "tables")] = ()
    seen.append(building.states(wanted, files))
    (tmp_path / "tables" / "b.npz").write_text("")
    seen.append(building.states(wanted, files | seen[-1]))
    assert all(seen[i] != seen[i + 1] for i in range(5))
    manifest.unlink()
    assert building.states(wanted)[str(manifest)] == ()


def test_a_name_that_is_not_utf8(built: Workspace) -> None:
    Path(os.fsdecode(os.fsencode(built.root / "models") + b"/\xff.py")).write_text("")
    assert built.refusal() == "models/\\udcff.py: its name is not UTF-8\n  rename it\n"


def test_a_worker_that_ended_is_not_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "workspace").mkdir()
    monkeypatch.setattr(environment, "command", lambda: ["/bin/sh", "-c", "exit 3"])
    with Pool(Store(tmp_path / "store")) as pool:
        pool.begin(Workspaces(tmp_path / "workspace", "w", [], [], {}), [], {})
        action = actions.Action("x", "action export", [], [], ["stagec-out/x"])
        assert pool.run(action, [], pool.worker(action)).exit_code == 1
        assert not pool.is_idle(action)
        assert pool.prepare([action])  # another one may start


def test_a_mistake_is_said_once(built: Workspace) -> None:
    built.replace("models/m.toml", "models.f:double", "models.f:treble")
    built.write("models/g.py", "def shift(x):\n    return x +\n")
    said = built.refusal("--keep-going", "--output", "other.aot")
    assert said.count("models/m.toml: functions.double.entry") == 1
    assert "models/g.py" in said
    assert "Traceback" not in said
    assert not (built.root / "other.aot").exists()
    said = built.refusal("--jobs", "1")
    assert ("functions.double" in said) != ("functions.shift" in said)  # it ends after the first
    built.replace("models/m.toml", "[functions.double]", "[functions.double")
    assert built.refusal().startswith("models/m.toml")


def test_an_action_sees_what_is_declared(built: Workspace) -> None:
    built.write("models/scale.txt", "3")
    built.write(
        "models/g.py", "SCALE = float(open('models/scale.txt').read())\n\ndef shift(x):\n    return x + SCALE\n"
    )
    assert "models/scale.txt is not an input of this action" in built.refusal("--keep-going")
    assert "action export m.shift" in built.build("--data", "models/scale.txt")
    before = built.sha256()
    built.write("models/scale.txt", "4")
    assert "action export m.shift" in built.build("--data", "models")
    assert built.sha256() != before
    said = built.refusal("--data", "nothing")
    assert said == f"--data nothing: there is no such file or folder below {built.root}\n"


def test_two_builds_have_one_store(finished: Workspace, tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    words = [*workspace.words, "--jobs", "1"]
    outputs = ["one.aot", "two.aot"]
    processes = [
        subprocess.Popen([*words, "--output", name], cwd=workspace.root, env=workspace.environment) for name in outputs
    ]
    assert [process.wait() for process in processes] == [0, 0]
    for name in outputs:
        assert (workspace.root / name).read_bytes() == (finished.root / "m.aot").read_bytes()
    assert not list((workspace.cache / "stagec" / "builds").iterdir())


def test_a_build_that_is_killed_leaves_nothing_half_written(finished: Workspace, tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    builds = workspace.cache / "stagec" / "builds"
    for wanted in ("*.spec.json", "*.exported", "*.xla"):
        process = subprocess.Popen(workspace.words, cwd=workspace.root, env=workspace.environment)
        while not list(builds.glob(f"*/stagec-out/models/{wanted}")) and process.poll() is None:
            time.sleep(0.01)
        process.kill()
        process.wait()
    assert not (workspace.root / "m.aot").exists()
    workspace.build(before=[])
    assert workspace.sha256() == finished.sha256()
    assert not list(builds.iterdir())
    blobs = [path for path in (workspace.cache / "stagec" / "blobs").glob("*/*") if not path.name.startswith(".")]
    assert all(hashlib.sha256(path.read_bytes()).hexdigest() == path.parent.name + path.name for path in blobs)


def test_ctrl_c_ends_it(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    workspace.write("models/g.py", "import time\ntime.sleep(1000)\n")
    with subprocess.Popen(workspace.words, cwd=workspace.root, env=workspace.environment) as process:
        while not list((workspace.cache / "stagec" / "actions").glob("*")) or process.poll() is not None:
            time.sleep(0.01)
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    assert not list((workspace.cache / "stagec" / "builds").iterdir())


@pytest.mark.parametrize("size", ["16k", "64k", "120k", "180k"])
def test_a_full_disk(size: str, tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    workspace.cache.mkdir()
    command: list[str | Path] = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", workspace.cache]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("mounting a file system takes root")
    try:
        done = workspace.run("--jobs", "1", before=[])
    finally:
        subprocess.run(["umount", "-l", workspace.cache], check=True)
    assert done.returncode in (1, 2)
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (workspace.root / "m.aot").exists()


def test_a_damaged_store_is_noticed(built: Workspace) -> None:
    blob = built.cache / "stagec" / "blobs" / built.sha256()[:2] / built.sha256()[2:]
    blob.chmod(0o644)
    data = bytearray(blob.read_bytes())
    data[100] ^= 1
    blob.write_bytes(data)
    assert "it is damaged, and now removed\n  build again" in built.refusal("--output", "again.aot")
    assert built.build("--output", "again.aot") == {"action bundle m"}
    blob.chmod(0o644)
    blob.write_bytes(data[:-1])  # the machine lost its power
    assert built.build("--output", "again.aot") == {"action bundle m"}


def test_a_damaged_input_is_noticed(tmp_path: Path) -> None:
    """Before an action reads it: what that makes would be kept as made of something else."""
    with (store := Store(tmp_path / "store")).execution_root() as root:
        (root / "made").write_bytes(b"made")
        digest, _ = store.keep("0" * 64, root, ["made"], {}).outputs["made"]
    blob = tmp_path / "store" / "blobs" / digest[:2] / digest[2:]
    for look in (lambda store: store.place(digest, tmp_path / "input"), lambda store: store.read(digest)):
        blob.unlink()
        blob.write_bytes(b"fade")
        with pytest.raises(StagecError, match="it is damaged, and now removed\n  build again"):
            look(Store(tmp_path / "store"))
        assert not blob.exists()
        assert not (tmp_path / "input").exists()
        blob.write_bytes(b"made")
        look(Store(tmp_path / "store"))
        (tmp_path / "input").unlink(missing_ok=True)


def test_a_record_of_another_stagec_is_a_miss(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    for text in ("[[{}, {}]]", "[[{}, {}, 1.0, {}]]", '[[{}, {"x": 1}, {}]]', "[[{}, [], {}]]", "5", "["):
        (store.folder / "actions" / "key.json").write_text(text)
        assert store.find("key") == []
        assert store.trim(0) == 0


def test_a_file_that_was_new_when_it_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have changed in the same instant, however long the build took."""
    (path := tmp_path / "new").write_text("new")
    (old := tmp_path / "old").write_text("old")
    os.utime(old, (1, 1))
    digests, now = Store(tmp_path / "store").digests("x"), time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now)
    digests.of(str(path))
    now += 10**10
    digests.of(str(old))
    digests.save()
    assert json.loads((tmp_path / "store" / "digests" / "x.json").read_bytes()).keys() == {str(old)}


def test_the_store_is_trimmed(built: Workspace) -> None:
    """What was asked for last stays, and a build makes the rest again."""

    def store(*words: str) -> dict[str, int]:
        done = built.shell(f"stagec store --json {shlex.join(words)}")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    before, sha256 = store(), built.sha256()
    assert store("--most", "1TB") == before
    time.sleep(0.01)
    assert built.build("--function", "shift", "--output", "shift.aot")
    trimmed = store("--most", f"{before['bytes'] // 2}")
    assert trimmed["bytes"] <= before["bytes"] // 2
    assert trimmed["removed"] > 0
    assert built.build("--function", "shift", "--output", "shift.aot") == set()
    assert "action compile m.double.cpu.n1" in built.build()
    assert built.sha256() == sha256
    with Store(built.cache / "stagec").execution_root():
        assert built.shell("stagec store --most 1B").stderr.startswith("a build runs")
    assert store("--most", "0B")["files"] == 0
    assert built.shell("stagec store --most much").stderr == '--most much: not a size\n  write for example "5GB"\n'


@pytest.mark.parametrize("way", WAYS)
def test_actions_are_isolated_as_those_of_bazel(way: str, built: Workspace) -> None:
    if isolation()[0] == "":
        pytest.skip("nothing isolates actions here")
    secret = built.root.parent / "secret"
    secret.write_text("a secret")
    built.write("models/g.py", f"def shift(x):\n    return x + len(open({str(secret)!r}).read())\n")
    done = built.run("--keep-going", before=where(way))
    assert (done.returncode == 0) == (way == "filter"), done.stderr  # docs/security.md says what a filter lets


def test_what_follows_the_cpu_is_built_again_on_another(built: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    built.replace("models/m.toml", "[manifest]\n", '[manifest]\nexamined = "none"\n')
    wanted = Wanted(str(built.root / "models/m.toml"))
    with Pool(Store(built.cache / "stagec")) as pool:
        assert not Local(wanted, pool).run().failed
        assert not [*Local(wanted, pool, runs=False).runner.undone()]
        monkeypatch.setattr(environment, "cpu", lambda: "another")
        runner = Local(wanted, pool, runs=False).runner
        undone = [action for action, _ in runner.undone()]
        assert {action.command.split()[1] for action in undone} == {"export", "compile", "golden", "bundle"}
        assert runner.why(undone[0]) == ["the CPU of this machine"]


def test_what_follows_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kind and its flags, and no number that is another one each time."""
    shown = tmp_path / "cpuinfo"
    monkeypatch.setattr(environment, "Path", lambda _: shown)

    def seen(flags: str, clock: str) -> str:
        shown.write_text(f"processor\t: 0\nmodel\t\t: 143\ncpu MHz\t\t: {clock}\nflags\t\t: {flags}\n")
        return environment.cpu.__wrapped__()

    assert seen("avx2", "2000") == seen("avx2", "2100") != seen("avx2 gfni", "2000")


def test_in_a_notebook(built: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(built.cache))
    monkeypatch.chdir(built.root / "models")
    bundle = stagec.build("m.toml", "m.aot", functions=["shift"])
    assert np.array_equal(bundle["shift"](np.zeros(3, np.float32)), np.ones(3, np.float32))
    built.write("models/g.py", "def shift(y):\n    return z\n")
    with pytest.raises(stagec.StagecError, match=r"functions\.shift"):
        stagec.build("m.toml")
    with pytest.raises(stagec.StagecError, match=r"x\.toml: cannot be read: No such file"):
        stagec.build("x.toml")


@pytest.mark.parametrize(("program", "file"), [("make", "Makefile"), ("ninja", "build.ninja")])
def test_make_and_ninja_know_what_a_bundle_depends_on(program: str, file: str, built: Workspace) -> None:
    """They run the recipes of the page."""
    if not shutil.which(program):
        pytest.skip(f"{program} is not installed")
    built.write(file, PAGE[file].replace("models/models.toml", "models/m.toml"))

    def ran() -> bool:
        done = built.shell(f"{program} build/models.aot")
        assert done.returncode == 0, done.stdout + done.stderr
        return "actions ran" in done.stdout

    assert ran()
    assert not ran()
    built.write("models/other.py", "TEN = 12\n")
    assert not ran()
    built.write("models/shared.py", "TWO = 6\n")
    assert ran()
    (built.root / "models" / "shared.py").unlink()
    built.write("models/f.py", "def double(x):\n    return x * 2\n")
    assert ran()


def test_the_page(tmp_path: Path) -> None:
    """Its files, and its commands in their order."""
    workspace = Workspace(tmp_path, PAGE)
    for line in [*commands("docs/without-bazel.md"), f"{shlex.join(PYTHON)} notebook.py"]:
        if shutil.which(line.split()[0]) or line.startswith("stagec"):
            done = workspace.shell(line)
            # What the bundle's action says of an old jax depends on today, and what a statement says on the packages.
            assert (done.returncode, re.split(r"warning: JAX promises|\d+ packages are named", done.stderr)[0]) in (
                (0, ""),
                (0, "models/models.toml: "),
                (0, "models.intoto.json: "),
            ), line
    assert done.stdout == "(32, 10)\n"
    assert {"models.predict.exported", "models.predict.cpu-avx2.batch32.xla"} <= {
        path.name for path in (workspace.root / "build" / "all").iterdir()
    }


def test_the_packages_are_in_the_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed, edited = tmp_path / "site-packages", tmp_path / "edited"
    record = installed / "a-1.dist-info" / "RECORD"
    names = "a.py", "b/__init__.py", "shared/a/__init__.py", "shared/single.py"
    listed = "".join(f"{name},sha256=x,1\n" for name in names) + "a-1.dist-info/RECORD,,\n"
    unlisted = [
        installed / name
        for name in ("without_metadata/c.py", "d.py", "shared/e.py", "shared/e/__init__.py", "shared/e/data.json")
    ]
    texts = {
        record: listed,
        **{installed / name: "A = 1" for name in names},
        **dict.fromkeys(unlisted, "C = 1"),
        edited / "b.py": "B = 1",
    }
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def key() -> str:
        digests = Store(tmp_path / "store").digests("of-a-test")
        return environment.facts([str(installed), str(edited)], digests)["packages"]

    seen = [key()]
    for path in (record, *unlisted, edited / "b.py"):
        path.write_text(texts[path].replace("1", "2", 1))
        seen.append(key())
    assert len({*seen}) == len(seen)
    tops = environment.unlisted([str(installed), str(edited)], Store(tmp_path / "store").digests("of-a-test"))
    assert sorted(tops) == ["b.py", "d.py", "shared", "without_metadata"]
    (edited / "shared").mkdir()
    (edited / "shared" / "other.py").write_text("C = 1")  # a part of the namespace, in another folder
    more = environment.unlisted([str(installed), str(edited)], Store(tmp_path / "store").digests("of-a-test"))
    assert {top for top in more if more[top] != tops.get(top)} == {"shared"}
    shutil.rmtree(edited / "shared")
    for name in names:  # of a list, the digests count
        (installed / name).write_text("A = 2")
    assert key() == seen[-1]
    # What differs where the same wheels are installed elsewhere, or by another installer, or a checkout is elsewhere.
    (installed / "a-1.dist-info" / "INSTALLER").write_text("uv")
    (installed / "__editable__.b.pth").write_text(str(edited))
    installer = "../../bin/a,sha256=z,9\na-1.dist-info/INSTALLER,sha256=u,2\n__pycache__/a.cpython-311.pyc,,\n"
    installer += "__editable__.b.pth,sha256=z,9\n"
    record.write_text(installer + record.read_text())
    assert key() == seen[-1]
    # A process that imports the model itself has the workspace on its path; an action gets its import roots.
    monkeypatch.setattr(sys, "path", ["", str(tmp_path), str(installed), *sys.path])
    assert environment.packages([str(tmp_path)])[0] == str(installed)


UNREADABLE = """
import os, sys
from stagec.core.messages.errors import StagecError
from stagec.local import environment
from stagec.local.store import Store
digests = Store(environment.Path(sys.argv[2])).digests("of-a-test")
environment.facts([], digests)  # it imports what it needs: another user may not read the tests' own files
if number := int(sys.argv[3]):
    os.setuid(number)
try:
    environment.facts([sys.argv[1]], digests)
except StagecError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("site-packages/a/b.py", "cannot be read: Permission denied"),
        ("site-packages/a/c", "cannot be read: Permission denied"),
        ("site-packages", "cannot be read: Permission denied"),
        ("site-packages/a-1.dist-info/RECORD", "it is not a list of files: 'utf-8' codec can't decode byte 0xff in"),
    ],
)
def test_packages_that_cannot_be_read_are_named(name: str, told: str, tmp_path: Path) -> None:
    """Nothing is left out of the keys because this user may not read it."""
    with as_user("ordinary user") as user, tempfile.TemporaryDirectory(dir="/tmp") as folder:
        for file in ("site-packages/a/b.py", "site-packages/a/c/d.py", "site-packages/a-1.dist-info/RECORD"):
            (path := Path(folder, file)).parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"\xff" if file == name else b"")
        for path in (Path(folder), *Path(folder).rglob("*")):
            if user.number is not None:
                os.chown(path, user.number, user.number)
        if told.endswith("denied"):
            Path(folder, name).chmod(0)
        command = [
            sys.executable,
            "-c",
            UNREADABLE,
            f"{folder}/site-packages",
            f"{folder}/store",
            str(user.number or 0),
        ]
        done = subprocess.run(command, env=action_environment(), capture_output=True, text=True)
        Path(folder, name).chmod(0o755)
    assert done.stdout.startswith(f"{folder}/{name}: {told}"), done.stderr


def test_readers_of_one_file_have_entries_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stagec.local.store._FRESH", 0)
    file = tmp_path / "file"
    file.write_text("content")
    kept = Store(tmp_path / "store")

    def first(path: str) -> str:
        return f"first {Path(path).read_text()}"

    def second(path: str) -> str:
        return f"second {Path(path).read_text()}"

    for _ in range(2):  # the second time they are remembered
        digests = kept.digests("of-a-test")
        read = digests.of(str(file)), digests.of(str(file), first), digests.of(str(file), second)
        assert read == (hashlib.sha256(b"content").hexdigest(), "first content", "second content")
        assert digests.changed([str(file)]) == []
        digests.save()
