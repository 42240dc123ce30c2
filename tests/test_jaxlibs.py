"""One bundle for a fleet that runs two releases of jaxlib: built together, and called where each of them is.

Modules: `checking/crossing.py`, `checking/golden.py`, `cli/actions/call.py`, `cli/actions/cross.py`.
"""

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jaxlib
import numpy as np
import pytest

import stagec
from stagec.bundle.additions import bases
from stagec.bundle.archive import Archive
from stagec.bundle.index import key_of
from stagec.bundle.members import pieces
from stagec.core.builds import releases
from stagec.trust.verification import verify
from tests.building import ROOT, checked
from tests.bundles import edited, whole_index, with_index
from tests.nested import NestedBazel, environment, runners, workspace_files
from tests.signed import write_keys
from tests.users import User

OLDER = "0.10.1"
OWN = jaxlib.__version__
MANIFEST = f"""[manifest]
name = "models"
version = "1"
reproducible = false
jaxlib = ["{OWN}", "{OLDER}"]
runs_on = ["{OWN}"]

[targets.older]
platform = "cpu"
isa = "AVX"
jaxlib = ["{OLDER}"]

[functions.predict]
entry = "models.model:predict"
args = ["f32[batch,16]", "f32[16,16]"]
targets = ["cpu-avx2"]
buckets = {{ batch = [2, 8] }}
golden = {{}}

[functions.step]
entry = "models.model:step"
args = ["f32[16,16]"]
targets = ["cpu-avx2", "older"]
golden = {{}}

[functions.retired]
entry = "models.model:step"
args = ["f32[8,8]"]
targets = ["older"]
"""
FILES = {
    "BUILD": 'exports_files(["older.lock"])\n',
    ".bazelrc": "build --nosandbox_debug\n",
    "models/models.toml": MANIFEST,
    "models/model.py": """import jax
import jax.numpy as jnp


def predict(x, w):
    return jax.nn.softmax(jnp.tanh(x @ w)), jnp.cumsum(x)


def step(w):
    return w - 0.1 * jax.grad(lambda w: jnp.sum(jnp.sin(w @ w)))(w)
""",
    # What serves runs the bundle as it is; of `retired` there is an older executable alone, which the build has tried.
    "models/compare.py": """import json
import sys

import numpy as np

import stagec

bundle = stagec.load(sys.argv[1], policy="executable_only")
said = {}
random = np.random.default_rng(0)
arguments = {
    "predict": [random.standard_normal(shape, np.float32) for shape in ((8, 16), (16, 16))],
    "step": [random.standard_normal((16, 16), np.float32)],
    "retired": [random.standard_normal((8, 8), np.float32)],
}
results = {name: bundle[name](*arguments[name]) for name in arguments}

import jax
import jaxlib

from models import model

for name, given in arguments.items():
    wanted = jax.tree.leaves(jax.jit(getattr(model, name.replace("retired", "step")))(*given))
    near = np.allclose if name == "retired" else np.array_equal
    same = [near(a, b) for a, b in zip(jax.tree.leaves(results[name]), wanted, strict=True)]
    said[name] = all(same)
print(json.dumps({"jaxlib": jaxlib.__version__, **said}))
""",
    "models/BUILD": """load("@models_manifest//:defs.bzl", "aot_manifest")
load("@stagec//rules:defs.bzl", "aot_bundle_addition", "aot_signing", "python_program")

aot_manifest(
    name = "models",
    deps = ["model.py"],
)

aot_bundle_addition(
    name = "added",
    bundle = "released.aot",
    environment = "@older//:environment",
)

aot_signing(
    name = "added.sign",
    provenance = ":added",
    tags = ["manual"],
)

[python_program(
    name = "compare_" + name,
    arguments = ["$(location %s)" % bundle],
    data = [bundle],
    environment = "@%s//:environment" % name.replace("added", "older"),
    main = "compare.py",
    deps = ["model.py", "@stagec//compiler:runtime"],
) for name, bundle in [("older", ":models"), ("stagec_python", ":models"), ("added", ":added")]]
""",
}


class Clone(NestedBazel):
    """A clone of the workspace, with an output base that no other has."""

    def __init__(self, folder: Path, packages: Path, files: dict[str, str] = FILES) -> None:
        folder.mkdir()
        super().__init__(folder, folder / "workspace")
        texts = workspace_files("fleet", ["older"]) | files
        for file, old, new in (
            ("WORKSPACE", '"//:older.lock"', '"//:older.lock", "exec_properties": {"Pool": "of older"}'),
            ("MODULE.bazel", '"//:older.lock"', '"//:older.lock", exec_properties = {"Pool": "of older"}'),
        ):
            texts[file] = texts[file].replace(old, new)
        # The test runs a program in the build's own environment too.
        texts["MODULE.bazel"] = texts["MODULE.bazel"].replace('"older", "models', '"older", "stagec_python", "models')
        for name, text in texts.items():
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            (self.root / name).write_text(text)
        shutil.copy(ROOT / "tests" / "older.lock", self.root)
        self.options = self.with_packages(packages)
        self.outputs = self.root / "bazel-bin" / "models"

    def succeed(self, command: str, *arguments: str) -> tuple[str, str]:
        """Run a command; return what it prints, and what Bazel says."""
        done = self.run(command, *self.options, *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    def artifacts(self) -> dict[str, bytes]:
        """What was built, by file."""
        return {path.name: path.read_bytes() for path in self.outputs.iterdir() if path.suffix in (".aot", ".xla")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("jaxlibs")
    environment(folder / "environment", User(None, sys.executable))
    return folder


@pytest.fixture(scope="module")
def clone(folder: Path) -> Iterator[Clone]:
    """A clone that has built the bundle."""
    clone = Clone(folder / "first", folder / "environment")
    try:
        _, said = clone.succeed("build", "//models", "//models:models.provenance")
        # What reads the imports of models is not a worker, nor is what calls an executable with another jaxlib.
        assert runners(said) - {"linux-sandbox", "processwrapper-sandbox"} == {"local", "worker"}
        yield clone
    finally:
        clone.run("shutdown")


def test_what_is_built(clone: Clone) -> None:
    archive = Archive(clone.outputs / "models.aot")
    made = {
        name: [(entry["target"], entry["versions"]["jaxlib"], entry["executable"]) for entry in function["executables"]]
        for name, function in archive.index["functions"].items()
    }
    suffix = f".jaxlib-{OLDER}"
    assert {name: sorted(rows) for name, rows in made.items()} == {
        "predict": [
            ("cpu-avx2", release, f"predict.cpu-avx2.batch{batch}{end}.xla")
            for release, end in ((OLDER, suffix), (OWN, ""))
            for batch in (2, 8)
        ],
        "retired": [("older", release, f"retired.older{suffix}.xla") for release in (OLDER, OWN)],
        "step": [
            ("cpu-avx2", OLDER, f"step.cpu-avx2{suffix}.xla"),
            ("cpu-avx2", OWN, "step.cpu-avx2.xla"),
            *(("older", release, f"step.older{suffix}.xla") for release in (OLDER, OWN)),
        ],
    }
    statement = json.loads((clone.outputs / "models.intoto.json").read_text())["predicate"]["buildDefinition"]
    wheels = {one["uri"] for one in statement["resolvedDependencies"] if "uri" in one}
    assert f"pkg:pypi/jaxlib@{OLDER}" in wheels


def test_what_follows_the_cpu_of_this_machine_is_in_no_cache(clone: Clone) -> None:
    """What the older jaxlib gives here is tried on each machine that builds; what became of it is in caches."""
    said, _ = clone.succeed("aquery", 'mnemonic("StagecCall", deps(//models))', "--output=jsonproto")
    graph = json.loads(said)
    labels = {target["id"]: target["label"].removeprefix("//models:models.") for target in graph["targets"]}
    cached = {
        labels[action["targetId"]]: "no-cache" not in {entry["key"] for entry in action["executionInfo"]}
        for action in graph["actions"]
    }
    older = f"older.jaxlib-{OLDER}.results"
    again = f"older.jaxlib-{OWN}"
    assert cached == {f"{name}.{end}": end == again for name in ("retired", "step") for end in (older, again)}


def test_each_jaxlib_is_called_where_it_compiles(clone: Clone) -> None:
    """A remote engine may have other machines for it."""
    said, _ = clone.succeed("query", 'attr(exec_properties, "of older", //models:all)')
    assert {label.removeprefix("//models:models.") for label in said.splitlines()} == {
        f"{name}{end}"
        for name in (
            "retired.older",
            "step.older",
            "step.cpu-avx2",
            "predict.cpu-avx2.batch2",
            "predict.cpu-avx2.batch8",
        )
        for end in (f".jaxlib-{OLDER}", *([f".jaxlib-{OLDER}.results"] if name.endswith(".older") else []))
    }


@pytest.mark.pinned
@pytest.mark.parametrize(("name", "release"), [("stagec_python", OWN), ("older", OLDER)])
def test_each_jaxlib_runs_its_own(clone: Clone, name: str, release: str) -> None:
    """Nothing is compiled, and results are bit for bit those of jax.jit of that release."""
    said, _ = clone.succeed("run", f"//models:compare_{name}")
    assert json.loads(said) == {"jaxlib": release, "predict": True, "step": True, "retired": True}


@pytest.mark.pinned
@pytest.mark.parametrize("file", ["models.aot", "models.step.cpu-avx2.xla", f"models.step.cpu-avx2.jaxlib-{OLDER}.xla"])
def test_what_they_are_made_from_is_asked_in_each_environment(clone: Clone, file: str) -> None:
    said, _ = clone.succeed("run", "//models:models.explain", "--", str(clone.outputs / file))
    assert said.endswith("are made from the same components\n")


def test_golden_tests_run_in_each_environment(clone: Clone) -> None:
    clone.succeed("test", "//models:models.golden_test", f"//models:models.golden_test.jaxlib-{OLDER}")
    log = clone.root / "bazel-testlogs" / "models" / f"models.golden_test.jaxlib-{OLDER}" / "test.log"
    assert len(re.findall(r"^ok .* for (?:cpu-avx2|older)", log.read_text(), re.MULTILINE)) == 4


@pytest.mark.pinned
def test_no_byte_follows_the_other_releases(clone: Clone) -> None:
    """Executables of the build's own jaxlib are those of a manifest without the key."""
    before = clone.artifacts()
    manifest = clone.root / "models" / "models.toml"
    manifest.write_text(re.sub(r"(?m)^jaxlib = .*$", "", MANIFEST))
    try:
        clone.succeed("build", "//models")
        after = clone.artifacts()
    finally:
        manifest.write_text(MANIFEST)
    own = [name for name in before if name.endswith(".xla") and "jaxlib" not in name]
    assert own
    assert all(before[name] == after[name] for name in own)


@pytest.mark.pinned
def test_another_jaxlib_is_added_to_a_released_bundle(clone: Clone, tmp_path: Path) -> None:
    """Executables are those of a build for both, in two runs; what was released stays, and another key signs it all."""
    manifest, released = clone.root / "models" / "models.toml", clone.root / "models" / "released.aot"
    clone.succeed("build", "//models")
    both = of_older(Archive(clone.outputs / "models.aot"))
    assert both
    manifest.write_text(re.sub(r"(?m)^jaxlib = .*$", "", MANIFEST))
    try:
        clone.succeed("build", "//models")
        released.write_bytes((clone.outputs / "models.aot").read_bytes())
    finally:
        manifest.write_text(MANIFEST)
    clone.succeed("build", "//models:added")
    bundle = clone.outputs / "added.aot"
    first, added = bundle.read_bytes(), Archive(bundle)
    (base,) = bases(added)
    assert b"".join(pieces(base.members())) == released.read_bytes()
    assert of_older(added).items() >= both.items()
    assert len(of_older(added)) == 5
    said, _ = clone.succeed("run", "//models:compare_added")
    assert json.loads(said) == {"jaxlib": OLDER, "predict": True, "retired": True, "step": True}
    private, public = write_keys(tmp_path, "ann")
    envelope = tmp_path / "added.aot.dsse.json"
    clone.succeed("run", "//models:added.sign", "--", "--key", str(private), "--output", str(envelope))
    report = verify(str(bundle), [str(public)], signature=[str(envelope)], serves=[OLDER, OWN])
    assert (report["verdict"], report["serves"]) == ("verified", True)
    with (clone.root / "models" / "BUILD").open("a") as file:  # another action, and nothing of the first one's
        file.write(AGAIN)
    clone.succeed("build", "//models:again")
    assert (clone.outputs / "again.aot").read_bytes() == first


@pytest.mark.pinned
def test_executables_of_an_older_jaxlib_are_taken(clone: Clone, tmp_path: Path) -> None:
    """Of the build's own jaxlib nothing is compiled then, and a program of it runs them."""
    clone.succeed("build", "//models")
    released = tmp_path / "of_older.aot"

    def remove(members: dict[str, bytes]) -> None:
        index = whole_index(members)
        for function in index["functions"].values():
            function["executables"] = [row for row in function["executables"] if row["versions"]["jaxlib"] == OLDER]
        members.update(with_index(index, members))

    edited(clone.outputs / "models.aot", released, remove)
    checked("add-jaxlib", released, "--reuse", "--output", tmp_path / "reused.aot")
    archive = Archive(tmp_path / "reused.aot")
    rows = [row for function in archive.index["functions"].values() for row in function["executables"]]
    files = {
        release: {row["executable"] for row in rows if row["versions"]["jaxlib"] == release} for release in (OWN, OLDER)
    }
    assert len(rows) == 10
    assert files[OWN] == files[OLDER]
    loaded = stagec.load(archive.path, policy="executable_only")
    w = np.random.default_rng(0).standard_normal((16, 16), np.float32)
    wanted = stagec.load(clone.outputs / "models.aot", policy="executable_only")
    np.testing.assert_allclose(loaded["step"](w), wanted["step"](w), 1e-5, 1e-5)


AGAIN = """
aot_bundle_addition(
    name = "again",
    bundle = "released.aot",
    environment = "@older//:environment",
    reuse = True,  # and it takes nothing that a newer jaxlib made
)
"""


def of_older(archive: Archive) -> dict[tuple[Any, ...], str]:
    """The digests of the executables of the older jaxlib, by function, target and bucket."""
    return {
        (name, *key_of(entry)): archive.index["members"][entry["executable"]]["sha256"]
        for name, function in archive.index["functions"].items()
        for entry in function["executables"]
        if entry["versions"]["jaxlib"] == OLDER
    }


def test_a_release_that_nobody_declared(clone: Clone) -> None:
    manifest = clone.root / "models" / "models.toml"
    manifest.write_text(MANIFEST.replace(f'jaxlib = ["{OLDER}"]', 'jaxlib = ["0.9.9"]'))
    try:
        done = clone.run("build", *clone.options, "//models")
    finally:
        manifest.write_text(MANIFEST)
    assert done.returncode == 1
    told = f'models/models.toml: target "older": jaxlib = ["0.9.9"]: this workspace has jaxlib {OWN} and {OLDER}\n'
    assert told in done.stderr


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="jaxlib 0.12 has wheels for this Python")
def test_a_release_without_wheels_for_this_python(clone: Clone) -> None:
    lock = clone.root / "older.lock"
    kept = lock.read_text()
    lock.write_text((ROOT / "tests" / "newest.lock").read_text())
    try:
        done = clone.run("build", *clone.options, "@older//:environment")
    finally:
        lock.write_text(kept)
    assert done.returncode == 1
    assert (
        "  there may be wheels for another Python (of jaxlib from 0.11 on: for 3.12 and newer); declare one that is "
        "on this machine:\n"
        '  interpreter = "/opt/python3.12/bin/python3.12", interpreter_version = "3.12.1", beside this lock\n'
    ) in done.stderr


@pytest.mark.skipif(sys.version_info < (3, 12), reason="the newest JAX has no wheels for this Python")
def test_the_lock_may_have_the_newest_jax(folder: Path) -> None:
    """What it exports is in the StableHLO that the oldest jaxlib reads, so both run it, each what it compiled."""
    lock = (ROOT / "tests" / "newest.lock").read_text()
    newest = re.search(r"^jaxlib==(\S+)", lock, re.MULTILINE)[1]  # type: ignore[index]
    manifest = MANIFEST.replace(OWN, newest)
    clone = Clone(folder / "newest", folder / "environment", FILES | {"models/models.toml": manifest})
    (clone.root / "newest.lock").write_text(lock)
    (clone.root / "BUILD").write_text('exports_files(["newest.lock", "older.lock"])\n')
    for file in ("WORKSPACE", "MODULE.bazel"):
        text = (clone.root / file).read_text()
        (clone.root / file).write_text(text.replace("@stagec//compiler:requirements.lock", "//:newest.lock"))
    clone.options = [option for option in clone.options if "stagec_python" not in option]
    try:
        clone.succeed("test", "//models:models.golden_test", f"//models:models.golden_test.jaxlib-{OLDER}")
        clone.succeed("build", "//models")
        for name, release in (("stagec_python", newest), ("older", OLDER)):
            said, _ = clone.succeed("run", f"//models:compare_{name}")
            assert json.loads(said)["jaxlib"] == release
    finally:
        clone.run("shutdown")
    archive = Archive(clone.outputs / "models.aot")
    members = b"".join(archive[f"{name}.exported"] for name in ("predict", "retired", "step"))
    versions = re.findall(rb"StableHLO_v(\d+\.\d+\.\d+)", members)
    assert versions == [releases.known()[OLDER].stablehlo.encode()] * 3
