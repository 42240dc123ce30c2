"""A build reports the large arrays that a function closes over.

Modules: `frontends/common/closures.py`.
"""

import json
from pathlib import Path

import pytest

from tests.building import build, checked, stagec as command, write_specs

MANIFEST = """
[manifest]
name = "m"
version = "1"

[functions.f]
entry = "model:f"
args = ["f32[700]"]
platforms = ["cpu"]
"""
MODEL = """
import numpy as np
import ml_dtypes
import tables

SMALL = np.arange(4, dtype=np.float32)
PARAMS = {"w": [np.random.default_rng(0).standard_normal((700, 700), dtype=np.float32)]}
PHASES = np.exp(1j * np.arange(200_000)).astype(np.complex64)


def layer(x):
    return x @ PARAMS["w"][0]


def make():
    table = np.random.default_rng(1).standard_normal((1024, 512)).astype(ml_dtypes.bfloat16)

    def f(x):
        def inner(x):
            return x[0] * tables.COUNTS.sum()

        zeros = np.zeros((1000, 1000), np.float32)
        return layer(x)[:4] + SMALL, x[0] + table, inner(x), zeros + x[0], PHASES * x[0], zeros * 1j

    return f


f = make()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("constants")
    (folder / "m.toml").write_text(MANIFEST)
    (folder / "model.py").write_text(MODEL)
    (folder / "tables.py").write_text("import jax.numpy as jnp\n\nCOUNTS = jnp.arange(300_000, dtype=jnp.int32)\n")
    return folder


def test_they_are_told_with_name_place_and_size(folder: Path) -> None:
    write_specs("m.toml", folder, folder)
    done = command("action", "export", "--spec", "m.f.spec", "--output", "out", "--import-root", ".", cwd=folder)
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("m.toml")]
    assert set(told) == {
        f"m.toml: functions.f: warning: {what} is a constant of every executable"
        for what in (
            "PARAMS['w'][0] of model.py:11 (f32[700,700], 1,960,000 bytes)",
            "PHASES of model.py:18 (c64[200000], 1,600,000 bytes)",
            "table of model.py:18 (bf16[1024,512], 1,048,576 bytes)",
            "tables.COUNTS of model.py:18 (i32[300000], 1,200,000 bytes)",
        )
    }
    assert done.stderr.count('  pass it as an argument, and bind that: bind = { NAME = "weights.safetensors" }\n') == 4


def test_those_of_functions_of_arrays_too(tmp_path: Path) -> None:
    """The module's own array, and an array of stagec."""
    (tmp_path / "m.toml").write_text(MANIFEST + 'frontend = "arrays"\n')
    (tmp_path / "model.py").write_text("""
import numpy
import stagec_arrays.numpy as np

W = numpy.random.default_rng(0).standard_normal((700, 700), dtype=numpy.float32)
TABLES = {"counts": np.arange(300_000, dtype=np.int32)}

def f(x):
    return np.asarray(W) @ x, TABLES["counts"][:700] + x
""")
    write_specs("m.toml", tmp_path, tmp_path)
    done = command("action", "export", "--spec", "m.f.spec", "--output", "out", "--import-root", ".", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [line.partition("warning: ")[2] for line in done.stderr.splitlines() if line.startswith("m.toml")] == [
        "W of model.py:8 (f32[700,700], 1,960,000 bytes) is a constant of every executable",
        "TABLES['counts'] of model.py:8 (i32[300000], 1,200,000 bytes) is a constant of every executable",
    ]


def test_two_of_one_path(tmp_path: Path) -> None:
    """A class that a model registers names its children, and may name two alike."""
    (tmp_path / "m.toml").write_text(MANIFEST)
    (tmp_path / "model.py").write_text("""
import jax
import numpy as np

@jax.tree_util.register_pytree_with_keys_class
class Pair:
    def __init__(self, *arrays):
        self.arrays = arrays

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey("w"), array) for array in self.arrays], None

    @classmethod
    def tree_unflatten(cls, _, arrays):
        return cls(*arrays)

PAIR = Pair(*(np.random.default_rng(i).standard_normal((700, 700 + i), dtype=np.float32) for i in range(2)))

def f(x):
    return x @ PAIR.arrays[0], x @ PAIR.arrays[1]
""")
    write_specs("m.toml", tmp_path, tmp_path)
    done = command("action", "export", "--spec", "m.f.spec", "--output", "out", "--import-root", ".", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [line.partition("warning: ")[2] for line in done.stderr.splitlines() if line.startswith("m.toml")] == [
        "PAIR.w of model.py:19 (f32[700,700], 1,960,000 bytes) is a constant of every executable",
        "PAIR.w of model.py:19 (f32[700,701], 1,962,800 bytes) is a constant of every executable",
    ]


def test_they_are_shown_in_a_bundle(folder: Path) -> None:
    bundle = build("m.toml", folder, folder)
    assert "constant: PARAMS['w'][0] f32[700,700]  1,960,000" in checked("inspect", bundle)
    constants = json.loads(checked("inspect", bundle, "--json"))["functions"]["f"]["constants"]
    assert {"name": "table", "aval": "bf16[1024,512]", "bytes": 1048576} in constants
