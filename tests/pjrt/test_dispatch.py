"""Calls with numpy arrays go through jaxlib's `pjit` where that does the same, with JAX in the process and without."""

import contextlib
import gc
import itertools
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jaxlib import _jax

import stagec
from stagec.pjrt import dispatch
from tests.building import COMPILER, build_model

MANIFEST = """
[manifest]
name = "m"
version = "1"
enable_x64 = true
[functions.single]
entry = "model:f"
args = ["f32[4]", "f32[4]"]
targets = ["cpu-avx2"]
[functions.double]
entry = "model:f"
args = ["f64[4]", "f32[4]"]
targets = ["cpu-avx2"]
[functions.donating]
entry = "model:f"
args = ["f32[4]", "f32[4]"]
donate_argnums = [0]
targets = ["cpu-avx2"]
"""
MODEL = "def f(x, y):\n    return x + y, x\n"
X, Y = np.arange(4, dtype=np.float32), np.ones(4, np.float32)
FINE = np.array([1, 1, 1, 1 + 2**-40])
"""No array of 32-bit floats."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dispatch")
    return build_model(folder, MANIFEST, MODEL)


@pytest.fixture
def bundle(built: Path) -> Iterator[stagec.Bundle]:
    with stagec.load(built, policy="executable_only") as loaded:
        yield loaded


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Grows by an entry for each call that goes through `pjit`."""
    calls: list[Any] = []
    dispatching = dispatch.dispatching

    def counting(*arguments: Any) -> Any:
        found = dispatching(*arguments)
        if found is None:
            return None
        assert type(found) is _jax.PjitFunction

        def counted(*buffers: Any) -> Any:
            calls.append(found)
            return found(*buffers)

        return counted

    monkeypatch.setattr(dispatch, "dispatching", counting)
    return calls


@pytest.mark.parametrize(
    ("name", "x", "on_device", "quick"),
    [
        ("single", X, "", True),
        ("single", X, "y", True),
        ("single", X, "xy", False),  # nothing is converted
        ("double", FINE, "", False),
        ("double", FINE, "x", True),  # only what is converted counts
        ("donating", X, "", False),
    ],
)
def test_what_goes_through_pjit(
    bundle: stagec.Bundle, dispatched: list[Any], name: str, x: Any, on_device: str, quick: bool
) -> None:
    function = bundle[name]
    arguments = [stagec.device_put(value) if key in on_device else value for key, value in (("x", x), ("y", Y))]
    for called in (function, function.flat(*arguments)):
        for _ in range(3):
            total, same = called(*arguments)
            assert np.asarray(total).tobytes() == (x + Y).tobytes()
            assert np.asarray(same).tobytes() == x.tobytes()
        # The first call finds that it fits.
        assert len(dispatched) == (2 if quick else 0)
        dispatched.clear()


@pytest.mark.parametrize("setting", [jax.disable_jit, lambda: jax.enable_x64(True), lambda: jax.log_compiles(True)])
def test_settings_of_jax_change_no_results(bundle: stagec.Bundle, setting: Any) -> None:
    for name, x in (("single", X), ("double", FINE)):
        wanted = (x + Y).tobytes()
        for context in (contextlib.nullcontext, setting, contextlib.nullcontext):
            for _ in range(3):
                with context():
                    total, _ = bundle[name](x, Y)
                assert total.tobytes() == wanted
        with pytest.raises(stagec.CallError, match="has dtype"):
            bundle[name](x.astype(np.float16), Y)
    # An array of 64 bits is taken for one of 32, unless JAX says that it is what it is.
    for called in (bundle["single"], bundle["single"].flat(X, Y)) * 2:
        with jax.enable_x64(True), pytest.raises(stagec.CallError, match="x has dtype float64; expected float32"):
            called(FINE, Y)
        total, _ = called(FINE, Y)
        assert np.asarray(total).tobytes() == (FINE.astype(np.float32) + Y).tobytes()


@pytest.mark.parametrize("kinds", [*itertools.product(("alone", "beside"), repeat=4)], ids="-".join)
def test_numpy_arrays_beside_jaxs_are_looked_at(built: Path, kinds: Sequence[str]) -> None:
    """`pjit` takes bytes in another order for what they are not, and ends the process where a conversion warns.

    kinds: calls of a new function, in an order in which `pjit` may remember one.
    """
    x = jax.device_put(X)
    arguments = {"alone": (x, jax.device_put(Y)), "beside": (x, Y)}
    with stagec.load(built) as bundle:
        function = bundle["single"]
        for kind in kinds:
            assert function(*arguments[kind])[0].tolist() == (X + Y).tolist()
        with pytest.raises(stagec.CallError, match="y has dtype >f4; expected float32"):
            function(x, Y.astype(">f4"))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert function(x, np.full(4, 1e300))[0].tolist() == [np.inf] * 4


def test_arguments_without_containers_are_the_leaves(bundle: stagec.Bundle) -> None:
    function = bundle["single"]
    for make in (np.asarray, stagec.device_put):
        x, y = make(X), make(Y)
        for _ in range(3):
            assert np.asarray(function(x, y)[0]).tolist() == (X + Y).tolist()
        for wrong in ((x,), (x, y, y), ([x], y), (x, {"y": y}), (x, None)):
            with pytest.raises(stagec.CallError) as refusal:
                function(*wrong)
            assert refusal.value.code == "structure"
        with pytest.raises(stagec.CallError, match="z"):
            function(x, y, z=y)


def test_a_call_while_jax_traces_is_a_call(bundle: stagec.Bundle) -> None:
    def traced(z: jax.Array) -> jax.Array:
        results = [bundle["single"](X, Y)[0] for _ in range(3)]
        assert all(type(result) is np.ndarray for result in results)
        return z + results[-1]

    wanted = (Y + X + Y).tolist()
    assert jax.jit(traced)(Y).tolist() == wanted
    assert jax.vmap(traced)(Y[None])[0].tolist() == wanted
    assert traced(Y).tolist() == wanted


def test_an_error_of_xla_is_one_either_way(bundle: stagec.Bundle) -> None:
    function = bundle["single"]
    y = stagec.device_put(Y)
    for _ in range(2):
        function(X, y)
    bundle["donating"](y, Y)
    for called in (function, function.flat(X, Y)):
        with pytest.raises(stagec.CallError) as refusal:
            called(X, y)
        assert (refusal.value.code, "y was donated" in str(refusal.value)) == ("deleted", True)


def test_what_is_remembered_goes_with_the_bundle(built: Path) -> None:
    def executables() -> int:
        return sum(type(thing) is _jax.PjitFunction for thing in gc.get_objects())

    before = executables()
    gc.disable()
    try:
        with stagec.load(built) as bundle:
            for _ in range(2):
                bundle["single"](X, Y)
            assert executables() == before + 1
        assert executables() == before  # at once, without a collection
    finally:
        gc.enable()


IMPORTED_LATER = """
import sys
import numpy as np
import stagec

x, y = np.arange(4, dtype=np.float32), np.ones(4, np.float32)
with stagec.load(sys.argv[1]) as bundle:
    single = bundle["single"]
    for _ in range(3):
        assert single(x, y)[0].tolist() == [1, 2, 3, 4]
    assert "jax" not in sys.modules
    import jax
    double = np.arange(3.0)
    seen = []
    traced = jax.jit(lambda x: seen.append(isinstance(x, jax.core.Tracer)) or x * 2)
    assert traced(double).dtype == np.float32
    with jax.enable_x64(True):
        assert traced(double).dtype == np.float64
        assert single(x, y)[0].tolist() == [1, 2, 3, 4]
    with jax.disable_jit():
        traced(double)
        assert single(x, y)[0].tolist() == [1, 2, 3, 4]
    assert seen == [True, True, False], seen
    assert single(x, y)[0].tolist() == [1, 2, 3, 4]
    single.flat(x, y)(x, y)
"""


def test_jax_may_be_imported_later(built: Path) -> None:
    path = os.pathsep.join([*(entry for entry in sys.path if entry.endswith("site-packages")), str(COMPILER)])
    command = [sys.executable, "-B", "-s", "-c", IMPORTED_LATER, str(built)]
    done = subprocess.run(command, env={"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
