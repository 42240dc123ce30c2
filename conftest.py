"""What several test modules use."""

import atexit
import gc
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.building import INSTALLER, ROOT, build_zoo

# The same examples on every machine, however long one takes there: a build must not fail by chance.
settings.register_profile("same", derandomize=True, deadline=None)
settings.load_profile("same")

# JAX starts every plugin that it finds, unless this says otherwise. libtpu then makes /tmp/libtpu_lockfile, which is
# there until the process ends, and stays if somebody kills it.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Threads of numpy's BLAS wait for work in a loop, in each process that imports it.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# As the command line does: Python would spend a tenth of the time of some tests on looking at what they have imported.
gc.set_threshold(50_000)
atexit.register(gc.freeze)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what one run is enough for, where STAGEC_OTHER_VERSIONS says that this is another one.

    That is what the mark "pinned" says (pyproject.toml), and of a test with more than eight cases all but each fourth.
    STAGEC_EACH_TEST=8 also leaves out seven tests of eight.
    """
    if "STAGEC_OTHER_VERSIONS" not in os.environ:
        return
    tests = [item.nodeid.partition("[")[0] for item in items]
    cases = Counter(tests)
    chosen = {*list(cases)[:: int(os.environ.get("STAGEC_EACH_TEST", "1"))]}
    seen: dict[str, dict[object, int]] = {test: {} for test in cases}
    kept, left_out = [], []
    for test, item in zip(tests, items, strict=True):
        mark = item.get_closest_marker("pinned")
        each = mark.kwargs.get("but", 0) if mark else 4 if cases[test] > 8 else 1
        case: object = item.nodeid
        if mark and "by" in mark.kwargs and isinstance(item, pytest.Function):
            case = item.callspec.params[mark.kwargs["by"]]
        number = seen[test].setdefault(case, len(seen[test]))
        (left_out if test not in chosen or not each or number % each else kept).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Remove what the tests wrote, where Bazel gave them a folder and all passed.

    Otherwise Bazel removes these folders before its next build, one by one. Tests of nested Bazels left so much that
    this took half a minute.
    """
    if exitstatus == 0 and session.config.option.basetemp:
        shutil.rmtree(session.config.option.basetemp, ignore_errors=True)


@pytest.fixture(scope="module", autouse=True)
def without_libtpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Name the module that loads libtpu into pytest's process: whatever compiles for TPUs has a process of its own."""
    before = has_libtpu()
    yield
    assert before or not has_libtpu(), f"{request.node.name} has loaded libtpu into the process of the tests"


def has_libtpu() -> bool:
    """Whether this process has loaded libtpu."""
    return "/libtpu.so" in Path("/proc/self/maps").read_text()


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder that a model sees in Bazel's sandbox; pytest's own folders may lie elsewhere than /tmp."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of tests/zoo/zoo.toml; its other artifacts lie beside it.

    In Bazel it is built once for all tests (STAGEC_ZOO names the bundle, or what zoo_archive.py wrote), elsewhere once
    a session.
    """
    folder = tmp_path_factory.mktemp("zoo")
    if "STAGEC_ZOO" not in os.environ:
        return build_zoo(folder)
    built = Path(os.environ["STAGEC_ZOO"])
    if built.suffix == ".tar":
        with tarfile.open(built) as archive:
            archive.extractall(folder, filter="data")
        return folder / "zoo.aot"
    for file in built.parent.glob("zoo.*"):
        if file.is_file():
            shutil.copy(file, folder / file.name.replace(".spec.json", ".spec"))
    return folder / built.name


@pytest.fixture(scope="session")
def uv_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """uv as stagec installs it: with pip, from its lock."""
    out = tmp_path_factory.mktemp("uv")
    lock = ROOT / "compiler" / "installer.lock"
    command = [sys.executable, "-B", "-E", str(INSTALLER), str(lock), "compiler/installer.lock"]
    subprocess.run(command, cwd=out, check=True)
    return out / "site-packages" / "bin" / "uv"
