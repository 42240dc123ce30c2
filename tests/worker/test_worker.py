"""A worker in a process of its own, asked as Bazel asks it.

Modules: `worker/action.py`, `worker/server.py`, `worker/template.py`, `worker/work.py`.
"""

import contextlib
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.export
import numpy as np
import orbax.checkpoint as ocp
import pytest

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
[functions.changing]
entry = "models.changing:f"
args = ["f32[4]"]
platforms = ["cpu"]
[functions.wide]
entry = "models.settings:f"
args = ["f64[]"]
platforms = ["cpu"]
enable_x64 = true
environment = { SETTING = "7" }
host_callbacks = "drop"
[functions.narrow]
entry = "models.settings:f"
args = ["f32[]"]
platforms = ["cpu"]
prng_impl = "rbg"
[functions.saved]
entry = "models.settings:first"
args = ["orbax:checkpoint?at=params"]
platforms = ["cpu"]
"""
SETTINGS = """
import os
import jax
import jax.numpy as jnp

SETTING = os.environ.get("SETTING", "none")


def f(x):
    if SETTING != "none":
        jax.debug.print("{}", x)
    return x + int(SETTING) if SETTING != "none" else x, jax.random.key_data(jax.random.key(0)), jnp.arange(3)


def first(params):
    return params["w"] + 1
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository, planned, with its specs in bazel-out."""
    root = tmp_path_factory.mktemp("root")
    (root / "models").mkdir()
    (root / "bazel-out").mkdir()
    (root / "models" / "m.toml").write_text(MANIFEST + FUNCTIONS)
    (root / "models" / "f.py").write_text(MODEL)
    (root / "models" / "settings.py").write_text(SETTINGS)
    (root / "models" / "undeclared.py").write_text("one = 1\n")
    (root / "models" / "data.txt").write_text("data")
    write_specs("models/m.toml", root, root / "bazel-out")
    return root


@pytest.fixture(scope="module", params=("namespaces", "Landlock"))
def exporting(root: Path, request: pytest.FixtureRequest) -> Iterator[Worker]:
    needs_isolation(way=request.param)
    with Worker("action export", root, before=where(request.param)) as worker:
        yield worker


def export(name: str, out: str = "bazel-out") -> list[str]:
    """The arguments with which a function is exported."""
    files = {"output": "exported", "description": "exported.json", "profile": "profile.json"}
    words = [word for option, end in files.items() for word in (f"--{option}", f"{out}/{name}.{end}")]
    return [*words, "--spec", f"bazel-out/{name}.spec", "--import-root", "."]


def compiling(name: str, exported: str, out: str = "bazel-out") -> list[str]:
    """The arguments with which it is compiled."""
    files = {"output": "xla", "description": "json"}
    words = [word for option, end in files.items() for word in (f"--{option}", f"{out}/{name}.{end}")]
    return [*words, "--spec", f"bazel-out/{name}.spec", "--exported", f"{out}/{exported}.exported"]


def ask(worker: Worker, root: Path, source: str) -> tuple[int, str]:
    """Export a function whose module has this source, of which `f` is the function."""
    (root / "models" / "changing.py").write_text(source)
    return worker.ask(export("m.changing"), ["models/changing.py", "bazel-out/m.changing.spec"])


def artifacts(out: Path) -> dict[str, bytes]:
    """What was built, but for the profiles."""
    return {
        path.name: path.read_bytes()
        for path in sorted(out.iterdir())
        if not path.name.endswith((".spec", ".profile.json"))
    }


@pytest.mark.parametrize("way", ["namespaces", "Landlock"])
def test_the_bytes_are_those_of_processes_of_their_own(root: Path, way: str) -> None:
    needs_isolation(way=way)
    before, alone = where(way), f"alone-{way}"
    pairs = [("m.solve.cpu", "m.solve"), ("m.loop.cpu.n2", "m.loop")]
    for name, exported in pairs:
        checked("action", "export", *export(exported, alone), cwd=root)
        checked("action", "compile", *compiling(name, exported, alone), cwd=root)
    wanted = artifacts(root / alone)
    assert len(wanted) == 8
    with (
        Worker("action export", root, before=before) as exporter,
        Worker("action compile", root, before=before) as compiler,
    ):
        for number in range(2):
            out = f"bazel-out/{number}"
            for name, exported in pairs:
                spec = f"bazel-out/{exported}.spec"
                assert exporter.ask(export(exported, out), ["models/f.py", spec]) == (0, "")
                inputs = [f"bazel-out/{name}.spec", f"{out}/{exported}.exported"]
                assert compiler.ask(compiling(name, exported, out), inputs) == (0, "")
            assert artifacts(root / out) == wanted
    profile = json.loads((root / out / "m.loop.profile.json").read_text())
    assert (profile["kind"], profile["command"], profile["artifact"]) == ("profile", "export", "m.loop")
    assert {"import", "trace", "lower", "export"} <= {name for name, _, _ in profile["phases"]}
    assert sum(seconds for _, _, seconds in profile["phases"]) == pytest.approx(profile["seconds"], abs=0.001)
    assert 50 << 20 < profile["max_rss"] < 1 << 30
    words = ["--name", "m", "--version", "1"]
    words += ["--export", f"m.solve:{alone}/m.solve.exported:bazel-out/m.solve.spec:{alone}/m.solve.exported.json"]
    checked("action", "bundle", *words, "--output", f"{alone}/m.aot", cwd=root)
    with Worker("action bundle", root, before=before) as bundler:
        status, told = bundler.ask([*words, "--output", "bazel-out/m.aot"])
    # The day on which JAX's promise ends may be near.
    assert (status, told.startswith("models/m.toml: warning: JAX promises ") or not told) == (0, True)
    assert (root / "bazel-out" / "m.aot").read_bytes() == (root / alone / "m.aot").read_bytes()


def test_each_function_has_its_own_settings(exporting: Worker, root: Path) -> None:
    """In whatever order one worker is asked: the variables of a request are gone with it, and so is 64 bits."""
    found: dict[str, set[bytes]] = {"m.wide": set(), "m.narrow": set()}
    for name in ("m.wide", "m.narrow", "m.wide", "m.narrow"):
        assert exporting.ask(export(name), ["models/settings.py", f"bazel-out/{name}.spec"]) == (0, "")
        found[name].add((root / "bazel-out" / f"{name}.exported").read_bytes())
    ((wide,), (narrow,)) = found.values()
    assert wide == alone(root, "m.wide")
    with jax.enable_x64(True):
        assert float(jax.export.deserialize(bytearray(wide)).call(1.0)[0]) == 8
    assert float(jax.export.deserialize(bytearray(narrow)).call(np.float32(1))[0]) == 1
    assert [(aval.dtype.name, aval.shape) for aval in jax.export.deserialize(bytearray(wide)).out_avals] == [
        ("float64", ()),
        ("uint32", (2,)),
        ("int64", (3,)),
    ]
    assert [(aval.dtype.name, aval.shape) for aval in jax.export.deserialize(bytearray(narrow)).out_avals] == [
        ("float32", ()),
        ("uint32", (4,)),
        ("int32", (3,)),
    ]


def alone(root: Path, name: str) -> bytes:
    """The artifact of a process of its own."""
    checked("action", "export", *export(name, "apart"), cwd=root)
    return (root / "apart" / f"{name}.exported").read_bytes()


def test_a_checkpoint_of_orbax_is_read(exporting: Worker, root: Path) -> None:
    """Its library opens files in threads of its own."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(
            root / "models" / "checkpoint", {"params": {"w": np.ones((2, 3), np.float16)}, "step": 1}, force=True
        )
    files = [str(path.relative_to(root)) for path in (root / "models" / "checkpoint").glob("**/*") if path.is_file()]
    assert exporting.ask(export("m.saved"), ["models/settings.py", "bazel-out/m.saved.spec", *files]) == (0, "")
    artifact = jax.export.deserialize(bytearray((root / "bazel-out" / "m.saved.exported").read_bytes()))
    assert [(aval.dtype.name, aval.shape) for aval in artifact.in_avals] == [("float16", (2, 3))]


def test_an_edited_model_is_read_again(exporting: Worker, root: Path) -> None:
    results = []
    for number in ("1", "2", "1"):
        assert ask(exporting, root, f"def f(x):\n    return x + {number}\n") == (0, "")
        results.append((root / "bazel-out" / "m.changing.exported").read_bytes())
    assert results[0] == results[2] != results[1]


def test_nothing_is_left_for_the_next_request(exporting: Worker, root: Path) -> None:
    found = """
import os, sys, jax
def f(x):
    state = (os.environ.get("LEFT"), os.umask(0o77), jax.config.jax_enable_x64, getattr(sys, "left", None))
    os.environ["LEFT"], sys.left = "1", 1
    jax.config.update("jax_enable_x64", True)
    os.chdir("/")
    raise RuntimeError(f"{state} {os.getcwd()}")
"""
    for _ in range(2):
        status, output = ask(exporting, root, found)
        assert (status, output.splitlines()[-1]) == (2, "  RuntimeError: (None, 18, False, None) /")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("from models import undeclared\ndef f(x):\n    return x\n", "ImportError: cannot import name 'undeclared'"),
        ("import models.undeclared\ndef f(x):\n    return x\n", "No module named 'models.undeclared'"),
        ("def f(x):\n    return x + len(open('models/data.txt').read())\n", "No such file or directory: 'models/data"),
        (
            "from pathlib import Path\ndef f(x):\n    return x + Path(__file__).with_name('data.txt').stat().st_size\n",
            "FileNotFoundError: [Errno 2] No such file or directory: 'models/data.txt'",
        ),
    ],
    ids=["from", "import", "open", "beside"],
)
def test_a_file_that_is_not_declared_is_not_there(exporting: Worker, root: Path, source: str, said: str) -> None:
    status, output = ask(exporting, root, source)
    assert status == 2
    assert said in output
    file = "models/undeclared.py" if "undeclared" in source else "models/data.txt"
    hint = f"{file} is not an input of this action\n  name it in deps, or in data where it is read\n"
    assert output.endswith(hint) == ("stat()" not in source)


def test_paths_in_messages_are_those_of_the_workspace(exporting: Worker, root: Path) -> None:
    source = """
import os
def f(x):
    os.chdir("/")
    return x if x.sum() > 0 else -x
"""
    status, output = ask(exporting, root, source)
    assert status == 2
    assert '    File "models/changing.py", line 5, in f\n' in output
    assert "The error occurred while tracing the function f at models/changing.py:3 for jit." in output
    assert "stagec-worker" not in output


def test_a_declared_file_is_there(exporting: Worker, root: Path) -> None:
    (root / "models" / "changing.py").write_text("def f(x):\n    return x + len(open('models/data.txt').read())\n")
    inputs = ["models/changing.py", "models/data.txt", "bazel-out/m.changing.spec"]
    assert exporting.ask(export("m.changing"), inputs) == (0, "")


DEATHS = {
    "os.kill(os.getpid(), 11)": "the process of this action died of SIGSEGV (Segmentation fault) after ",
    "os.kill(os.getpid(), 9)": "the process of this action died of SIGKILL (Killed, most likely because the machine "
    "has no memory left) after ",
    "os.kill(os.getpid(), 40)": "the process of this action died of signal 40 (Real-time signal 6) after ",
    "os._exit(0)": "the process of this action ended with exit(0) in the middle of its work after ",
}


@pytest.mark.parametrize("death", DEATHS)
def test_a_process_that_dies_takes_its_own_action_alone(exporting: Worker, root: Path, death: str) -> None:
    status, output = ask(exporting, root, f"import os\ndef f(x):\n    {death}\n")
    assert status == 1
    last = output.splitlines()[-1]
    assert last.startswith(f"stagec: {DEATHS[death]}")
    assert last.endswith(" MiB of memory")
    assert ("models/changing.py" in output) == ("11" in death)  # Python says where it was
    assert ask(exporting, root, "def f(x):\n    return x\n") == (0, "")


@pytest.mark.parametrize("way", ["namespaces", "Landlock"])
def test_packages_that_are_made_anew_are_seen(root: Path, tmp_path: Path, way: str) -> None:
    """Bazel makes a repository again as a new folder, with the same fingerprint where the same is installed."""
    needs_isolation(way=way)
    packages, source = tmp_path / "packages", "import extra\ndef f(x):\n    print(extra.number)\n    return x\n"
    with contextlib.ExitStack() as stack:
        worker: Worker | None = None
        for number in range(2):
            shutil.rmtree(packages, ignore_errors=True)
            packages.mkdir()
            (packages / "extra.py").write_text(f"number = {number}\n")
            worker = worker or stack.enter_context(Worker("action export", root, before=where(way), packages=packages))
            assert ask(worker, root, source) == (0, f"{number}\n")
            mounted = Path(f"/proc/{template_of(worker)}/mountinfo").read_text()
            assert "deleted" not in mounted
            assert ask(worker, root, source) == (0, f"{number}\n")


def template_of(worker: Worker) -> int:
    """The last process of those that a worker consists of."""
    process = worker.process.pid
    while children := Path(f"/proc/{process}/task/{process}/children").read_text().split():
        process = int(children[-1])
    return process


def test_what_the_model_prints_is_shown(exporting: Worker, root: Path) -> None:
    source = "import os\nprint('imported')\ndef f(x):\n    os.system('echo traced >&2')\n    return x\n"
    status, output = ask(exporting, root, source)
    assert (status, sorted(output.splitlines())) == (0, ["imported", "traced"])


def sleeping(seconds: int) -> list[int]:
    """The processes that sleep so long."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if path.read_bytes() == b"sleep\0%d\0" % seconds:
                found.append(int(path.parent.name))
    return found


def until(condition: Callable[[], object]) -> None:
    """Wait until it holds."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


SLEEPING = "import os, time\ndef f(x):\n    os.system('sleep 7777 &')\n    time.sleep(77)\n"


def test_work_can_be_cancelled(exporting: Worker, root: Path) -> None:
    (root / "models" / "changing.py").write_text(SLEEPING)
    exporting.send(export("m.changing"), ["models/changing.py", "bazel-out/m.changing.spec"])
    until(lambda: sleeping(7777))
    exporting.send([], cancel=1)
    response = exporting.receive()
    assert (response[3], response[4]) == (0, 1)
    assert not sleeping(7777)  # what it started is gone too
    exporting.send([], cancel=1)  # too late: there is nothing to cancel
    assert ask(exporting, root, "def f(x):\n    return x\n") == (0, "")


def test_a_mistake_in_the_arguments(exporting: Worker) -> None:
    status, output = exporting.ask(["--spec"])
    assert status == 2
    assert "stagec action export: error: argument --spec: expected one argument\n" in output


def test_a_worker_ends_with_its_bazel(root: Path) -> None:
    with Worker("action bundle", root) as worker:
        assert worker.process.stdin
        worker.process.stdin.close()
        assert worker.process.wait(timeout=30) == 0
        worker.process.stdin = None


@pytest.mark.parametrize("way", ["namespaces", "Landlock"])
def test_a_worker_that_is_killed_leaves_nothing(root: Path, way: str, tmp_path: Path) -> None:
    needs_isolation(way=way)

    def files() -> list[Path]:
        return [*sorted(root.rglob("*")), *tmp_path.iterdir()]

    (root / "models" / "changing.py").write_text(SLEEPING)
    before = files()
    elsewhere = ["env", f"TMPDIR={tmp_path}"] if way == "Landlock" else []  # with namespaces, it has no file on a disk
    with Worker("action export", root, before=[*where(way), *elsewhere]) as worker:
        worker.send(export("m.changing"), ["models/changing.py", "bazel-out/m.changing.spec"])
        until(lambda: sleeping(7777))
        assert bool([*tmp_path.iterdir()]) == (way == "Landlock")
        worker.process.kill()
        until(lambda: not sleeping(7777) and files() == before)


AT_HOME = """
import sys
from pathlib import Path
folder = Path("~/.library/cache").expanduser()
folder.mkdir(parents=True)
(folder / "fonts").write_text("one")

def f(x):
    print("at home in", Path.home(), Path("/etc/fonts").exists(), file=sys.stderr)
    return x + len((folder / "fonts").read_text())
"""
"""A library that makes a folder in the home of the user when it is imported, and asks for the machine's fonts."""


def test_a_model_has_a_home_that_is_thrown_away(exporting: Worker, root: Path) -> None:
    for _ in range(2):
        status, output = ask(exporting, root, AT_HOME)
        assert status == 0, output
        home, _, fonts = output.partition("at home in ")[2].strip().partition(" ")
        assert home.startswith("/")
        assert fonts == str(Path("/etc/fonts").exists())
        assert not Path(home, ".library").exists()


def test_an_input_that_changes_is_told(exporting: Worker, root: Path) -> None:
    (root / "models" / "changing.py").write_text("import time\ndef f(x):\n    time.sleep(2)\n    return x\n")
    exporting.send(export("m.changing", "bazel-out/told"), ["models/changing.py", "bazel-out/m.changing.spec"])
    time.sleep(0.5)
    (root / "models" / "changing.py").write_text("def f(x):\n    return x\n")
    response = exporting.receive()
    assert (response[1], response[2]) == (
        1,
        "stagec: models/changing.py changed while this action read it: build again\n",
    )
    assert not (root / "bazel-out" / "told").exists()


def test_a_package_that_changes_is_told(root: Path) -> None:
    """Of a hub's packages each file is an input, and an action gets their folder."""
    package = root / "bazel-out" / "hub" / "site-packages" / "extra.py"
    package.parent.mkdir(parents=True)
    package.write_text("number = 1\n")
    source = "import extra, time\ndef f(x):\n    time.sleep(2)\n    return x\n"
    name = str(package.relative_to(root))
    with Worker("action export", root, packages=package.parent) as worker:
        assert ask(worker, root, "def f(x):\n    return x\n") == (0, "")  # now it is started
        (root / "models" / "changing.py").write_text(source)
        worker.send(export("m.changing"), ["models/changing.py", "bazel-out/m.changing.spec", name])
        time.sleep(0.5)
        package.write_text("number = 2\n")
        response = worker.receive()
    assert (response[1], response[2]) == (1, f"stagec: {name} changed while this action read it: build again\n")


def test_a_folder_of_sources_is_not_shown_whole(root: Path) -> None:
    packages = root / "models" / "site-packages"
    packages.mkdir()
    for name in ("declared.py", "undeclared.py"):
        (packages / name).touch()
    source = "import os\ndef f(x):\n    print(os.listdir('models/site-packages'))\n    return x\n"
    (root / "models" / "changing.py").write_text(source)
    inputs = ["models/changing.py", "bazel-out/m.changing.spec", "models/site-packages/declared.py"]
    with Worker("action export", root, packages=packages) as worker:
        assert worker.ask(export("m.changing"), inputs) == (0, "['declared.py']\n")


def test_the_file_of_the_arguments_may_be_written_again(exporting: Worker, root: Path) -> None:
    """As Bazel 4 does for the sandbox, where that runs the same action in dynamic execution."""
    (root / "models" / "changing.py").write_text("import time\ndef f(x):\n    time.sleep(2)\n    return x\n")
    parameters = root / "bazel-out" / "m.changing.exported-0.params"
    parameters.write_text("--spec")
    inputs = ["models/changing.py", "bazel-out/m.changing.spec", f"bazel-out/{parameters.name}"]
    exporting.send(export("m.changing"), inputs)
    time.sleep(0.5)
    parameters.unlink()
    parameters.write_text("--spec")
    assert exporting.receive()[1] == 0


def test_what_is_printed_is_shown_up_to_a_limit(exporting: Worker, root: Path) -> None:
    source = "import sys\nfor _ in range(40):\n    print('x' * (1 << 20))\nprint('last')\ndef f(x):\n    return x\n"
    status, output = ask(exporting, root, source)
    first, *_, last = output.splitlines()
    assert (status, last) == (0, "last")
    assert re.fullmatch(r"\.\.\. 4\d,\d{3},\d{3} bytes are not shown \.\.\.", first)
    assert len(output) < 600_000
