"""A process that does the actions of a series, one after the other, in a worker that is asked as Bazel asks it.

Modules: `worker/action.py`, `worker/outputs.py`, `worker/server.py`, `worker/template.py`.
"""

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from stagec.worker import outputs
from tests.building import checked, write_specs
from tests.users import needs_isolation, where
from tests.worker.bazel import FUNCTIONS, MODEL, Worker

MANIFEST = """
[manifest]
name = "m"
version = "1"
[targets.cpu]
platform = "cpu"
isa = "AVX2"
parallelism = 2
[functions.choice]
entry = "models.f:choice"
args = ["f32[64]"]
targets = ["cpu"]
[functions.evil]
entry = "models.evil:f"
args = ["f32[4]"]
platforms = ["cpu"]
[functions.worse]
entry = "models.worse:f"
args = ["f32[4]"]
platforms = ["cpu"]
"""
CHOICE = """
def choice(x):
    grown = lambda: jax.lax.while_loop(lambda c: c.max() < 9, jnp.cosh, x)
    return jax.lax.cond(x.sum() > 0, grown, lambda: jnp.sort(x))
"""
EXECUTABLES = {"m.solve.cpu": "m.solve", "m.loop.cpu.n2": "m.loop", "m.choice.cpu": "m.choice"}
WAYS = ("namespaces", "Landlock")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository, planned, with exported functions in `bazel-out`, and their executables in `alone`."""
    root = tmp_path_factory.mktemp("root")
    (root / "models").mkdir()
    (root / "bazel-out").mkdir()
    (root / "models" / "m.toml").write_text(MANIFEST + FUNCTIONS)
    (root / "models" / "f.py").write_text(MODEL + CHOICE)
    (root / "models" / "evil.py").touch()
    (root / "models" / "worse.py").touch()
    write_specs("models/m.toml", root, root / "bazel-out")
    for exported in EXECUTABLES.values():
        words = ["--output", f"bazel-out/{exported}.exported", "--description", f"bazel-out/{exported}.exported.json"]
        checked("action", "export", *words, "--spec", f"bazel-out/{exported}.spec", "--import-root", ".", cwd=root)
    for name in EXECUTABLES:
        checked("action", "compile", *compiling(name, "alone"), cwd=root)
    return root


@pytest.fixture(scope="module", params=WAYS)
def _compiling(root: Path, request: pytest.FixtureRequest) -> Iterator[Worker]:
    yield from started("action compile", root, request.param)


@pytest.fixture(scope="module", params=WAYS)
def _exporting(root: Path, request: pytest.FixtureRequest) -> Iterator[Worker]:
    yield from started("action export", root, request.param)


def started(command: str, root: Path, way: str) -> Iterator[Worker]:
    """Yield a worker, which many tests have: to start it takes 1 s, most of it to import JAX."""
    needs_isolation(way=way)
    with Worker(command, root, before=where(way)) as worker:
        yield worker


@pytest.fixture
def compiling_worker(_compiling: Worker) -> Worker:
    return without_forks(_compiling)


@pytest.fixture
def exporting_worker(_exporting: Worker) -> Worker:
    return without_forks(_exporting)


def without_forks(worker: Worker) -> Worker:
    """Kill the processes that do the series of the test before."""
    while left := forks(worker):
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.01)
    return worker


def compiling(name: str, out: str) -> list[str]:
    files = {"output": "xla", "description": "json", "module": "mlirbc", "inventory": "inventory.json"}
    words = [word for option, end in files.items() for word in (f"--{option}", f"{out}/{name}.{end}")]
    return [*words, "--spec", f"bazel-out/{name}.spec", "--exported", f"bazel-out/{EXECUTABLES[name]}.exported"]


def compile_(worker: Worker, name: str, series: Sequence[str] = ("--series=m cpu",)) -> tuple[int, str]:
    inputs = [f"bazel-out/{name}.spec", f"bazel-out/{EXECUTABLES[name]}.exported"]
    return worker.ask([*compiling(name, "bazel-out/out"), *series], inputs)


def evil(worker: Worker, root: Path, source: str, name: str = "evil") -> tuple[int, str]:
    """Export a function whose module does this first, in a process of a series. A build never does that."""
    module, spec = f"models/{name}.py", f"bazel-out/m.{name}.spec"
    (root / module).write_text(f"import os, threading, time\n{source}\ndef f(x):\n    return x\n")
    words = ["--output", "bazel-out/evil", "--description", "bazel-out/evil.json", "--import-root", "."]
    words += ["--spec", spec, "--source", module, "--unread", "bazel-out/evil.unread"]
    return worker.ask([*words, "--series=evil"], [module, spec])


def forks(worker: Worker) -> set[int]:
    """The forks of a worker's template that there are."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            command, parent = (stat.parent / "cmdline").read_bytes(), stat.read_text().rpartition(")")[2].split()[1]
        except OSError:  # it has ended
            continue
        parents[int(stat.parent.name)] = int(parent), b"--worker_template" in command

    def is_below(process: int) -> bool:
        return process == worker.process.pid or (process in parents and is_below(parents[process][0]))

    forked = {process for process, (parent, of) in parents.items() if of and parents.get(parent, (0, False))[1]}
    return {process for process in forked if is_below(process)}


def test_one_process_compiles_a_series_to_the_same_bytes(compiling_worker: Worker, root: Path) -> None:
    processes = set()
    for name in [*EXECUTABLES, *reversed(EXECUTABLES), "m.loop.cpu.n2"]:
        assert compile_(compiling_worker, name) == (0, "")
        processes |= forks(compiling_worker)
        for path in sorted((root / "alone").glob(f"{name}.*")):
            assert (root / "bazel-out" / "out" / path.name).read_bytes() == path.read_bytes(), path.name
    assert len(processes) == 1


def test_without_a_series_no_process_stays(compiling_worker: Worker) -> None:
    assert compile_(compiling_worker, "m.solve.cpu", ()) == (0, "")
    assert forks(compiling_worker) == set()


def test_another_series_has_another_process(compiling_worker: Worker) -> None:
    processes = []
    for series in ("m cpu", "m other", "m cpu"):
        assert compile_(compiling_worker, "m.solve.cpu", (f"--series={series}",)) == (0, "")
        processes += forks(compiling_worker)
    assert len(processes) == len(set(processes)) == 3


def test_a_process_that_nobody_needs_ends(compiling_worker: Worker) -> None:
    assert compile_(compiling_worker, "m.solve.cpu") == (0, "")
    assert len(forks(compiling_worker)) == 1
    until = time.monotonic() + 30
    while forks(compiling_worker):
        assert time.monotonic() < until
        time.sleep(0.2)
    assert compile_(compiling_worker, "m.solve.cpu") == (0, "")


def test_a_process_that_is_killed_is_replaced(compiling_worker: Worker) -> None:
    assert compile_(compiling_worker, "m.solve.cpu") == (0, "")
    (process,) = forks(compiling_worker)
    os.kill(process, signal.SIGKILL)
    assert compile_(compiling_worker, "m.loop.cpu.n2") == (0, "")
    assert forks(compiling_worker).isdisjoint({process})


def test_a_process_does_nothing_after_a_mistake(compiling_worker: Worker, root: Path) -> None:
    assert compile_(compiling_worker, "m.solve.cpu") == (0, "")
    exported = root / "bazel-out" / "m.loop.exported"
    content = exported.read_bytes()
    try:
        exported.write_bytes(b"damaged")
        status, said = compile_(compiling_worker, "m.loop.cpu.n2")
    finally:
        exported.write_bytes(content)
    assert status == 2
    assert said.startswith("models/m.toml: functions.loop: ")
    assert forks(compiling_worker) == set()
    assert compile_(compiling_worker, "m.loop.cpu.n2") == (0, "")


def test_large_inputs_and_folders_are_not_copied(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"12345")
    (tmp_path / "large").write_bytes(b"123456")
    small, large = str(tmp_path / "small"), str(tmp_path / "large")
    assert outputs.contents([small], 5) == {small: b"12345"}
    assert outputs.contents([large], 5) is None
    assert outputs.contents([small, large], 10) is None
    assert outputs.contents([small, str(tmp_path)], 1 << 20) is None


def test_what_an_action_leaves_is_gone(exporting_worker: Worker, root: Path) -> None:
    shows = "print(sorted(os.listdir()))\n"
    leaves = "os.makedirs('left/behind')\nopen('left/behind/file', 'w').close()\nos.symlink('left', 'link')"
    there = "['bazel-out', 'models']\n"
    assert evil(exporting_worker, root, shows + leaves) == (0, there)
    first = forks(exporting_worker)
    assert evil(exporting_worker, root, shows, "worse") == (0, there)
    assert forks(exporting_worker) == first


def test_an_action_that_dies_of_earlier_ones_is_done_again(exporting_worker: Worker, root: Path) -> None:
    dies = "import sys\nif 'models.evil' in sys.modules:\n    os.kill(os.getpid(), 11)"
    assert evil(exporting_worker, root, "") == (0, "")
    assert evil(exporting_worker, root, dies, "worse") == (0, "")


def test_an_action_that_dies_of_itself_is_told(exporting_worker: Worker, root: Path) -> None:
    assert evil(exporting_worker, root, "") == (0, "")
    status, said = evil(exporting_worker, root, "os.kill(os.getpid(), 11)", "worse")
    assert status == 1
    assert "stagec: the process of this action died of SIGSEGV" in said


SWAPS = """
def swap():
    while True:
        for path in ("bazel-out/evil", "bazel-out/evil.json"):
            try:
                os.symlink("{secret}", path + ".link")
                os.replace(path + ".link", path)
            except OSError:
                pass
threading.Thread(target=swap, daemon=True).start()
"""


def test_a_process_that_is_alive_hands_over_no_file_of_others(exporting_worker: Worker, root: Path) -> None:
    secret = root / "secret"
    secret.write_text("secret")
    for _ in range(5):
        status, said = evil(exporting_worker, root, SWAPS.format(secret=secret))
        assert status == 0 or "cannot be taken from the action" in said or "cannot be written" in said
        for name in ("evil", "evil.json"):
            taken = root / "bazel-out" / name
            assert not taken.is_symlink()
            assert not taken.exists() or taken.read_bytes() != b"secret"
    assert secret.read_text() == "secret"


GROWS = """
def grow():
    while True:
        try:
            with open("bazel-out/evil", "ab") as file:
                for _ in range(1 << 14):
                    file.write(bytes(1 << 16))
                    print("x" * (1 << 12))
        except OSError:
            pass
threading.Thread(target=grow, daemon=True).start()
"""


def test_a_process_that_goes_on_does_not_keep_the_worker_waiting(exporting_worker: Worker, root: Path) -> None:
    assert evil(exporting_worker, root, GROWS)[0] in (0, 1)
    assert evil(exporting_worker, root, "", "worse")[0] in (0, 1)


SPEAKS = """
import socket, stat
open_ = [fd for fd in range(3, 256) if os.path.exists(f"/proc/self/fd/{fd}")]
(report,) = [fd for fd in open_ if stat.S_ISSOCK(os.fstat(fd).st_mode)]
for _ in range(20):
    os.write(report, WORD)
"""


WORDS = (b'{"status": 0}', b"[]", b'{"status": "0", "memory": []}', b"\\xff" * 9, b"[" * 50_000)


def test_its_reports_make_only_its_own_actions_wrong(exporting_worker: Worker, root: Path) -> None:
    for word, name in itertools.product(WORDS, ("evil", "worse")):
        status, said = evil(exporting_worker, root, SPEAKS.replace("WORD", repr(word)), name)
        assert status in (0, 1), said
    inputs = ["models/f.py", "bazel-out/m.solve.spec"]
    words = ["--output", "bazel-out/fair", "--description", "bazel-out/fair.json", "--import-root", "."]
    assert exporting_worker.ask([*words, "--spec", "bazel-out/m.solve.spec"], inputs) == (0, "")
    assert (root / "bazel-out" / "fair").read_bytes() == (root / "bazel-out" / "m.solve.exported").read_bytes()
