"""Functions as Equinox has them, with fields of modules that are not arrays: built, and called with and without it."""

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import equinox as eqx
import jax
import numpy as np
import pytest

import stagec
from tests.building import COMPILER, build, stagec as command, write_specs

MODEL = """
import equinox as eqx
import jax

class Scaled(eqx.Module):
    mlp: eqx.nn.MLP
    by: float
    name: str

def make(by=2.0):
    return Scaled(eqx.nn.MLP(3, 2, 4, 1, jax.nn.gelu, key=jax.random.key(0)), by, "scaled")

@eqx.filter_jit
def step(model, x):
    return jax.tree.map(lambda leaf: leaf * model.by if eqx.is_array(leaf) else leaf, model), model.mlp(x)

@eqx.filter_jit
def init(words):
    return eqx.nn.MLP(3, 2, 4, 1, jax.nn.gelu, jax.nn.tanh, key=jax.random.wrap_key_data(words))

def avals():
    return eqx.filter_eval_shape(make), jax.ShapeDtypeStruct((3,), "float32")

def outside():
    return make().name, jax.ShapeDtypeStruct((3,), "float32")
"""
MANIFEST = """
[manifest]
name = "m"
version = "1"
[functions.step]
entry = "filtered_model:step"
avals = "filtered_model:avals"
targets = ["cpu-avx2"]
[functions.init]
entry = "filtered_model:init"
args = ["u32[2]"]
targets = ["cpu-avx2"]
"""
WORDS, X = np.array([0, 7], np.uint32), np.arange(3, dtype=np.float32)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("filtering")
    (root / "filtered_model.py").write_text(MODEL)
    (root / "m.toml").write_text(MANIFEST)
    return build("m.toml", tmp_path_factory.mktemp("built"), root)


@pytest.fixture
def model(built: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> object:
    folder = next(path.parent for path in tmp_path_factory.getbasetemp().glob("filtering*/m.toml"))
    monkeypatch.syspath_prepend(folder)
    return __import__("filtered_model")


def test_fields_that_are_no_arrays_come_back(built: Path, model: object) -> None:
    given = model.make()  # type: ignore[attr-defined]
    result, y = stagec.load(built)["step"](given, X)
    expected, other = model.step(given, X)  # type: ignore[attr-defined]
    assert jax.tree.structure(result) == jax.tree.structure(expected)
    assert (result.by, result.name, result.mlp.activation) == (2.0, "scaled", given.mlp.activation)
    same = jax.tree.map(np.allclose, eqx.filter(result, eqx.is_array_like), eqx.filter(expected, eqx.is_array_like))
    assert jax.tree.all(same)
    np.testing.assert_allclose(y, other, rtol=1e-6)


def test_a_result_has_functions_that_no_argument_had(built: Path) -> None:
    made = stagec.load(built)["init"](WORDS)
    assert type(made) is eqx.nn.MLP
    assert made.activation is jax.nn.gelu


def test_another_value_is_refused(built: Path, model: object) -> None:
    step = stagec.load(built)["step"]
    for given in (3.0, 2, True, 3.0):
        with pytest.raises(stagec.CallError, match=rf"step: model.by: its static part is {given}, it was 2.0 when the"):
            step(model.make(given), X)  # type: ignore[attr-defined]
        step(model.make(), X)  # type: ignore[attr-defined]  # what was right once is remembered


def test_without_equinox_they_are_left_out(built: Path) -> None:
    script = """
    import sys
    sys.modules["jax"] = None
    import numpy as np
    import stagec
    bundle = stagec.load(sys.argv[1])
    mlp = bundle["init"](np.array([0, 7], np.uint32))
    print(sorted(mlp), sorted(mlp["layers"][0]))
    result, y = bundle["step"]({"mlp": mlp}, np.arange(3, dtype=np.float32))
    print(sorted(result), y.shape)
    """
    path = [str(COMPILER), *(entry for entry in sys.path if entry.endswith("site-packages"))]
    done = subprocess.run(
        [sys.executable, "-B", "-s", "-c", dedent(script), built],
        env={"PYTHONPATH": ":".join(path)},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "['layers'] ['bias', 'weight']\n['mlp'] (2,)\n", done.stderr


def test_what_is_in_no_object_stays_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "filtered_model.py").write_text(MODEL)
    (tmp_path / "m.toml").write_text(MANIFEST.replace("filtered_model:avals", "filtered_model:outside"))
    write_specs("m.toml", tmp_path, tmp_path)
    outputs = ["--output", tmp_path / "x", "--description", tmp_path / "y", "--lowered", tmp_path / "z"]
    done = command(
        "action", "export", "--spec", tmp_path / "m.step.spec", *outputs, "--import-root", tmp_path, cwd=tmp_path
    )
    assert "filtered_model:outside returned leaves that are not avals: [0] is a str\n" in done.stderr
