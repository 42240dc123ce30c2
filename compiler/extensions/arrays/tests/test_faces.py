"""Of arrays and namespaces what is not computing: attributes, processes without noise, copies, pickles.

Modules: `stagec_arrays/execution.py`, `stagec_arrays/namespace/array_object.py`.
"""

import copy
import os
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import stagec
import stagec_arrays.numpy as xp
from stagec_arrays import random
from stagec_arrays.tracing import TracerError
from tests.building import COMPILER


def run(code: str) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": os.pathsep.join([str(COMPILER), *sys.path]), "PATH": ""}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


def test_namespaces_are_attributes() -> None:
    """`import stagec_arrays` alone imports none of them."""
    code = "import sys, stagec_arrays; assert not any(name.startswith(('jax', 'numpy')) for name in sys.modules)"
    names = "stagec_arrays.lax.scan, stagec_arrays.nn.relu, stagec_arrays.random.key, stagec_arrays.numpy.linalg.det"
    done = run(f"{code}; {names}; assert 'lax' in dir(stagec_arrays)")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "use",
    [
        "stagec_arrays.lax.cbrt(8.0) + 1",
        "stagec_arrays.nn.relu(8.0) + 1",
        "stagec_arrays.random.key_data(stagec_arrays.random.key(0)) + 1",
        "stagec_arrays.grad(lambda x: x * 2)(1.0)",
        "stagec.jit(lambda x: x + 1, frontend='arrays')(1.0)",
    ],
)
def test_every_face_gives_arrays_their_operators(use: str) -> None:
    """In a process that imports no other."""
    done = run(f"import stagec, stagec_arrays; x = {use}; assert x.__array_namespace__() is stagec_arrays.numpy")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("use", ["stagec_arrays.numpy.ones(2) + 1", "stagec.devices()", "stagec_arrays.random.key(0)"])
def test_a_process_prints_nothing_of_its_own(use: str) -> None:
    done = run(f"import stagec, stagec_arrays; {use}")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "face",
    ["stagec_arrays", "stagec_arrays.lax", "stagec_arrays.nn", "stagec_arrays.numpy.fft", "stagec_arrays.random"],
)
def test_a_face_gives_what_it_has_and_nothing_else(face: str) -> None:
    names: dict[str, Any] = {}
    exec(f"from {face} import *", names)
    public = {name for name in names if not name.startswith("_")}
    assert {"vjp", "cond", "relu", "rfft", "split"} & public
    modules = {name for name in public if isinstance(names[name], type(sys))}
    assert modules == ({"lax", "nn", "numpy", "random"} if face == "stagec_arrays" else set())
    assert not public & {"annotations", "Any", "TYPE_CHECKING"}


def test_the_namespace_has_its_extensions() -> None:
    names: dict[str, Any] = {}
    exec("from stagec_arrays.numpy import *", names)
    modules = {name for name in names if isinstance(names[name], type(sys))}
    assert modules == {"fft", "linalg"}
    assert {"__array_api_version__", "__array_namespace_info__", "int4", "pi"} <= {*names}


def test_devices_are_a_tuple() -> None:
    """Since version 2025.12 of the standard."""
    assert type(xp.__array_namespace_info__().devices()) is tuple


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64", "int4", "bool"])
def test_arrays_are_pickled_as_numpys(dtype: str) -> None:
    x = xp.asarray(np.asarray([[0, 1], [1, 0]]), dtype=xp.asarray([0], dtype=getattr(xp, dtype)).dtype)
    for found in (pickle.loads(pickle.dumps(x)), copy.deepcopy(x), copy.copy(x)):
        assert (type(found), found.dtype) == (type(x), x.dtype)
        np.testing.assert_array_equal(np.asarray(found), np.asarray(x))
        found[0, 0] = 1
        assert not bool(x[0, 0])


def test_keys_and_device_arrays_are_pickled() -> None:
    key = pickle.loads(pickle.dumps(random.key(3)))
    assert (str(key.dtype), random.key_data(key).tolist()) == ("key<fry>", [0, 3])
    on_device = stagec.device_put(np.arange(3))
    assert pickle.loads(pickle.dumps(on_device)).numpy().tolist() == [0, 1, 2]
    assert copy.deepcopy(on_device).numpy().tolist() == [0, 1, 2]


def test_what_is_not_pickled() -> None:
    def function(x: Any) -> Any:
        return pickle.dumps(x)

    with pytest.raises(TracerError, match="pickle needs the elements of an array that is traced"):
        stagec.jit(function, frontend="arrays")(1.0)
    x = xp.ones(2)
    stagec.jit(lambda x: x + 1, frontend="arrays", donate_argnums=0)(x)
    with pytest.raises(stagec.CallError, match="was donated"):
        pickle.dumps(x)


def test_without_flatbuffers() -> None:
    code = "import sys; sys.modules['flatbuffers'] = None; import stagec; "
    calls = {
        "serialize": "stagec.jit(lambda x: x, frontend='arrays').trace(1.0).export().serialize()",
        "deserialize": "stagec.Exported.deserialize(b'')",
    }
    for name, call in calls.items():
        done = run(code + call)
        sentence = f"Exported.{name} needs the package flatbuffers, which is not installed: pip install flatbuffers"
        assert done.stderr.splitlines()[-1] == f"ModuleNotFoundError: {sentence}"


def test_stages_are_shown_on_a_line() -> None:
    """In both frontends."""
    x = np.ones((2, 3), np.float32)
    for frontend, array in (("arrays", xp), ("jax", __import__("jax").numpy)):

        def predict(x: Any, y: Any) -> Any:
            return x @ y, array.sum(x)  # noqa: B023

        traced = stagec.jit(predict, frontend=frontend).trace(x, x.T)
        assert repr(traced) == "Traced(predict(f32[2,3], f32[3,2]) -> (f32[2,2], f32[]))"
        assert repr(traced.lower()) == "Lowered(predict(f32[2,3], f32[3,2]) -> (f32[2,2], f32[]), for cpu)"
        exported = traced.export(("cpu", "tpu"))
        assert repr(exported) == "Exported(predict(f32[2,3], f32[3,2]) -> (f32[2,2], f32[]), for cpu and tpu)"
    many = stagec.jit(lambda *x: x, frontend="arrays").trace(*[1.0] * 6)
    assert "(~f32[], ~f32[], ~f32[], ~f32[], ... 2 more)" in repr(many)
