"""Artifacts that several test modules use, built once a session."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from safetensors.numpy import save_file

from tests.building import ROOT, build

# The same examples on every machine: a build must not fail by chance.
settings.register_profile("same", derandomize=True)
settings.load_profile("same")


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of tests/zoo/zoo.toml; its other artifacts lie beside it."""
    root, out = tmp_path_factory.mktemp("zoo_source"), tmp_path_factory.mktemp("zoo")
    shutil.copytree(ROOT / "tests" / "zoo", root / "tests" / "zoo")
    weights = {"dense.kernel": np.arange(6, dtype=np.float32).reshape(3, 2), "dense.bias": np.ones(3, np.float32)}
    save_file(weights, root / "tests" / "zoo" / "weights.safetensors")
    return build("tests/zoo/zoo.toml", out, root)
