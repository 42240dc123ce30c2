"""What several test modules use."""

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


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder that a model may write to when a worker exports it; pytest's own folders may lie elsewhere than /tmp."""
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
