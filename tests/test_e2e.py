"""A user's repository, tests/e2e, built by Bazel with stagec as an external repository.

One copy of it, and one Bazel server, serve all tests. A test starts from a finished build. What a test edits to be
valid stays so; what it breaks it repairs.
"""

import functools
import hashlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import stagec
from stagec.bundle.archive import Archive
from stagec.core.builds import naming
from stagec.trust.provenance import BUILDER, LOCAL
from tests.building import COMPILER, ROOT, checked, stagec as command
from tests.nested import NestedBazel, actions, runners, telling
from tests.signed import write_keys
from tests.users import needs_isolation

SHARED = ("affine", "cosine", "decay", "gelu", "layer_norm", "softmax", "squared_error")
OWN = ("attention", "classifier", "regressor")
EXECUTABLES = sorted(
    ["models.affine.cpu.batch1", "models.affine.cpu.batch8"]
    + [f"models.{name}.cpu" for name in (*SHARED, *OWN) if name != "affine"]
)
LAYERS = [("StagecExport", f"models.{name}") for name in sorted(SHARED)]
ALL_EXPORTS = [("StagecExport", f"models.{name}") for name in sorted((*SHARED, *OWN))]
STAGES = ("StagecExport", "StagecCompile", "StagecBundle")


def stat_of(process: int) -> list[str]:
    """State, parent and more, as in /proc/PID/stat after the name."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()


class Workspace(NestedBazel):
    """The copy, and the Bazel that builds it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, folder / "stagec" / "tests" / "e2e")
        shutil.copytree(ROOT / "tests" / "e2e", self.root, ignore=shutil.ignore_patterns("__pycache__", "bazel-*"))
        self.events = folder / "events.json"

    def build(self, *arguments: str) -> list[tuple[str, str]]:
        """Build everything; return (mnemonic, target name) of stagec's actions that ran, sorted.

        `runners` then has what Bazel ran them and others with.
        """
        done = self.run("build", "//...", *telling(self.events), *arguments)
        assert done.returncode == 0, done.stderr
        self.runners = runners(done.stderr)
        return self.ran()

    def ran(self) -> list[tuple[str, str]]:
        """(mnemonic, target name) of stagec's actions that the last build ran, sorted."""
        return actions(self.events, STAGES)

    @functools.cached_property
    def server(self) -> int:
        """The process of the nested Bazel's server, which waits with its answer while it builds."""
        return int(self.run("info", "server_pid").stdout)

    def workers(self) -> set[int]:
        """The processes of the workers that Bazel has started."""
        found = set()
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(FileNotFoundError, ProcessLookupError):
                state, parent, *_ = stat_of(int(path.name))
                if parent == str(self.server) and state != "Z":
                    found.add(int(path.name))
        return found

    def worker_of(self, process: int) -> int:
        """The process that Bazel started as a worker, of one of the worker's."""
        while int(stat_of(process)[1]) != self.server:
            process = int(stat_of(process)[1])
        return process

    def refusal(self, target: str, *arguments: str) -> str:
        """What Bazel says about a target that cannot be built."""
        done = self.run("build", target, *arguments)
        assert done.returncode == 1, done.stderr
        return done.stderr

    def replace(self, file: str, old: str, new: str) -> None:
        """Replace the only occurrence of `old`."""
        text = (self.root / file).read_text()
        assert text.count(old) == 1
        (self.root / file).write_text(text.replace(old, new))

    @contextmanager
    def broken(self, file: str, old: str, new: str) -> Iterator[None]:
        """Replace the only occurrence of `old`, and put it back."""
        self.replace(file, old, new)
        try:
            yield
        finally:
            self.replace(file, new, old)

    def output(self, name: str) -> Path:
        """A built file of the package models."""
        return self.root / "bazel-bin" / "models" / name


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    workspace = Workspace(tmp_path_factory.mktemp("e2e"))
    try:
        ran = workspace.build()
        assert ran == sorted(
            [("StagecExport", f"models.{name}") for name in (*SHARED, *OWN)]
            + [("StagecCompile", name) for name in EXECUTABLES]
            + [("StagecBundle", "models")]
        )
        assert workspace.server
        yield workspace
    finally:
        workspace.run("shutdown")


@pytest.fixture
def built(workspace: Workspace) -> Workspace:
    workspace.build()
    return workspace


def test_query_lists_every_artifact(built: Workspace) -> None:
    listed = built.run("query", "//models:all").stdout.split()
    programs = (
        "affine.golden",
        "container",
        "explain",
        "golden_test",
        "image",
        "imports",
        "latency",
        "provenance",
        "push",
        "report",
        "reproducibility_test",
        "serve",
        "sign",
        "update_baseline",
    )
    names = ["models", "weights", *(f"models.{name}" for name in programs), *EXECUTABLES]
    names += [f"models.{name}" for name in (*SHARED, *OWN)]
    assert sorted(listed) == sorted(f"//models:{name}" for name in names)
    assert {*programs} - {"affine.golden"} <= {*naming.MACRO_TARGETS}  # no function may have such a name


def test_every_artifact_is_there(built: Workspace) -> None:
    files = ["models.aot", "models.intoto.json", "models.sbom.json"]
    files += [*(f"{name}{suffix}" for name in EXECUTABLES for suffix in (".xla", ".json"))]
    files += [f"models.{name}.exported" for name in (*SHARED, *OWN)]
    assert [name for name in files if not built.output(name).is_file()] == []


def test_the_bundle_runs(built: Workspace) -> None:
    bundle = stagec.load(built.output("models.aot"))
    weights, bias, x = np.eye(4, 3, dtype=np.float32), np.ones(3, np.float32), np.full((8, 4), 2, np.float32)
    np.testing.assert_array_equal(np.asarray(bundle["affine"](weights, bias, x)), x @ weights + bias)
    np.testing.assert_array_equal(bundle["affine"](x), x @ np.ones((4, 3)))  # with the weights of a rule
    assert set(bundle) == {*SHARED, *OWN}
    archive = Archive(built.output("models.aot"))
    golden = archive.index["functions"]["affine"]["golden"]
    assert golden["bucket"] == {"batch": 8}
    assert archive[golden["inputs"]["args[2]"]["member"]] == np.arange(32, dtype=np.float32).tobytes()  # affine.npz


def test_nothing_changed_is_nothing_done(built: Workspace) -> None:
    def seconds() -> float:
        start = time.monotonic()
        assert built.build() == []
        return time.monotonic() - start

    assert any(seconds() < 2 for _ in range(5))  # other tests run beside this one


def test_a_function_of_the_manifest_is_rebuilt_alone(built: Workspace) -> None:
    built.replace("models/models.toml", "rate = 0.5", "rate = 0.25")
    assert built.build() == [
        ("StagecBundle", "models"),
        ("StagecCompile", "models.decay.cpu"),
        ("StagecExport", "models.decay"),
    ]


@pytest.mark.pinned
def test_a_function_with_its_own_file_is_rebuilt_alone(built: Workspace) -> None:
    built.replace("models/attention.py", "axis=-1) @ value", "axis=-1) @ value + 1")
    assert built.build() == [
        ("StagecBundle", "models"),
        ("StagecCompile", "models.attention.cpu"),
        ("StagecExport", "models.attention"),
    ]


def test_a_bucket_more_is_compiled_alone(built: Workspace) -> None:
    with built.broken("models/models.toml", "batch = [1, 8]", "batch = [1, 8, 16]"):
        assert built.build() == [("StagecBundle", "models"), ("StagecCompile", "models.affine.cpu.batch16")]


def test_a_variable_is_in_the_key_of_its_function_and_in_the_provenance(built: Workspace) -> None:
    """It comes to the model as it was written, through the files of the planner, of Starlark and of the action."""
    unit = '\u00e9 "quoted" $HOME \\ %s {}'
    avals = 'avals = "models.regressor:predict_avals"'
    declared = f"{avals}\nenvironment = {{ UNIT = '{unit}' }}"
    check = f"import os\n\nassert os.environ['UNIT'] == {unit!r}\n\nimport jax.numpy as jnp\n"
    with (
        built.broken("models/models.toml", avals, declared),
        built.broken("models/regressor.py", "import jax.numpy as jnp\n", check),
    ):
        assert built.build() == [("StagecBundle", "models"), ("StagecExport", "models.regressor")]
        build = json.loads(built.output("models.intoto.json").read_text())["predicate"]["buildDefinition"]
        assert build["internalParameters"]["environment"] == {"models.regressor": {"UNIT": unit}}


@pytest.mark.pinned
def test_a_comment_is_exported_again_and_no_more(built: Workspace) -> None:
    text = (built.root / "models" / "layers.py").read_text()
    (built.root / "models" / "layers.py").write_text("# A comment.\n\n" + text)
    assert built.build() == LAYERS


@pytest.mark.pinned
def test_formatting_compiles_nothing(built: Workspace) -> None:
    new = """def affine(
    weights,
    bias,
    x,
):
    product = (
        x @ weights
    )
    return product + bias"""
    built.replace("models/layers.py", "def affine(weights, bias, x):\n    return x @ weights + bias", new)
    assert built.build() == [("StagecBundle", "models"), *LAYERS]  # descriptions have a digest of the code


@pytest.mark.pinned
def test_another_order_of_functions_compiles_nothing(built: Workspace) -> None:
    file = built.root / "models" / "layers.py"
    head, *functions = re.split(r"\n\n\n(?=def )", file.read_text().strip())
    assert len(functions) == len(SHARED)
    file.write_text("\n\n\n".join([head, *functions[::-1]]) + "\n")
    assert built.build() == [("StagecBundle", "models"), *LAYERS]


@pytest.mark.pinned
def test_another_name_of_a_file_compiles_nothing(built: Workspace) -> None:
    def rename(old: str, new: str) -> None:
        (built.root / "models" / f"{old}.py").rename(built.root / "models" / f"{new}.py")
        built.replace("models/BUILD", f'"{old}.py"', f'"{new}.py"')
        manifest = built.root / "models" / "models.toml"
        text = manifest.read_text()
        assert text.count(f'"models.{old}:') == len(SHARED)
        manifest.write_text(text.replace(f'"models.{old}:', f'"models.{new}:'))

    rename("layers", "small_functions")
    try:
        # The manifest's slices name the file, and so does the bundle's record of what it was made from.
        assert built.build() == [("StagecBundle", "models"), *ALL_EXPORTS]
    finally:
        rename("small_functions", "layers")


def test_a_sandbox_makes_the_same_bytes(built: Workspace) -> None:
    names = [f"models.{name}" for name in ("attention.exported", "attention.cpu.xla", "attention.cpu.json", "aot")]
    made = {name: built.output(name).read_bytes() for name in names}
    for name in names:
        built.output(name).unlink()
    assert built.build(*(f"--strategy={stage}=sandboxed" for stage in STAGES)) == [
        ("StagecBundle", "models"),
        ("StagecCompile", "models.attention.cpu"),
        ("StagecExport", "models.attention"),
    ]
    assert "worker" not in built.runners
    assert {name: built.output(name).read_bytes() for name in names} == made


@pytest.mark.pinned
def test_processes_of_their_own_make_the_same_bytes(built: Workspace) -> None:
    made = {name: built.output(f"{name}.xla").read_bytes() for name in EXECUTABLES}
    series = {built.output(f"{name}.xla-0.params").read_text().partition("--series=")[2] for name in EXECUTABLES}
    (word,) = {text.splitlines()[0] for text in series}
    package, manifest, target = word.split(" ", 2)
    assert (package, manifest) == ("//models", "models/models.toml")
    assert json.loads(target) == json.loads(built.output("models.gelu.cpu.spec.json").read_text())["target"]
    with built.broken("models/BUILD", "aot_manifest(\n", 'aot_manifest(\n    isolation = "function",\n'):
        compiled = [("StagecCompile", name) for name in EXECUTABLES]
        assert built.build() == compiled  # to the same files, so there is nothing to bundle
        assert {name: built.output(f"{name}.xla").read_bytes() for name in EXECUTABLES} == made
        assert not any("--series" in built.output(f"{name}.xla-0.params").read_text() for name in EXECUTABLES)


def test_a_wrong_isolation(built: Workspace) -> None:
    with built.broken("models/BUILD", "aot_manifest(\n", 'aot_manifest(\n    isolation = "none",\n'):
        assert "has to be one of 'function' or 'manifest' instead of 'none'" in built.refusal("//models")


ALONE = ("--strategy=StagecExport=sandboxed",)
"""Options of a build that traces without a worker, as it does where the system does not let workers isolate actions."""


@pytest.mark.parametrize("options", [(), ALONE], ids=["as it is", "without a worker"])
def test_a_file_that_is_not_declared_is_not_there(built: Workspace, options: tuple[str, ...]) -> None:
    with built.broken(
        "models/layers.py", "return jax.nn.gelu(x)", 'return x + len(open("models/attention.py").read())'
    ):
        said = built.refusal("//models:models.gelu.cpu", *options)
        assert "FileNotFoundError: [Errno 2] No such file or directory: 'models/attention.py'" in said
        assert "models/attention.py is not an input of this action\n  name it in deps, or in data " in said


@pytest.mark.pinned
def test_an_edited_compiler_is_another_worker(built: Workspace) -> None:
    def phases_of_gelu() -> set[str]:
        assert built.run("build", "//models:models.gelu", "--output_groups=profile").returncode == 0
        return {name for name, _, _ in json.loads(built.output("models.gelu.profile.json").read_text())["phases"]}

    assert {"other", "trace", "lower", "export"} <= phases_of_gelu()
    with built.broken("../../compiler/stagec/core/messages/phases.py", 'OTHER = "other"', 'OTHER = "rest"'):
        assert {"rest", "trace"} <= phases_of_gelu()
    assert "other" in phases_of_gelu()


@pytest.mark.pinned
def test_an_extension_is_in_the_keys_of_what_uses_it_alone(built: Workspace) -> None:
    def users() -> dict[str, str]:
        """Which actions have a file of an extension among their inputs or in their command."""
        listed, found = list[str](), dict[str, str]()
        for target in ("all", "models.image", "models.report"):  # two are not built by default
            done = built.run("aquery", f'mnemonic("Stagec.*", //models:{target})', "--include_param_files")
            assert done.returncode == 0, done.stderr
            listed += re.findall(r"^action '.*\n(?:  .*\n)*", done.stdout, re.MULTILINE)
        for action in listed:
            mnemonic, label = (re.search(rf"^  {key}: (.*)", action, re.MULTILINE) for key in ("Mnemonic", "Target"))
            assert mnemonic
            assert label
            named = {*re.findall(r"compiler/extensions/(\w+)", action)}
            if named:
                (found[f"{mnemonic[1]} {label[1].rpartition(':')[2]}"],) = named
        assert len(listed) > len(found) + len(EXECUTABLES)
        return found

    def edited(*extensions: str) -> list[tuple[str, str]]:
        for extension in extensions:
            package = built.root / "../../compiler/extensions" / extension / f"stagec_{extension}"
            assert (package / "__init__.py").is_file()
            for file in package.rglob("*.py"):
                file.write_text(f"{file.read_text()}\n# Edited.\n")
        return built.build()

    expected = {"StagecImage models.image": "registry", "StagecReport models.report": "insight"}
    assert users() == {**expected, **{f"StagecTimeline {name}": "insight" for name in EXECUTABLES}}
    assert edited("arrays", "grpc", "insight", "registry", "rehearse", "serve") == []
    entry = 'entry = "models.layers:decay"'
    with built.broken("models/models.toml", entry, f'{entry}\nfrontend = "arrays"'):
        built.build()
        assert users()["StagecExport models.decay"] == "arrays"
        assert edited("serve") == []
        assert edited("arrays") == [("StagecExport", "models.decay")]


@pytest.mark.parametrize("options", [(), ALONE], ids=["as it is", "without a worker"])
def test_an_action_that_dies_is_told_and_the_worker_goes_on(built: Workspace, options: tuple[str, ...]) -> None:
    with built.broken("models/layers.py", "return jax.nn.gelu(x)", "import os; os.kill(os.getpid(), 11)"):
        said = built.refusal("//models:models.gelu.cpu", *options)
        assert "stagec: the process of this action died of SIGSEGV (Segmentation fault) after " in said
        assert "the machine that runs this action" not in said  # Bazel shows the command, which has that text no more


def test_a_worker_that_dies_is_started_again(built: Workspace) -> None:
    needs_isolation()
    before = built.workers()
    assert before
    for worker in before:
        os.kill(worker, signal.SIGKILL)
    with built.broken("models/layers.py", "return jax.nn.gelu(x)", "return jax.nn.gelu(x) * 2"):
        ran = built.build()
        assert ("StagecCompile", "models.gelu.cpu") in ran
        assert {mnemonic for mnemonic, _ in ran} == {*STAGES}
        assert built.runners == {"local", "worker"}  # what reads the imports of models is not a worker
    assert built.workers().isdisjoint(before)


def until(condition: Callable[[], bool]) -> None:
    """Wait until it holds."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def alive(process: int) -> bool:
    """Whether a process is there, and no zombie."""
    try:
        return stat_of(process)[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def named(name: str) -> int | None:
    """A process of this name, if there is one. An action is seen by its name: its files are not here."""
    for path in Path("/proc").glob("[0-9]*/comm"):
        try:
            if path.read_text() == f"{name}\n":
                return int(path.parent.name)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return None


# Bazel asks those workers to cancel that it runs in folders of their own. It kills others.
CANCELLATION = ("--experimental_worker_cancellation", "--worker_sandboxing")
NAMED = "import ctypes, time; ctypes.CDLL(None).prctl(15, b'decaying'); "


@pytest.mark.parametrize("flags", [(), CANCELLATION], ids=["the worker is killed", "the work is cancelled"])
def test_an_interrupted_build_leaves_nothing(built: Workspace, flags: tuple[str, ...]) -> None:
    needs_isolation()
    decay = "//models:models.decay"
    with built.broken("models/layers.py", "return x * rate", NAMED + "time.sleep(600)"):
        build = built.start("build", decay, *flags)
        until(lambda: build.poll() is not None or named("decaying") is not None)
        child = named("decaying")
        assert child
        worker = built.worker_of(child)
        build.send_signal(signal.SIGINT)
        assert build.wait(timeout=60) == 8  # Bazel's status of what was interrupted
        until(lambda: not alive(child))
    if not flags:
        until(lambda: not alive(worker))
        built.build()
        return
    with built.broken("models/layers.py", "return x * rate", "return x * rate * 7"):
        assert built.run("build", decay, *flags).returncode == 0
    assert alive(worker)


def test_work_that_a_sandbox_did_first_is_cancelled(built: Workspace, scratch: Path) -> None:
    needs_isolation()
    go, exported = scratch / "go", built.output("models.decay.exported").read_bytes()
    dynamic = [  # an action in a worker and in a sandbox at once; Bazel takes what is made first
        *CANCELLATION,
        "--internal_spawn_scheduler",
        "--strategy=StagecExport=dynamic",
        "--dynamic_local_strategy=StagecExport=worker",
        "--dynamic_remote_strategy=StagecExport=sandboxed",
        f"--sandbox_add_mount_pair={scratch}",
        *telling(built.events),
    ]

    def race(winner: str) -> int | None:
        """Export where only one of the two comes to an end; return the worker's process, if that is the sandbox."""
        model = f"""import sys
    if "--worker_template" in sys.argv:
        {NAMED}
    import os, time
    while not ({winner == "worker"} if "--worker_template" in sys.argv else os.path.exists("{go}")):
        time.sleep(0.02)
    return x * rate"""
        with built.broken("models/layers.py", "return x * rate", model):
            build = built.start("build", "//models:models.decay", *dynamic)
            worker = None
            if winner == "sandbox":
                until(lambda: build.poll() is not None or named("decaying") is not None)
                child = named("decaying")
                assert child
                worker = built.worker_of(child)
                go.touch()
            _, errors = build.communicate()
            assert build.returncode == 0, errors
            if winner == "sandbox":
                go.unlink()
                until(lambda: named("decaying") is None)
        assert built.ran() == [("StagecExport", "models.decay")]
        assert ("worker" in runners(errors)) == (winner == "worker")
        assert built.output("models.decay.exported").read_bytes() == exported
        return worker

    worker = race("sandbox")
    assert worker
    race("worker")
    assert alive(worker)  # it is kept


def test_where_the_time_of_a_build_went(built: Workspace, tmp_path: Path) -> None:
    built.replace("models/attention.py", "axis=-1) @ value", "axis=-1) @ value * 3")
    events = tmp_path / "events.json"
    done = built.run("build", "//...", "--output_groups=+profile", f"--build_event_json_file={events}")
    assert done.returncode == 0, done.stderr
    table = checked("profile", events, "--trace", tmp_path / "build.json")
    assert {"models.attention", "models.attention.cpu", "models"} <= {line.split(" ")[0] for line in table.splitlines()}
    assert "models.attention.cpu" in (tmp_path / "build.json").read_text()


@pytest.mark.pinned
def test_explain_an_artifact_and_what_would_be_built_now(built: Workspace) -> None:
    shutil.copy(built.output("models.aot"), built.root / "old.aot")
    done = built.run("run", "//models:models.explain", "--", "old.aot")
    assert done.returncode == 0, done.stderr
    assert re.fullmatch("old.aot and /.*/models.explain.json are made from the same components\n", done.stdout)
    with built.broken("models/layers.py", "return x * rate", "return x * rate + 1"):
        done = built.run("run", "//models:models.explain", *telling(built.events), "--", "old.aot")
        assert done.returncode == 1, done.stderr
        assert re.fullmatch(
            r"decay \(portable\)\n  source of decay: .*\ndecay\.cpu\n  source of decay: .*\n", done.stdout
        )
        assert built.ran() == LAYERS
        built.build()
        done = built.run("run", "//models:models.explain", "--", "--json", "bazel-bin/models/models.decay.cpu.xla")
        assert (done.returncode, json.loads(done.stdout)["equal"]) == (0, True)


def test_provenance_names_what_a_build_takes_and_nothing_of_the_machine(built: Workspace) -> None:
    text = built.output("models.intoto.json").read_text()
    assert str(built.root.parent) not in text
    assert not re.search(r"https?://(?!in-toto\.io|slsa\.dev)", text)
    build = json.loads(text)["predicate"]["buildDefinition"]
    found = {one["name"]: one["digest"]["sha256"] for one in build["resolvedDependencies"]}
    for name in ("models.toml", "attention.py", "classifier.py", "layers.py", "regressor.py", "affine.npz"):
        content = (built.root / "models" / name).read_bytes()
        assert found.pop(f"models/{name}") == hashlib.sha256(content).hexdigest()
    generated = built.output("affine.safetensors").read_bytes()
    assert found.pop("models/affine.safetensors") == hashlib.sha256(generated).hexdigest()
    lock = (built.root / "requirements.lock").read_text() + (ROOT / "compiler" / "planning.lock").read_text()
    assert [name for name in found if not name.endswith(".whl")] == []
    assert [name for name, digest in found.items() if f"sha256:{digest}" not in lock] == []
    assert {"jax", "jaxlib", "flax", "pydantic"} <= {name.split("-")[0] for name in found}


@pytest.mark.pinned
def test_an_operation_has_its_place(built: Workspace) -> None:
    assert built.run("build", "//models:models.gelu", "--output_groups=debug").returncode == 0
    done = command("inspect", "bazel-bin/models/models.gelu.debug.mlir", "--locate", "jit(gelu)/tanh", cwd=built.root)
    line = (built.root / "models" / "layers.py").read_text().splitlines().index("    return jax.nn.gelu(x)") + 1
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, f"  models/layers.py:{line} in gelu")


@pytest.mark.pinned
def test_programs_as_text(built: Workspace) -> None:
    groups = {
        "jaxpr": ("models.gelu.jaxpr.txt", "{ lambda ; a:f32[32]. let"),
        "stablehlo": ("models.gelu.cpu.stablehlo.mlir", "module @jit_gelu "),
        "hlo_before": ("models.gelu.cpu.hlo_before.txt", "HloModule jit_gelu, "),
        "hlo_after": ("models.gelu.cpu.hlo_after.txt", "HloModule jit_gelu, is_scheduled=true, "),
        "inventory": ("models.gelu.cpu.inventory.json", '{\n "format": 1,\n "kind": "inventory",\n'),
        "timeline": ("models.gelu.cpu.timeline.json", '{"displayTimeUnit": "ms", "traceEvents": [\n'),
    }
    targets = ("//models:models.gelu", "//models:models.gelu.cpu")
    assert built.run("build", *targets, f"--output_groups={','.join([*groups, 'hlo_proto'])}").returncode == 0
    assert b"jit_gelu" in built.output("models.gelu.cpu.hlo_after.pb").read_bytes()
    for file, start in groups.values():
        assert built.output(file).read_text().startswith(start)


@pytest.mark.pinned
def test_a_baseline_is_written_beside_the_manifest_and_tested(built: Workspace) -> None:
    path, test = built.root / "models" / "models.baseline.json", "//models:models.baseline_test"
    old = 'args = ["f32[32]"]\ntargets = ["cpu"]'
    accept = "bazel run //models:models.update_baseline"
    with built.broken("models/models.toml", old, f'{old}\nbaseline = {{ executable_size = "3%" }}'):
        done = built.run("test", test, "--test_output=errors")
        missing = f"models/models.baseline.json: there is no baseline\n  write the first one: {accept}\n"
        assert (done.returncode, missing in done.stdout) == (3, True)
    try:
        assert built.run("run", "//models:models.update_baseline").returncode == 0
        assert json.loads(path.read_text())["executables"].keys() == {
            name.removeprefix("models.") for name in EXECUTABLES
        }
        assert built.run("test", test).returncode == 0
        path.write_text(re.sub(r'"flops": [1-9]\d*', '"flops": 1', path.read_text(), count=1))
        done = built.run("test", test, "--test_output=errors")
        assert (done.returncode, f"to accept what they take now: {accept}" in done.stdout) == (3, True)
    finally:
        path.unlink(missing_ok=True)


@pytest.mark.pinned
def test_an_executable_over_its_limit_is_named_and_fails_alone(built: Workspace) -> None:
    old = 'args = ["f32[32]"]\ntargets = ["cpu"]'
    new = 'args = ["f32[32]"]\ntargets = ["cpu", "cpu-avx512"]\nlimits = { cpu = { executable_size = 1 } }'
    with built.broken("models/models.toml", old, new):
        other = "//models:models.gelu.cpu-avx512"
        said = built.refusal("//models:models.gelu.cpu", other, "--keep_going")
        assert built.output("models.gelu.cpu-avx512.xla").exists()
    line = next(line for line in said.splitlines() if "is over the limit" in line)
    assert line.startswith("//models:models.gelu.cpu: size of the executable ")
    assert line.endswith(
        " is over the limit of 1 bytes (models/models.toml: functions.gelu.limits.cpu.executable_size)"
    )
    assert said.count("is over the limit") == 1


@pytest.mark.pinned(but=3)
@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        (
            "models/models.toml",
            'name = "models"',
            "name = models",
            "models/models.toml: not TOML: Invalid value (at line 2",
        ),
        (
            "models/models.toml",
            'version = "2.1.0"',
            'version = "2.1.0"\nauthor = "x"',
            "models/models.toml: manifest.author",
        ),
        (
            "models/models.toml",
            'args = ["f32[32]"]\ntargets = ["cpu"]',
            'args = ["f32[32]"]\ntargets = ["gpu"]',
            "models/models.toml: functions.gelu.targets[0]",
        ),
        (
            "models/models.toml",
            'args = ["f32[32]"]',
            'args = ["f33[32]"]',
            "models/models.toml: functions.gelu.args[0]",
        ),
        ("models/BUILD", 'name = "models"', 'name = "model"', 'write aot_manifest(name = "models", ...)'),
        (
            "models/BUILD",
            '"attention": [',
            '"atention": [',
            'models/models.toml has no function "atention", only affine,',
        ),
    ],
    ids=["broken TOML", "unknown key", "unknown target", "bad aval", "wrong name", "unknown function"],
)
def test_a_mistake_in_the_plan(built: Workspace, file: str, old: str, new: str, message: str) -> None:
    with built.broken(file, old, new):
        said = built.refusal("//models")
        assert said.count(message) == 1
        assert re.search(r"models/BUILD.*\bline \d+.* in <toplevel>", said)
        progress = ("Loading", "    ", "Analyzing", "Starting", "WARNING: ")
        assert len([line for line in said.splitlines() if not line.startswith(progress)]) <= 14, said


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        (
            "models/models.toml",
            "models.layers:gelu",
            "models.layers:gelo",
            "models/models.toml: functions.gelu.entry: models.layers has no attribute 'gelo'\n  did you mean 'gelu'?",
        ),
        (
            "models/layers.py",
            "return jax.nn.gelu(x)",
            'raise ValueError("no gelu today")',
            "models/models.toml: functions.gelu",
        ),
    ],
    ids=["missing entry point", "function that raises"],
)
def test_a_mistake_in_a_function(built: Workspace, file: str, old: str, new: str, message: str) -> None:
    with built.broken(file, old, new):
        said = built.refusal("//models:models.gelu.cpu")
        assert said.count(message) == 1
        if "raise" in new:
            assert "ValueError: no gelu today" in said
        left = [path.name for path in built.output("").iterdir() if "models.gelu.exported" in path.name]
        assert [name for name in left if not name.endswith(".params")] == []


@pytest.mark.pinned
def test_a_wrong_hash_in_a_lock(built: Workspace) -> None:
    lock = built.root / "tools.lock"
    good = lock.read_text()
    lock.write_text(re.sub(r"sha256:[0-9a-f]{64}", f"sha256:{'0' * 64}", good))
    try:
        said = built.refusal("@tools//:environment")
        assert "tools.lock: pip cannot install the packages for CPython " in said
        assert f"Expected sha256 {'0' * 64}\n" in said
    finally:
        lock.write_text(good)
    assert built.run("build", "@tools//:environment").returncode == 0


@pytest.mark.pinned
def test_the_lock_is_written_again(built: Workspace) -> None:
    lock = built.root / "requirements.lock"
    before = lock.read_text()
    try:
        done = built.run("run", "@stagec//:lock", "--", "requirements.in")
        assert (done.returncode, done.stdout.partition(" packages")[0]) == (0, "requirements.lock: 38"), done.stderr
        pinned = re.compile(r"^\S+==.*", re.MULTILINE)  # the hashes are of the index that this machine has
        assert pinned.findall(lock.read_text()) == pinned.findall(before)
    finally:
        lock.write_text(before)


def test_a_device_of_ones_own_is_read_again_when_its_file_changes(built: Workspace) -> None:
    target = '[targets.mine]\nplatform = "cuda"\ndevice = "devices/mine.toml"\n\n[targets.cpu]'
    gelu = 'entry = "models.layers:gelu"\nargs = ["f32[32]"]\ntargets = ["cpu"'
    tables = (ROOT / "compiler" / "stagec" / "targets" / "nvidia.toml").read_text()
    description = tables.partition("[h200]\n")[2].partition("\n[")[0]
    file = built.root / "models" / "devices" / "mine.toml"
    file.parent.mkdir()
    with (
        built.broken("models/models.toml", "[targets.cpu]", target),
        built.broken("models/models.toml", gelu, f'{gelu}, "mine"'),
    ):
        file.write_text(description.replace("core_count", "core_cuont"))
        assert "models/devices/mine.toml: core_cuont" in built.refusal("//models:models.gelu.cpu")
        file.write_text(description)
        listed = built.run("query", "//models:all")
        assert "//models:models.gelu.mine" in listed.stdout.split(), listed.stderr
        file.write_text(description.replace("core_count", "core_cuont"))
        assert "models/devices/mine.toml: core_cuont" in built.refusal("//models:models.gelu.cpu")


OTHER = {
    "WORKSPACE": 'workspace(name = "other")\n',
    "MODULE.bazel": """module(name = "other")

bazel_dep(name = "stagec", version = "0.1.0")

stagec = use_extension("@stagec//rules:extensions.bzl", "stagec")
stagec.manifest(
    name = "other_manifest",
    manifest = "//@odd=1[a]{b}:m.toml",
)
use_repo(stagec, "other_manifest")
""",
    "@odd=1[a]{b}/BUILD": """load("@other_manifest//:defs.bzl", "aot_manifest")

genrule(
    name = "made",
    srcs = ["given.safetensors"],
    outs = ["made.safetensors"],
    cmd = "cp '$<' '$@'",
)

aot_manifest(
    name = "m",
    function_deps = {"add": ["adding.py"]},
    imports = ["."],
    deps = ["scaling.py"],
)
""",
    "@odd=1[a]{b}/scaling.py": "def scale(w, x):\n    return w * x\n",
    "@odd=1[a]{b}/adding.py": "def add(w, x):\n    return w + x\n",
    "@odd=1[a]{b}/m.toml": """[manifest]
name = "m"
version = "1"
reproducible = false

[functions.scale]
entry = "scaling:scale"
args = ["f32[3]", "f32[3]"]
bind = { "args[0]" = "given.safetensors" }
golden = { inputs = "x.npz" }
targets = ["cpu-avx2"]

[functions.add]
entry = "adding:add"
args = ["f32[3]", "f32[3]"]
bind = { "args[0]" = { file = "made.safetensors", external = true } }
golden = {}
targets = ["cpu-avx2"]
""",
}
"""A repository of others, with a package whose name begins with what begins a file of words."""


def test_a_manifest_in_another_repository(built: Workspace) -> None:
    """Each word that begins with @ would be a file of words to Bazel's workers and to the command."""
    other = built.root.parent / "other"
    for name, text in OTHER.items():
        (other / name).parent.mkdir(parents=True, exist_ok=True)
        (other / name).write_text(text)
    package = other / "@odd=1[a]{b}"
    save_file({"args[0]": np.arange(3, dtype=np.float32)}, package / "given.safetensors")
    np.savez(package / "x.npz", **{"args[1]": np.full(3, 2, np.float32)})
    manifest = 'stagec_manifest(\n    name = "other_manifest",\n    manifest = "@other//@odd=1[a]{b}:m.toml",\n)\n\n'
    repository = f'local_repository(\n    name = "other",\n    path = "../other",\n)\n\n{manifest}'
    module = (
        'bazel_dep(name = "other")\nlocal_path_override(\n    module_name = "other",\n    path = "../other",\n)\n\n'
    )
    with (
        built.broken("WORKSPACE", "stagec_manifest(\n", f"{repository}stagec_manifest(\n"),
        built.broken("MODULE.bazel", "stagec = use_ex", f"{module}stagec = use_ex"),
    ):
        label = "@other//@odd=1[a]{b}:m"
        done = built.run("test", label, f"{label}.provenance", f"{label}.golden_test", f"{label}.image")
        assert done.returncode == 0, done.stderr
        (bundle,) = (built.root / "bazel-bin" / "external").glob("*/@odd=1[[]a]{b}/m.aot")
        loaded = stagec.load(bundle)
        np.testing.assert_array_equal(loaded["scale"](np.full(3, 2, np.float32)), [0, 2, 4])
        np.testing.assert_array_equal(loaded["add"](np.full(3, 2, np.float32)), [2, 3, 4])
        done = built.run("run", f"{label}.update_baseline")
        said = "m.update_baseline: the baseline would be written beside sources of another repository: run it in"
        assert (done.returncode, said in done.stderr) == (2, True), done.stderr
        assert not [*built.root.rglob("m.baseline.json"), *other.rglob("m.baseline.json")]
        done = built.run("run", f"{label}.latency", "--", "scale", "--starts", "1", "--rounds", "1")
        assert done.returncode == 0, done.stderr


NO_NETWORK = [
    f"--repo_env={variable}"
    for variable in (
        "PIP_INDEX_URL=http://127.0.0.1:1/simple",
        f"PIP_CONFIG_FILE={os.devnull}",
        "PIP_FIND_LINKS=",
        "PIP_EXTRA_INDEX_URL=",
        "PIP_NO_CACHE_DIR=1",
    )
]


@contextmanager
def for_a_tpu(built: Workspace) -> Iterator[None]:
    """With an executable for a TPU, //models:models.gelu.v5e-2x2."""
    gelu = 'entry = "models.layers:gelu"\nargs = ["f32[32]"]\ntargets = ["cpu"'
    with built.broken("models/models.toml", gelu, f'{gelu}, "v5e:2x2"'):
        yield


def test_what_compiles_for_other_hardware_is_fetched_when_that_is_built(built: Workspace) -> None:
    with for_a_tpu(built):
        assert "//models:models.gelu.v5e-2x2" in built.run("query", "//models:all").stdout.split()
        assert built.run("build", "//models:models.gelu.cpu").returncode == 0
        assert {name for name in built.fetched() if name.startswith("stagec_")} == {
            "stagec_isolation",
            "stagec_jaxlibs",
            "stagec_planning",
            "stagec_python",
            "stagec_uv",
        }
        said = built.refusal("//models:models.gelu.v5e-2x2", *NO_NETWORK)
        assert "compiler/tpu.lock: pip cannot install the packages for CPython " in said
        assert "No matching distribution found for libtpu==" in said


@pytest.fixture
def without_bazel(built: Workspace, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """`stagec build` of a copy of the workspace, with Bazel's packages; the weights, which Bazel makes, are in it."""
    root = tmp_path / "copy"
    shutil.copytree(built.root, root, ignore=shutil.ignore_patterns("bazel-*"))
    shutil.copy(built.output("affine.safetensors"), root / "models")
    packages = [built.fetched()[name] / "site-packages" for name in ("stagec_python", "stagec_planning")]
    variables = {
        "PYTHONPATH": os.pathsep.join(map(str, [*packages, COMPILER])),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }

    def build(*words: str) -> dict[str, Any]:
        done = command("build", "models/models.toml", "--json", *words, cwd=root, env=variables)
        assert done.returncode == 0, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    return build


@pytest.mark.pinned
def test_the_same_bytes_without_bazel(
    built: Workspace, without_bazel: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    lists = [built.fetched()[name] / "packages.json" for name in ("stagec_python", "stagec_planning")]
    words = {f"--{name}": str(tmp_path / f"models.{name}") for name in ("output", "statement", "sbom")}
    packages = [word for path in lists for word in ("--packages", str(path))]
    answer = without_bazel(*itertools.chain(*words.items()), *packages)
    assert answer["sha256"] == hashlib.sha256(built.output("models.aot").read_bytes()).hexdigest()
    assert (tmp_path / "models.output").read_bytes() == built.output("models.aot").read_bytes()
    assert (tmp_path / "models.sbom").read_bytes() == built.output("models.sbom.json").read_bytes()
    # It names who built it, and all the rest is the same.
    statement = (tmp_path / "models.statement").read_text().replace(LOCAL, BUILDER)
    assert statement == built.output("models.intoto.json").read_text()


def words_of(action: dict[str, Any]) -> tuple[str, ...]:
    """The command line of Bazel for an action, as `stagec build` has it.

    Left out are Python and its flags, the names of outputs for a worker, the tree of generated sources, and the seconds
    of phases, which are for `stagec profile`.
    """
    words = list(action.get("arguments", ()))
    files = [file for file in action.get("paramFiles", ()) if file["execPath"].endswith(".params")]
    words += [word for file in files for word in file["arguments"]]
    words = [re.sub(r"bazel-out/[^/]+/bin/", "stagec-out/", word) for word in words]
    kept: list[str] = []
    left = iter(words[1 + next(at for at, word in enumerate(words) if word.endswith("stagec/__main__.py")) :])
    for word in left:
        if word in ("--declared", "--profile"):
            next(left)
        elif not re.match("@|--import-root=bazel-out", word):
            kept.append(re.sub("=(//models:|//)", "=", word) if word.startswith(("--label", "--series")) else word)
    return tuple(kept)


@pytest.mark.pinned
def test_command_lines_without_bazel_are_those_of_bazel(
    built: Workspace, without_bazel: Callable[..., dict[str, Any]]
) -> None:
    """rules/private/*.bzl and local/actions.py say the same twice, because Bazel does not run Python."""
    names = ("StagecExport", "StagecCompile", "StagecGolden", "StagecImports", "StagecBundle")
    query = " union ".join(f'mnemonic("{name}", deps(//models:models))' for name in names)
    done = built.run("aquery", query, "--output=jsonproto", "--include_param_files")
    assert done.returncode == 0, done.stderr
    bazels = {words_of(action) for action in json.loads(done.stdout)["actions"] if action["mnemonic"] in names}
    # Bazel has the weights as a file that it made. Functions with `function_deps` have a list of sources of their own.
    bazels = {
        tuple(word.replace("stagec-out/models/affine.s", "models/affine.s") for word in words) for words in bazels
    }
    actions = without_bazel("--dry-run")["actions"]
    own = {(*one["command"].split(), *one["arguments"]) for one in actions}
    alone = {
        words for words in bazels | own if any(f"stagec-out/models/models.{name}.spec.json" in words for name in OWN)
    }
    assert {*(words[1] for words in bazels)} == {"export", "compile", "golden", "imports", "bundle"}
    imports = {words for words in bazels | own if words[1] == "imports"}
    assert own - alone - imports == bazels - alone - imports
    (of_bazel,), (ours,) = imports & bazels, imports & own
    assert set(of_bazel) < set(ours)  # which has those functions too


# Signing fetches what signs: it comes after the test that nothing else does.
@pytest.mark.pinned
def test_a_bundle_is_signed_and_verified(built: Workspace) -> None:
    private, public = write_keys(built.root, "release")
    done = built.run("run", "//models:models.sign", "--", "--key", private.name)
    assert done.returncode == 0, done.stderr
    words = ("verify", "bazel-bin/models/models.aot", "--key", public, "--signature", "models.aot.dsse.json")
    done = command(*words, "--json", cwd=built.root)
    assert [one["ok"] for one in json.loads(done.stdout)["checks"]] == [True, True, True], done.stderr


# As for signing, it fetches what no other test needs.
@pytest.mark.pinned
def test_a_bundle_is_served(built: Workspace) -> None:
    done = built.run("build", "//models:models.serve")
    assert done.returncode == 0, done.stderr
    program = built.root / "bazel-bin" / "models" / "models.serve"
    options = ["--port", "0", "--grpc-port", "0", "--drain", "0"]
    with subprocess.Popen([program, *options], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        told = list(itertools.takewhile(lambda line: not line.startswith("listening on http"), server.stdout))
        server.terminate()
    assert server.returncode == 0
    assert told[-1].startswith("listening on grpc://127.0.0.1:")
    assert any(line.startswith("gelu") for line in told), told


def test_a_lock_of_ones_own_for_other_hardware(built: Workspace) -> None:
    lock, tpu_lock = '(lock = "//:requirements.lock"', ', tpu_lock = "//:tools.lock"'
    with (
        built.broken("WORKSPACE", lock, lock + tpu_lock),
        built.broken("MODULE.bazel", lock, lock + tpu_lock),
        for_a_tpu(built),
    ):
        said = built.refusal("//models:models.gelu.v5e-2x2")
        assert "the plugin that compiles for tpu is not installed: libtpu" in said
