"""Models that want to do harm, built by Bazel beside somebody else's, as root and as an ordinary user.

tests/worker/test_attacks.py tries what each of them can do. Here it is seen that nothing comes of it in a build.
"""

import os
import re
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from stagec.bundle.archive import Archive
from tests.nested import NestedBazel, environment, workspace_files
from tests.users import USERS, User, as_user, needs_isolation, refusing, where

BUILD = """load("@models_manifest//:defs.bzl", "aot_manifest")

aot_manifest(
    name = "models",
    function_deps = {
        "evil": ["evil.py"],
        "good": ["good.py"],
    },
)
"""
MANIFEST = """[manifest]
name = "models"
version = "1"
reproducible = false

[functions.evil]
entry = "models.evil:f"
args = ["f32[4]"]
platforms = ["cpu"]
static = { rate = 0.5 }

[functions.good]
entry = "models.good:f"
args = ["f32[4]"]
platforms = ["cpu"]
"""
EVIL = """
import contextlib, ctypes, os, signal, stat, struct, time

def f(x, rate):
    return x * rate

def tried(action):
    with contextlib.suppress(Exception):
        action()

def plant(folder):
    with open(folder + "/planted", "w") as file:
        file.write("evil")

libc = ctypes.CDLL(None)
writable = struct.pack("4Q", 0, 1, 0, 0)
for path in ("/", "{root}", "{output_base}", "{packages}"):
    libc.syscall(442, -100, path.encode(), 0, writable, 32)  # mount_setattr
parent = f"/proc/{os.getppid()}"
for folder in ("{root}", "{root}/models", "{output_base}", "{packages}", f"{parent}/root{root}", f"{parent}/cwd"):
    tried(lambda: plant(folder))
tried(lambda: libc.setns(os.open(f"{parent}/ns/net", os.O_RDONLY), 0))

# The spec of its own, of which the bundle takes the static value.
for folder, _, names in os.walk("."):
    for name in names:
        if name.endswith(".spec.json"):
            path = os.path.join(folder, name)
            text = open(path).read()
            tried(lambda: os.unlink(path))
            tried(lambda: open(path, "w").write(text.replace("0.5", "0.25")))
            tried(lambda: os.rename(folder, folder + ".x"))
            tried(lambda: os.makedirs(folder))
            tried(lambda: open(path, "w").write(text.replace("0.5", "0.25")))

# A file where an import root may be, in the source tree.
tried(lambda: os.makedirs("lib"))
tried(lambda: plant("lib"))

# What answers for the worker when the next action comes.
pipes = [fd for fd in range(3, 256) if os.path.exists(f"/proc/self/fd/{fd}") and stat.S_ISFIFO(os.fstat(fd).st_mode)]
worker, action = os.getppid(), os.getpid()
if not os.fork():
    tried(os.setsid)
    os.chdir("/")
    if os.fork():
        os._exit(0)
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.kill(action, 0)
            time.sleep(0.02)
    time.sleep(0.2)  # what it said before would be the action's own word
    if worker:
        tried(lambda: os.kill(worker, signal.SIGSTOP))
    for fd in pipes:
        tried(lambda: os.write(fd, bytes([4, 8, 0, 18, 0])))
    libc.prctl(15, b"survivor")
    time.sleep(600)
os.wait()
"""


class Workspace(NestedBazel):
    """A workspace with a model that attacks, and the Bazel that builds it."""

    def __init__(self, folder: Path, user: User) -> None:
        super().__init__(folder, folder / "workspace", user.number)
        self.who = user
        models = self.root / "models"
        models.mkdir(parents=True)
        for path, text in {
            **{self.root / file: text for file, text in workspace_files("attacked").items()},
            self.root / ".bazelrc": "build --nosandbox_debug\n",
            models / "BUILD": BUILD,
            models / "models.toml": MANIFEST,
            models / "good.py": "def f(x):\n    return x + 1\n",
            models / "evil.py": "def f(x, rate):\n    return x * rate\n",
        }.items():
            path.write_text(text)
        packages = environment(folder / "environment", user)
        if user.number is not None:
            for path in (folder, *folder.rglob("*")):
                if not path.is_relative_to(packages / "site-packages"):
                    os.chown(path, user.number, user.number, follow_symlinks=False)
        self.options = self.with_packages(packages)
        self.output_base = Path(self.run("info", "output_base").stdout.strip())
        self.packages = packages / "site-packages"

    def build(self, *arguments: str) -> str:
        """Build the bundle; return what Bazel says."""
        done = self.run("build", "//models", *self.options, *arguments)
        assert done.returncode == 0, done.stderr
        return done.stderr

    def artifacts(self) -> dict[str, bytes]:
        """What was built."""
        folder = self.root / "bazel-bin" / "models"
        built = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix == ".exported"}
        with zipfile.ZipFile(folder / "models.aot") as bundle:
            # The description of evil has the digest of its code, and the index that of the description.
            names = {*bundle.namelist()} - {"index.json", "evil.exported.json"}
            assert "good.exported.json" in names
            return built | {f"models.aot/{name}": bundle.read(name) for name in names}


@pytest.fixture(scope="module", params=USERS)
def attacked(request: pytest.FixtureRequest) -> Iterator[Workspace]:
    with as_user(request.param) as user, tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o755)
        workspace = Workspace(Path(name), user)
        needs_isolation(user, Path(name, "stagec", "compiler"), "namespaces")
        try:
            yield workspace
        finally:
            workspace.run("shutdown")


ONE_WORKER = ("--worker_max_instances=1", "--jobs=1")


@pytest.mark.pinned(but=2)
def test_nothing_comes_of_it(attacked: Workspace) -> None:
    said = attacked.build("--strategy=StagecExport=sandboxed", "--strategy=StagecBundle=sandboxed")
    assert not re.search(r"\d worker", said)
    wanted = attacked.artifacts()
    assert "does not let" not in _nothing_comes_of_it(attacked, wanted)
    attacked.run("shutdown")
    try:
        said = _nothing_comes_of_it(attacked, wanted, where("Landlock", attacked.who))
    finally:
        attacked.run("shutdown")
    assert re.search(SAID_LESS, said)


def _nothing_comes_of_it(attacked: Workspace, wanted: dict[str, bytes], before: Sequence[str] = ()) -> str:
    """Build with the model that attacks, in workers. before: what starts Bazel's server. Returns what Bazel says."""
    names = {"root": attacked.root, "output_base": attacked.output_base, "packages": attacked.packages}
    evil = EVIL
    for name, path in names.items():
        evil = evil.replace("{" + name + "}", str(path))
    (attacked.root / "models" / "evil.py").write_text(evil)
    attacked.run("clean", before=before)
    evil_first = attacked.run("build", "//models:models.evil", *attacked.options, *ONE_WORKER)
    assert evil_first.returncode == 0, evil_first.stderr
    said = attacked.build(*ONE_WORKER)
    assert re.search(r"\d worker", said)
    assert attacked.artifacts() == wanted
    index = Archive(attacked.root / "bazel-bin" / "models" / "models.aot").index
    assert index["functions"]["evil"]["static"] == {"rate": 0.5}
    attacked.build(*ONE_WORKER)  # what stayed in the cache
    assert attacked.artifacts() == wanted
    assert [path for place in names.values() for path in place.rglob("planted")] == []
    assert not (attacked.root / "lib").exists()
    assert [path for path in Path("/proc").glob("[0-9]*/comm") if _text(path) == "survivor\n"] == []
    return evil_first.stderr + said


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


SAID = (
    "this system does not let stagec's workers isolate actions (unshare: Operation not permitted, seccomp: Operation "
    "not permitted), so each action runs in a Bazel sandbox, without a worker: docs/security.md says what a system has "
    "to allow"
)
SAID_LESS = (
    r"stagec's workers keep actions apart by other means \(unshare: Operation not permitted\), "
    r"so they have Landlock \d+ and a filter of system calls: a model can see the names of files and processes"
)


@pytest.mark.pinned
@pytest.mark.parametrize("attacked", ["ordinary user"], indirect=True)
def test_where_the_system_does_not_let_workers_isolate_there_are_none(attacked: Workspace) -> None:
    before = refusing(attacked.who, "272=1", "317=1")
    (attacked.root / "models" / "evil.py").write_text("def f(x, rate):\n    return x * rate\n")
    attacked.build()
    wanted = attacked.artifacts()
    for command in ("shutdown", "clean"):
        attacked.run(command)
    attacked.run("shutdown")
    try:
        done = attacked.run("build", "//models", *attacked.options, before=before)
        assert done.returncode == 0, done.stderr
        assert SAID in done.stderr
        assert not re.search(r"\d worker", done.stderr)
        assert attacked.artifacts() == wanted
    finally:
        attacked.run("shutdown", before=before)
    assert "does not let" not in attacked.build()  # it is asked again
