"""Builds on a real cluster of remote execution, where machines end, restart and are slow: with the bytes of local ones.

`tools/cluster` installs and starts it: BuildGrid on PostgreSQL, buildbox workers, nginx. Nothing of it is a stand-in.
"""

import json
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.building import COMPILER, ROOT
from tests.clusters import Cluster, needs_cluster
from tests.nested import NestedBazel

FUNCTIONS, COMPILED = 200, 10
OTHERS = ("h200", "v5e:1x1", "neoverse-n1")
"""Targets with packages of their own: two of accelerators, and one whose compiler runs under an emulator."""
EXAMPLES = ("//examples/digits", "//examples/digits:digits.provenance", "//examples/transformer:tiny")
MANY = "//many"
FOR_OTHERS = "//many:others"
# An action that takes its packages with it, and one that finds them in the image of its machine.
WITH_PACKAGES, IN_IMAGE = "//examples/digits:digits.init", "//many:older.f000"

MODULE = """module @{name} {{
  func.func public @main(%x: tensor<{size}xf32>) -> tensor<{size}xf32> {{
    %y = stablehlo.cosine %x : tensor<{size}xf32>
    return %y : tensor<{size}xf32>
  }}
}}
"""
MANIFEST = """[manifest]
name = "{name}"
version = "1"
reproducible = false

[targets.cpu]
platform = "cpu"
isa = "SSE4_2"
"""
# One in ten is compiled: of the others, the test needs only what everybody can compile.
FUNCTION = """
[functions.{name}]
entry = "{name}.mlir"
platforms = {platforms}
targets = {targets}
"""
BUILD = """load("@many_manifest//:defs.bzl", many = "aot_manifest")
load("@newer_manifest//:defs.bzl", newer = "aot_manifest")
load("@older_manifest//:defs.bzl", older = "aot_manifest")
load("@others_manifest//:defs.bzl", others = "aot_manifest")
load("//rules:defs.bzl", "stagec_toolchain")

# Actions run on machines with the property that the platform names.
platform(
    name = "machines",
    constraint_values = ["@platforms//os:linux", "@platforms//cpu:x86_64", ":python_of_machines"],
    exec_properties = {{"python": "{python}"}},
)

constraint_setting(name = "python")

constraint_value(
    name = "python_of_machines",
    constraint_setting = ":python",
)

toolchain(
    name = "toolchain",
    exec_compatible_with = [":python_of_machines"],
    toolchain = "//compiler:staging",
    toolchain_type = "//rules:toolchain_type",
)

# Machines of the same Python that have the packages.
stagec_toolchain(
    name = "image_staging",
    compiler = "//compiler:actions",
    entry = "//compiler:stagec/__main__.py",
    environment = "@image_python//:environment",
)

toolchain(
    name = "image_toolchain",
    exec_compatible_with = [":python_of_machines"],
    toolchain = ":image_staging",
    toolchain_type = "//rules:toolchain_type",
)

# A second Python, with machines, packages and a toolchain of its own.
platform(
    name = "newer_machines",
    constraint_values = ["@platforms//os:linux", "@platforms//cpu:x86_64", ":newer_python"],
    exec_properties = {{"python": "{newer}"}},
)

constraint_value(
    name = "newer_python",
    constraint_setting = ":python",
)

stagec_toolchain(
    name = "newer_staging",
    compiler = "//compiler:actions",
    entry = "//compiler:stagec/__main__.py",
    environment = "@newer_python//:environment",
)

toolchain(
    name = "newer_toolchain",
    exec_compatible_with = [":newer_python"],
    toolchain = ":newer_staging",
    toolchain_type = "//rules:toolchain_type",
)

older(
    name = "older",
    data = ["f000.mlir"],
    exec_compatible_with = [":python_of_machines"],
)

newer(
    name = "newer",
    data = ["f000.mlir"],
    exec_compatible_with = [":newer_python"],
)

others(
    name = "others",
    data = ["f000.mlir"],
)

many(
    name = "many",
    data = glob(["*.mlir"]),
)
"""
WORKSPACE = """
stagec_manifest(
    name = "{name}_manifest",
    manifest = "//many:{name}.toml",
)
"""
MODULE_BAZEL = """
stagec.manifest(
    name = "{name}_manifest",
    manifest = "//many:{name}.toml",
)
use_repo(stagec, "{name}_manifest")
"""
# More packages: what their actions find on their machines are more attributes.
ENVIRONMENT_WORKSPACE = """
python_environment(
    name = "{name}_python",
    lock = "//many:compiling.lock",
    {more}
)
"""
ENVIRONMENT_MODULE = """
stagec.environment(
    name = "{name}_python",
    lock = "//many:compiling.lock",
    {more}
)
use_repo(stagec, "{name}_python")
"""
# What exports and compiles a StableHLO module imports these.
COMPILING = ("flatbuffers", "jaxlib", "ml-dtypes", "numpy")


class Workspace(NestedBazel):
    """stagec's own workspace with its examples, and a manifest of many functions."""

    def __init__(self, folder: Path) -> None:
        root = folder / "stagec"
        super().__init__(folder, root)
        for name in ("examples/digits", "examples/transformer"):
            shutil.copytree(ROOT / name, root / name)
        (root / "many").mkdir()
        functions = []
        for number in range(FUNCTIONS):
            name = f"f{number:03}"
            (root / "many" / f"{name}.mlir").write_text(MODULE.format(name=name, size=number + 1))
            targets = json.dumps(["cpu"] if number % COMPILED == 0 else [])
            functions.append(FUNCTION.format(name=name, platforms='["cpu"]', targets=targets))
        locked = re.split(r"^(?=\S)", (COMPILER / "requirements.lock").read_text("utf-8"), flags=re.MULTILINE)
        lock = "".join(text for text in locked if text.partition("==")[0] in COMPILING)
        (root / "many" / "compiling.lock").write_text(lock)
        for_others = FUNCTION.format(name="f000", platforms='["cpu", "cuda", "tpu"]', targets=json.dumps(list(OTHERS)))
        manifests = {
            "others": [for_others],
            "many": functions,
            "newer": functions[:1],
            "older": functions[:1],
        }
        for name, written in manifests.items():
            (root / "many" / f"{name}.toml").write_text(MANIFEST.format(name=name) + "".join(written))
            for file, text in (("WORKSPACE", WORKSPACE), ("MODULE.bazel", MODULE_BAZEL)):
                with (root / file).open("a") as lines:
                    lines.write(text.format(name=name))

    def python_of_machines(self, python: str, newer: str = "") -> None:
        """Write the platforms of the machines: the values of the property by which the engine chooses them."""
        (self.root / "many" / "BUILD").write_text(BUILD.format(python=python, newer=newer))

    def declare_environment(self, name: str, **more: str) -> None:
        """Declare the packages `@{name}_python`, which export and compile modules. more: attributes."""
        for file, text in (("WORKSPACE", ENVIRONMENT_WORKSPACE), ("MODULE.bazel", ENVIRONMENT_MODULE)):
            with (self.root / file).open("a") as lines:
                attributes = (f"{key} = {json.dumps(value)}," for key, value in more.items())
                lines.write(text.format(name=name, more="\n    ".join(attributes)))

    def find_programs_in(self, folder: Path) -> None:
        """Let stagec look for a Python in this folder, too."""
        self._env["PATH"] = f"{folder}:{self._env['PATH']}"

    def build(self, *words: str) -> subprocess.CompletedProcess[str]:
        done = self.run("build", *words)
        assert done.returncode == 0, done.stderr
        return done

    def artifacts(self) -> dict[str, bytes]:
        """Return all files that stagec's actions wrote, except the seconds that they took."""
        found = [path for folder in ("examples", "many") for path in (self.root / "bazel-bin" / folder).rglob("*")]
        own = re.compile(r"\.(aot|exported|exported\.json|xla|mlirbc|json|safetensors)$")
        return {
            str(path.relative_to(self.root / "bazel-bin")): path.read_bytes()
            for path in found
            if path.is_file() and own.search(path.name) and not path.name.endswith(".profile.json")
        }


@dataclass(frozen=True)
class Built:
    """A workspace with what a local build made of it, and a cluster with the workers 1 and 2."""

    workspace: Workspace
    local: dict[str, bytes]
    cluster: Cluster

    def options(self, python: str, toolchain: str = "//many:toolchain") -> list[str]:
        """Options of a build on the machines that have a property, and nowhere else."""
        self.workspace.python_of_machines(python)
        on_them = ["--extra_execution_platforms=//many:machines", f"--extra_toolchains={toolchain}"]
        return [*self.cluster.options(), *on_them, "--spawn_strategy=remote", "--noremote_local_fallback"]

    def host(self) -> list[str]:
        """Options of a build on the machines with this one's Python."""
        return self.options(self.cluster.settings()["PYTHON_HOST"])

    def with_image(self, python: str = "") -> list[str]:
        """Options of a build on machines that have the packages. python: the property, if not this machine's Python."""
        return self.options(python or self.cluster.settings()["PYTHON_HOST"], "//many:image_toolchain")

    @property
    def image(self) -> Path:
        """The folder of the machines that has the packages."""
        return self.cluster.folder / "image"

    @property
    def output_base(self) -> Path:
        """Where Bazel keeps what it fetches and builds."""
        return Path(self.workspace.run("info", "output_base").stdout.strip())

    def refused(self, label: str, options: list[str]) -> str:
        """Build on machines where that does not work; return what Bazel says of why."""
        done = self.workspace.run("build", label, *options)
        assert done.returncode != 0
        assert "Traceback" not in done.stderr
        return done.stderr

    def install_packages(self) -> None:
        """Install them on the machines, from the layer that stagec writes for images."""
        self.workspace.build("@image_python//:layer")
        (layer,) = (self.workspace.root / "bazel-bin" / "external").glob("*image_python/layer.tar")
        self.image.mkdir(exist_ok=True)
        subprocess.run(["tar", "--extract", "--file", layer, "--directory", self.image], check=True)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    needs_cluster()
    # Sockets have short paths, and PostgreSQL runs as a user of its own.
    cluster = Cluster(Path(tempfile.mkdtemp(prefix="stagec-cluster-", dir="/tmp")))
    cluster.folder.chmod(0o755)
    workspace = Workspace(tmp_path_factory.mktemp("remote"))
    try:
        with ThreadPoolExecutor(1) as pool:
            started = pool.submit(cluster, "start")
            workspace.python_of_machines("")
            workspace.build(*EXAMPLES, MANY, FOR_OTHERS)
            local = workspace.artifacts()
            started.result()
        workspace.run("clean")
        built = Built(workspace, local, cluster)
        workspace.declare_environment("image", packages=str(built.image))
        # Bazel 4 would upload each file by a call of its own, for each action that starts at the same time.
        (packages,) = built.output_base.glob("external/*stagec_python/site-packages")
        cluster.upload(packages)
        yield built
    finally:
        workspace.run("shutdown")
        cluster("remove")


def processes(done: subprocess.CompletedProcess[str]) -> dict[str, int]:
    """Return how many actions ran where, as Bazel counts them at the end."""
    (line,) = re.findall(r"INFO: \d+ process(?:es)?: (.*)\.$", done.stderr, re.MULTILINE)
    return {what: int(number) for number, what in re.findall(r"(\d+) ([a-z -]+)", line) if what != "internal"}


def test_the_examples_are_those_of_a_local_build(built: Built) -> None:
    done = built.workspace.build(*EXAMPLES, *built.host())
    assert set(processes(done)) == {"remote"}
    made = built.workspace.artifacts()
    assert made == {name: data for name, data in built.local.items() if not name.startswith("many/")}
    assert len(made) > 50


def test_the_compilers_of_other_machines_run_there(built: Built) -> None:
    done = built.workspace.build(FOR_OTHERS, *built.host())
    assert set(processes(done)) == {"remote"}
    made = {name: data for name, data in built.workspace.artifacts().items() if name.startswith("many/others.")}
    assert made == {name: data for name, data in built.local.items() if name.startswith("many/others.")}
    assert sum(name.endswith(".xla") for name in made) == len(OTHERS)


def test_tests_run_there(built: Built) -> None:
    done = built.workspace.run("test", "//examples/digits:digits.golden_test", *built.host())
    assert done.returncode == 0, done.stdout + done.stderr
    assert processes(done)["remote"] >= 1


def test_each_target_goes_to_its_python(built: Built) -> None:
    """Two Pythons in one build: each has packages, a toolchain and machines of its own."""
    workspace, cluster = built.workspace, built.cluster
    settings = cluster.settings()
    newer, older = settings["PYTHON_UNSTABLE"], settings["PYTHON_HOST"]
    assert newer != older
    program = cluster.folder / "bin" / f"python{newer}"
    version = subprocess.run([program, "-V"], check=True, capture_output=True, text=True).stdout.split()[1]
    workspace.find_programs_in(program.parent)
    workspace.declare_environment("newer", interpreter=f"/usr/bin/{program.name}", interpreter_version=version)
    options = [*built.host(), "--extra_execution_platforms=//many:newer_machines"]
    workspace.python_of_machines(older, newer)
    cluster("add-worker", "7", "image=unstable")
    done = workspace.build("//many:older", "//many:newer", *options, "--extra_toolchains=//many:newer_toolchain")
    cluster("kill-worker", "7")
    assert processes(done) == {"remote": 8}
    made = workspace.artifacts()
    releases = {
        name: json.loads(made[f"many/{name}.f000.exported.json"])["components"]["environment python"]["value"]
        for name in ("older", "newer")
    }
    assert releases["newer"] == version
    assert releases["older"].startswith(f"{older}.")
    for kind in ("exported", "cpu.xla", "cpu.stablehlo.mlirbc"):
        assert made[f"many/newer.f000.{kind}"] == made[f"many/older.f000.{kind}"]


def test_machines_that_have_the_packages(built: Built) -> None:
    """They compare them with the lock, and fetch none."""
    fingerprint, said = built.image / "fingerprint.txt", "does not have the packages of the lock"
    assert said in built.refused(IN_IMAGE, built.with_image())
    built.install_packages()
    right = fingerprint.read_text()
    fingerprint.write_text("stale\n")
    assert said in built.refused(IN_IMAGE, built.with_image())
    fingerprint.write_text(right)
    assert processes(built.workspace.build(IN_IMAGE, *built.with_image())) == {"remote": 2}
    assert built.workspace.artifacts()["many/older.f000.exported"] == built.local["many/many.f000.exported"]


def test_nothing_is_lost_where_machines_are(built: Built) -> None:
    """A machine is slow, one loses its power, the scheduler ends at once: the build ends, with the same bytes."""
    cluster = built.cluster
    cluster("add-worker", "3")
    cluster("slow-worker", "3", "2")
    before = cluster.executed()
    started = built.workspace.start("build", MANY, *built.with_image())
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(started.communicate)

        def after(actions: int, *command: str) -> None:
            while cluster.executed() < before + actions and not ended.done():
                time.sleep(0.2)
            assert not ended.done(), ended.result()[1]
            cluster(*command)

        after(20, "kill-worker", "1")
        after(60, "restart-scheduler")
        after(100, "add-worker", "1")
        output, errors = ended.result()
    assert started.returncode == 0, errors
    done = subprocess.CompletedProcess(started.args, started.returncode, output, errors)
    assert processes(done) == {"remote": FUNCTIONS + FUNCTIONS // COMPILED + 2}  # the imports of all, and the bundle
    made = built.workspace.artifacts()
    many = {name for name in built.local if name.startswith("many/many.")}
    assert {name: made.get(name) for name in many} == {name: built.local[name] for name in many}
    cluster("kill-worker", "3")


def test_what_ends_first_is_taken(built: Built) -> None:
    """Dynamic execution: an action runs here, in a worker, and there."""
    dynamic = ["--internal_spawn_scheduler", "--dynamic_local_strategy=worker,sandboxed", "--noremote_accept_cached"]
    dynamic += [f"--strategy=Stagec{stage}=dynamic" for stage in ("Export", "Compile")]
    built.workspace.run("clean")
    label = "//examples/digits:digits.train_step.cpu"
    built.workspace.build(label, *built.host(), *dynamic)
    made = built.workspace.artifacts()
    assert {"examples/digits/digits.train_step.cpu.xla", "examples/digits/digits.train_step.exported"} <= set(made)
    assert made == {name: built.local[name] for name in made}


def test_no_machine_has_the_property(built: Built) -> None:
    assert "FAILED_PRECONDITION: Could not find property set for {('python', '2.7')}" in built.refused(
        IN_IMAGE, built.with_image("2.7")
    )


def test_an_image_without_the_interpreter(built: Built) -> None:
    built.cluster("add-worker", "4", "image=unstable", "python=spare")
    message = built.refused(IN_IMAGE, built.with_image("spare"))
    built.cluster("kill-worker", "4")
    assert re.search(r"stagec: the machine that runs this action has no /\S*python3", message), message


def test_a_machine_that_starts_again_with_another_python(built: Built) -> None:
    """What its image has at the path of the interpreter is not what the packages were installed for."""
    (python,) = built.output_base.glob("external/*stagec_python/interpreter.txt")
    built.cluster("add-worker", "6", "python=spare", f"stale={python.read_text().strip()}")
    message = built.refused(IN_IMAGE, built.with_image("spare"))
    built.cluster("kill-worker", "6")
    assert re.search(r"is Python 3\.1[2-9].*, and this action is for Python (3\.11|\(cpython-311)", message), message


def test_a_full_disk(built: Built) -> None:
    """The machine has less room than the packages need."""
    built.cluster("add-worker", "5", "python=spare", "disk=150m")
    message = built.refused(WITH_PACKAGES, built.options("spare"))
    built.cluster("kill-worker", "5")
    assert "the disk of the machine that should run this action is full: free it" in message


def test_an_engine_of_another_version(built: Built, tmp_path: Path) -> None:
    """buildbox-casd speaks versions from 2.1 on, and Bazel before 8 version 2.0."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program = built.cluster.folder / "bin" / "buildbox-casd"
    with subprocess.Popen([program, f"--bind=127.0.0.1:{port}", tmp_path], stderr=subprocess.DEVNULL) as engine:
        try:
            while socket.socket().connect_ex(("127.0.0.1", port)):
                assert engine.poll() is None
                time.sleep(0.1)
            done = built.workspace.run(
                "build", "//examples/digits:digits.init", f"--remote_executor=grpc://127.0.0.1:{port}"
            )
        finally:
            engine.kill()
    assert done.returncode != 0
    assert re.search(r"2\.0.* is not supported by the server", done.stderr), done.stderr


def test_nothing_of_that_is_in_the_cache(built: Built) -> None:
    """A machine as it should be runs the actions that others have refused."""
    built.cluster("kill-worker", "1")
    built.cluster("add-worker", "1", "python=spare")  # it has the packages
    for label, options in ((IN_IMAGE, built.with_image("spare")), (WITH_PACKAGES, built.options("spare"))):
        assert processes(built.workspace.build(label, *options)) == {"remote": 2}
    made = built.workspace.artifacts()
    assert made["many/older.f000.exported"] == built.local["many/many.f000.exported"]
    assert made["examples/digits/digits.init.exported"] == built.local["examples/digits/digits.init.exported"]
    built.cluster("kill-worker", "1")
    built.cluster("add-worker", "1")


def test_an_empty_cache_is_filled_again(built: Built) -> None:
    built.cluster("empty-cache")
    built.workspace.run("clean")
    label, file = "//many:many.f000.cpu", "many/many.f000.cpu.xla"
    assert processes(built.workspace.build(label, *built.with_image())) == {"remote": 3}
    assert built.workspace.artifacts()[file] == built.local[file]
    built.workspace.run("clean")
    assert processes(built.workspace.build(label, *built.with_image())) == {"remote cache hit": 3}
    assert built.workspace.artifacts()[file] == built.local[file]
