"""The bundle that the tests of serving have, built once for all."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import stagec
from stagec_serve import server
from stagec_serve.model import Model
from tests.building import build


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of compiler/extensions/serve/tests/served/served.toml."""
    folder = tmp_path_factory.mktemp("served")
    source, out = folder / "source", folder / "out"
    shutil.copytree(Path(__file__).parent / "served", source)
    draw = np.random.default_rng(0).standard_normal
    shapes = {"w1": (16, 24), "b1": (24,), "w2": (24, 5)}
    save_file({name: draw(shape).astype(np.float32) for name, shape in shapes.items()}, source / "weights.safetensors")
    out.mkdir()
    return build("served.toml", out, source)


@pytest.fixture(scope="session")
def bundle(served: Path) -> Iterator[stagec.Bundle]:
    with stagec.load(served, policy="executable_only") as loaded:
        yield loaded


@pytest.fixture(scope="session")
def models(bundle: stagec.Bundle) -> dict[str, Model]:
    """The models of the bundle that can be served."""
    return server.models_of(bundle, "batch")[0]
