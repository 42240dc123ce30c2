"""What several test modules use."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from safetensors.numpy import save_file

from tests.building import ROOT, build

# The same examples on every machine: a build must not fail by chance.
settings.register_profile("same", derandomize=True)
settings.load_profile("same")

# JAX starts every plugin that it finds, unless this says otherwise. libtpu then makes /tmp/libtpu_lockfile, which is
# there until the process ends, and stays if somebody kills it.
os.environ.setdefault("JAX_PLATFORMS", "cpu")


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
    """The bundle of tests/zoo/zoo.toml, built once a session; its other artifacts lie beside it."""
    root, out = tmp_path_factory.mktemp("zoo_source"), tmp_path_factory.mktemp("zoo")
    shutil.copytree(ROOT / "tests" / "zoo", root / "tests" / "zoo")
    weights = {"dense.kernel": np.arange(6, dtype=np.float32).reshape(3, 2), "dense.bias": np.ones(3, np.float32)}
    save_file(weights, root / "tests" / "zoo" / "weights.safetensors")
    return build("tests/zoo/zoo.toml", out, root)
