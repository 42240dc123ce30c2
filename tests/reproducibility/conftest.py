"""A small model that is built once for the tests of this folder."""

from pathlib import Path

import pytest

from tests.building import build

MODEL = """\
import jax.numpy as jnp


def f(w, x, *, power):
    return jnp.tanh(x @ w["k"]) ** power


def bits(x):
    return (x[::-1] << 3) | (x.reshape(4, -1).T.ravel() >> 5)
"""
MANIFEST = """\
[manifest]
name = "m"
version = "1"

[targets.cpu]
platform = "cpu"
isa = "AVX2"
parallelism = 2

[functions.f]
entry = "pkg.model:f"
args = [{ k = "f32[4,2]" }, "f32[batch,4]"]
static = { power = 2 }
targets = ["cpu"]
buckets = { batch = [3] }

[functions.bits]
entry = "pkg.model:bits"
args = ["u8[64]"]
targets = ["cpu"]
"""


def write(root: Path, model: str = MODEL, manifest: str = MANIFEST) -> Path:
    """Write the sources of the model below `root`; return the path."""
    (root / "pkg").mkdir(parents=True)
    (root / "pkg" / "model.py").write_text(model)
    (root / "m.toml").write_text(manifest)
    return root


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with all artifacts of the small model; its sources are in the folder `source` there."""
    out = tmp_path_factory.mktemp("small")
    build("m.toml", out, write(out / "source"))
    return out
