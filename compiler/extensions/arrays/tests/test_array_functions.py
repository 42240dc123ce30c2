"""A function of `stagec_arrays.numpy` by a manifest: exported by the command, in a process that cannot import JAX.

Modules: `stagec_arrays/frontend/shardings.py`, `stagec_arrays/frontend/export.py`, `frontends/common/frontend.py`.
"""

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import stagec
from stagec.core.builds.specs import FunctionSpec, to_json
from stagec.core.messages.errors import StagecError
from stagec.manifest.load import load_manifest
from stagec.manifest.planning import plan
from stagec.stages.exported import Exported
from tests.building import action_environment, stagec as command
from tests.frontends.workspace import spec

MODEL = '''"""A model."""
import stagec
import stagec_arrays.lax as lax
import stagec_arrays.numpy as np
from stagec_arrays import random


def scaled(x, by=1.0):
    return {"y": np.tanh(x) * by}


def drawn(key, x):
    first, second = random.split(key)
    return second, random.normal(first, x.shape) * x


def dense(params, x):
    y = lax.with_sharding_constraint(x @ params["w"], stagec.PartitionSpec("data", "model"))
    return [y, np.sum(y)]


def layered(params, x):
    return x @ params["layer"]["w"]


def looped(x):
    from stagec_arrays import lax

    return lax.while_loop(lambda x: x[0] < 1, lambda x: x * 2, x)


def guess(x):
    if np.sum(x) > 0:
        return x
    return -x
'''


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    for name, text in {"pkg/model.py": MODEL, "jax.py": "raise ImportError('there is no JAX here')"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "out").mkdir()
    return tmp_path


def run(workspace: Path, function: FunctionSpec, *words: str, action: str = "export") -> str:
    (workspace / "f.spec").write_text(to_json(function))
    environment = {"PYTHONPATH": os.pathsep.join([str(workspace), action_environment()["PYTHONPATH"]])}
    done = command("action", action, "--spec", "f.spec", "--import-root", ".", *words, cwd=workspace, env=environment)
    return done.stderr


def test_it_is_exported_without_jax(workspace: Path) -> None:
    function = spec(entry="pkg.model:scaled", frontend="arrays", args=["f32[batch,3]"], static={"by": 2.0}, vjp_order=1)
    assert run(workspace, function, "--output", "out/f.exported", "--description", "out/f.json") == ""
    assert run(workspace, function, "--output", "out/debug.mlir", action="locations") == ""
    assert run(workspace, function, "--output", "out/f.txt", action="jaxpr") == ""
    exported = Exported.deserialize((workspace / "out/f.exported").read_bytes())
    x = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_allclose(exported.call(x)["y"], np.tanh(x) * 2, 1e-6)
    assert exported.has_vjp()
    assert "b:f32[batch,3] = tanh a" in (workspace / "out/f.txt").read_text()
    assert '"pkg/model.py":9' in (workspace / "out/debug.mlir").read_text()
    assert '"jax"' not in (workspace / "out/f.json").read_text()


def test_keys_are_arguments(workspace: Path) -> None:
    """As an artifact of JAX's has them, which stock JAX calls."""
    import jax

    function = spec(entry="pkg.model:drawn", frontend="arrays", args=["key<fry>[]", "f32[n]"], vjp_order=1)
    assert run(workspace, function, "--output", "out/f.exported", "--description", "out/f.json") == ""
    exported = jax.export.deserialize(bytearray((workspace / "out/f.exported").read_bytes()))
    assert list(map(str, exported.in_avals)) == ["key<fry>[]", "float32[n]"]
    first, second = jax.random.split(jax.random.key(3))
    key, values = exported.call(jax.random.key(3), np.full(5, 2, np.float32))
    assert key == second
    np.testing.assert_array_equal(values, jax.random.normal(first, (5,)) * 2)


def test_the_users_mistake_has_their_line(workspace: Path) -> None:
    function = spec(entry="pkg.model:guess", frontend="arrays")
    stderr = run(workspace, function, "--output", "out/f.exported")
    assert 'File "pkg/model.py", line 33, in guess' in stderr
    assert "pkg/model.py:33: Python's if, while, and, or, not or bool() needs the elements" in stderr
    assert "stagec/arrays" not in stderr


def test_what_has_no_derivative_has_the_users_line(workspace: Path) -> None:
    stderr = run(
        workspace,
        spec(entry="pkg.model:looped", frontend="arrays", args=["f32[3]"], vjp_order=1),
        "--output",
        "out/f.exported",
    )
    assert "exporting pkg.model:looped raised NoDerivative" in stderr
    assert "pkg/model.py:29: while has no derivative: how often the loop turns is not known: write scan" in stderr
    assert "Traceback" not in stderr


def test_a_manifest_names_it(tmp_path: Path) -> None:
    text = """
        [manifest]
        name = "m"
        version = "1.0.0"
        [functions.f]
        entry = "pkg.model:scaled"
        frontend = "arrays"
        args = ["f32[2]"]
        platforms = ["cpu"]
    """
    path = tmp_path / "m.toml"
    path.write_text(text)
    (export,) = plan(load_manifest(path, "m.toml")).exports
    assert export.spec.frontend == "arrays"
    path.write_text(text + 'prng_impl = "rbg"\n')
    with pytest.raises(StagecError, match="leave prng_impl out; it says how JAX traces"):
        load_manifest(path, "m.toml")


def exported(workspace: Path, function: FunctionSpec) -> Exported:
    assert run(workspace, function, "--output", "out/f.exported") == ""
    return Exported.deserialize((workspace / "out/f.exported").read_bytes())


GRID = {"mesh": [["data", 2], ["model", 2]], "entry": "pkg.model:dense", "frontend": "arrays"}


def test_shardings_of_a_manifest(workspace: Path) -> None:
    shardings = {"in_shardings": [{"w": "P(None, model)"}, "P(data)"], "out_shardings": ["P(data, model)", "P()"]}
    arguments = {"args": [{"w": "f32[4,6]"}, "f32[n,4]"], "constraints": ["n % 2 == 0"]}
    found = exported(workspace, spec(**arguments, **GRID, **shardings))
    mesh = stagec.Mesh((2, 2), ("data", "model"))
    assert found.nr_devices == 4
    assert [one and str(one.spec) for one in found.in_shardings_jax(mesh)] == ["P(None, model)", "P(data)"]
    assert [one and str(one.spec) for one in found.out_shardings_jax(mesh)] == ["P(data, model)", "P()"]
    assert "sdy.sharding_constraint" in found.mlir_module()
    params, x = {"w": np.ones((4, 6), np.float32)}, np.eye(4, dtype=np.float32)
    np.testing.assert_allclose(found.call(params, x)[0], x @ params["w"])
    wrong = spec(args=[{"w": "f32[4,6]"}, "f32[n,4]"], **GRID, in_shardings=[{"v": "P()"}, "P()"])
    said = "in_shardings[0]: v are given, but the tree has w there\n  write the same names"
    assert said in run(workspace, wrong, "--output", "out/f.exported")


def test_constraints_that_no_sizes_fulfil(workspace: Path) -> None:
    wrong = spec(args=[{"w": "f32[4,6]"}, "f32[n,4]"], **GRID, constraints=["n >= 8", "n <= 4"])
    said = 'constraints[1]: no sizes fulfil "n <= 4" and the constraints before it'
    assert said in run(workspace, wrong, "--output", "out/f.exported")


def test_a_precision_of_products(workspace: Path) -> None:
    product = {"args": [{"w": "f32[4,6]"}, "f32[2,4]"], **GRID}
    found = exported(workspace, spec(**product, matmul_precision="highest")).mlir_module()
    assert "precision = [HIGHEST, HIGHEST]" in found
    said = run(workspace, spec(**product, matmul_precision="BF16_BF16_F32_X3"), "--output", "out/f.exported")
    assert 'matmul_precision: "BF16_BF16_F32_X3" is an algorithm of products' in said


def test_avals_of_a_file(workspace: Path) -> None:
    save_file({"layer.w": np.zeros((4, 6), np.float32)}, workspace / "pkg" / "weights.safetensors")
    function = spec(
        args=["safetensors:weights.safetensors?sep=.", "f32[2,4]"], **{**GRID, "entry": "pkg.model:layered"}
    )
    assert [str(aval) for aval in exported(workspace, function).in_avals] == ["f32[4,6]", "f32[2,4]"]
    said = run(workspace, dataclasses.replace(function, entry="pkg.model:dense"), "--output", "out/f.exported")
    assert "args[0]: safetensors:weights.safetensors?sep=. gave it layer.w float32[4,6]" in said
