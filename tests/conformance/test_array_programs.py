"""Functions of arrays the whole way: traced, exported, compiled and bundled by the commands, loaded and called."""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import stagec
import stagec_arrays
from compiler.extensions.arrays.tests.library import Library, jaxs, stagecs
from stagec.backends.cpu import compiler as cpu
from tests.building import COMPILER, ROOT, build
from tests.conformance.array_programs import PROGRAMS, bound, manifest
from tests.conformance.members import OF_ARRAYS, Row
from tests.conformance.on_target import TARGET
from tests.conformance.programs import Program
from tests.conformance.staged import Pair, Theirs, TracedByStagec

DERIVED = [name for name, one in PROGRAMS.items() if one.derived]


@pytest.fixture(scope="module")
def differences(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a process that loads the bundle of all programs finds, by program."""
    root = tmp_path_factory.mktemp("arrays")
    (root / "arrays.toml").write_text(manifest())
    bundle = build("arrays.toml", root, root, (ROOT,))
    paths = os.pathsep.join([str(COMPILER), str(ROOT), *sys.path])  # where packages are differs: a venv, Bazel's
    devices = f"{cpu.environment(TARGET)['XLA_FLAGS']} --xla_force_host_platform_device_count=4"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", **cpu.environment(TARGET), "XLA_FLAGS": devices, "PYTHONPATH": paths}
    command = [sys.executable, "-m", "tests.conformance.array_programs", str(bundle)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_bundle_gives_what_jax_does(name: str, differences: dict[str, str]) -> None:
    assert differences[name] == ""


@pytest.fixture(scope="module")
def staged() -> Callable[[str], Pair]:
    """Each program is staged once."""

    @functools.cache
    def stage(name: str) -> Pair:
        one = PROGRAMS[name]
        ours, theirs = (Program(bound(one.function, of), one.args) for of in (stagecs(), jaxs()))
        return Pair(TracedByStagec(name, ours), Theirs(name, theirs))

    return stage


@pytest.mark.parametrize("row", OF_ARRAYS, ids=lambda row: row.name)
def test_a_member_is_as_in_jax(
    row: Row, staged: Callable[[str], Pair], record_property: Callable[[str, object], None]
) -> None:
    record_property("row", f"arrays: {row.name}")
    for name, one in PROGRAMS.items():
        if row.applies(name) and not one.mesh:
            ours, theirs = staged(name)
            assert row.view(ours) == row.view(theirs), name


def slope(of: Library, name: str, args: Any) -> Any:
    """One number of all results, in which each element has another part, and its gradient."""

    def number(*args: Any) -> Any:
        leaves = jax.tree.leaves(PROGRAMS[name].function(of, *args))
        weights = [np.cos(np.arange(leaf.size, dtype=float) + i).reshape(leaf.shape) for i, leaf in enumerate(leaves)]
        return sum(of.xp.sum(of.xp.sin(leaf) * by) for leaf, by in zip(leaves, weights, strict=True))

    return of.value_and_grad(number, tuple(range(len(args))))(*args)


@pytest.mark.parametrize("name", DERIVED)
def test_a_gradient_is_jaxs_and_that_of_finite_differences(name: str) -> None:
    rng = np.random.default_rng(0)
    with jax.enable_x64(True), stagec_arrays.enable_x64():
        args = jax.tree.map(lambda x: np.asarray(x, float), PROGRAMS[name].args)
        direction = jax.tree.map(lambda x: rng.normal(size=x.shape), args)
        ours = stagec.jit(lambda *args: slope(stagecs(), name, args), frontend="arrays")
        _, wanted = jax.jit(lambda *args: slope(jaxs(), name, args))(*args)
        _, gradient = ours(*args)
        after, before = (
            float(ours(*jax.tree.map(lambda a, b, by=by: a + by * b, args, direction))[0]) for by in (1e-6, -1e-6)
        )
    found, theirs, along = (list(map(np.asarray, jax.tree.leaves(tree))) for tree in (gradient, wanted, direction))
    for a, b in zip(found, theirs, strict=True):
        np.testing.assert_allclose(a, b, 0, 1e-10 * float(np.abs(b).max()))
    expected = sum(float(np.vdot(a, b)) for a, b in zip(found, along, strict=True))
    assert (after - before) / 2e-6 == pytest.approx(expected, rel=1e-5)
