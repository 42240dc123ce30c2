"""Functions of arrays over a mesh: shardings, collectives and their derivatives, on four CPU devices, against JAX.

Modules: `stagec_arrays/meshes.py`, `stagec_arrays/namespace/parallel.py`, `stagec_arrays/primitives/collectives.py`,
`stagec_arrays/primitives/sharding.py`.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stagec
import stagec_arrays
import stagec_arrays.lax
import stagec_arrays.numpy as xp
from compiler.extensions.arrays.tests import split
from compiler.extensions.arrays.tests.library import stagecs
from stagec import Mesh, NamedSharding, PartitionSpec as P
from tests.building import ROOT

MESH = Mesh(split.SIZES, split.AXES)
OURS = stagecs()


def sharding(*axes: Any) -> NamedSharding:
    return NamedSharding(MESH, P(*axes))


def wrapped(name: str) -> Any:
    function, _ = split.FUNCTIONS[name]
    return stagec.jit(lambda *args: function(OURS, *args), frontend="arrays", **split.shardings(name, sharding))


def test_values_gradients_and_artifacts_are_jaxs(tmp_path: Path) -> None:
    with stagec_arrays.set_mesh(MESH):
        for name, (_, args) in split.FUNCTIONS.items():
            function = wrapped(name)
            exported = function.trace(*args).export(("cpu", "tpu") if name == "dense" else ("cpu",))
            assert exported.nr_devices == 4
            (tmp_path / f"{name}.exported").write_bytes(exported.serialize(vjp_order=int(name != "collectives")))
            np.savez(tmp_path / f"{name}.npz", *map(np.asarray, jax.tree.leaves(function(*args))))
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "compiler.extensions.arrays.tests.split", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **flags}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{name}: equal" for name in split.FUNCTIONS]


HERE = r"test_split\.py:\d+"


def failing(function: Callable[[Any], Any], **options: Any) -> Any:
    return stagec.jit(function, frontend="arrays", **options).trace(np.ones((4, 3), np.float32))


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (lambda x: x, {"in_shardings": sharding(None, "data")}, r"1 of shape \(4, 3\) does not have 2 equal parts"),
        (lambda x: x, {"in_shardings": sharding("date")}, r"the mesh has no axis 'date'; did you mean \"data\""),
        (lambda x: x, {"in_shardings": sharding("data", "data")}, "an axis is used twice"),
        (lambda x: x, {"in_shardings": (sharding(), None)}, "has other parts than they have"),
        (lambda x: x, {"out_shardings": P("data")}, r"P\(data\) has no mesh: write NamedSharding"),
        (lambda x: x, {"out_shardings": 3}, "3 is not a PartitionSpec"),
        (lambda x: stagec_arrays.lax.psum(x, "data"), {}, "'data' is not an axis .* it is called outside shard_map"),
        (stagec_arrays.shard_map(xp.exp, in_specs=P(), out_specs=P()), {}, "shard_map has no mesh"),
        (
            stagec_arrays.shard_map(lambda a: stagec_arrays.lax.psum(a, "x"), mesh=MESH, in_specs=P(), out_specs=P()),
            {},
            "'x' is not an axis",
        ),
        (
            lambda x: stagec.jit(lambda y: y, frontend="arrays", in_shardings=sharding("data"))(x[1:]),
            {},
            rf"{HERE}: dimension 0 of shape \(3, 3\) does not have 2 equal parts",
        ),
        (
            stagec_arrays.shard_map(
                lambda a: stagec_arrays.lax.with_sharding_constraint(a, P("data")),
                mesh=MESH,
                in_specs=P(),
                out_specs=P(),
            ),
            {},
            rf"{HERE}: shard_map splits arrays along 'data' here, so a constraint cannot name it",
        ),
        (
            lambda x: stagec_arrays.lax.with_sharding_constraint(x, NamedSharding(Mesh((2,), ("data",)), P("data"))),
            {"in_shardings": sharding("data")},
            "a function is for one mesh, not",
        ),
    ],
)
def test_what_does_not_fit_says_so(function: Callable[[Any], Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError, NameError), match=message):
        failing(function, **options)


def test_outside_of_a_trace_there_is_one_device() -> None:
    x = np.ones((4, 2), np.float32)
    found = stagec_arrays.lax.with_sharding_constraint({"a": x}, sharding("data"))
    np.testing.assert_array_equal(np.asarray(found["a"]), x)
    with pytest.raises(ValueError, match="shard_map runs on the devices of a mesh: call it in a function of"):
        stagec_arrays.shard_map(lambda a: a, mesh=MESH, in_specs=P("data"), out_specs=P("data"))(x)


def test_sizes_may_be_symbolic_but_those_that_are_taken_apart() -> None:
    def split_up(x: Any) -> Any:
        return stagec_arrays.shard_map(lambda a: a * 2, mesh=MESH, in_specs=P("data"), out_specs=P("data"))(x)

    struct = stagec_arrays.ShapeDtypeStruct(stagec_arrays.symbolic_shape("2*n, 4"), xp.float32)
    message = (
        rf"{HERE}: shard_map takes arrays of known sizes, not of shape \(2\*n, 4\); write numbers, or in_shardings"
    )
    with pytest.raises(ValueError, match=message):
        stagec.jit(split_up, frontend="arrays").trace(struct)
    exported = stagec.jit(lambda x: x @ x.mT, frontend="arrays", in_shardings=sharding("data")).trace(struct).export()
    x = np.arange(24, dtype=np.float32).reshape(6, 4)
    np.testing.assert_allclose(exported.call(x), x @ x.T)


def test_some_axes_are_taken_apart() -> None:
    @stagec_arrays.shard_map(mesh=MESH, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
    def part(a: Any) -> Any:
        assert stagec_arrays.lax.axis_size("data") == 2
        return stagec_arrays.lax.psum(xp.sum(a), "data") + a

    x = np.arange(24, dtype=np.float32).reshape(6, 4)
    np.testing.assert_allclose(np.asarray(stagec.jit(part, frontend="arrays")(x)), x + x.sum())


def test_updates_of_slices_stay_on_their_devices() -> None:
    """As scatters of single elements they gathered the whole array."""

    def update(x: Any) -> Any:
        x = x.at[:, 1:3].set(0.0)
        return x.at[..., ::2].add(1.0).at[:, -1].multiply(2.0)

    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    split_up = {"in_shardings": sharding("data"), "out_shardings": sharding("data")}
    function = stagec.jit(update, frontend="arrays", **split_up)
    assert "all-gather" not in function.lower(x).compile().as_text()
    np.testing.assert_array_equal(np.asarray(function(x)), update(jnp.asarray(x)))


COMPILE = """
import sys
from pathlib import Path
from stagec.stages.exported import Exported
from stagec.stages.lowering import lower_exported
for name in sys.argv[1:]:
    exported = Exported.deserialize(Path(name).read_bytes())
    program = lower_exported(exported, "cpu", {}).compile().as_text()
    print("lapack_" in program, "all-gather" in program, "jax" in sys.modules)
"""


def test_a_batch_of_matrices_is_not_gathered(tmp_path: Path) -> None:
    """Each device factorizes its own: the calls of LAPACK have the rules that JAX writes, and XLA knows them."""

    def factors(n: Any, x: Any) -> Any:
        positive = x @ x.mT + n.eye(3, dtype=x.dtype)
        return n.linalg.cholesky(positive), tuple(n.linalg.eigh(positive)), n.linalg.solve(positive, x)

    x = np.random.default_rng(0).normal(size=(2, 4, 3, 3)).astype(np.float32)
    split_up = {"in_shardings": sharding("data", "model")}
    wanted = jax.jit(lambda x: factors(jnp, x))
    ours = stagec.jit(lambda x: factors(xp, x), frontend="arrays", **split_up)
    both = {"ours": ours, "theirs": stagec.jit(wanted.__wrapped__, **split_up)}
    for name, function in both.items():
        (tmp_path / name).write_bytes(function.trace(x).export().serialize())
    # Where JAX is imported, it is JAX that tells XLA of these calls.
    command = [sys.executable, "-c", COMPILE, *(str(tmp_path / name) for name in both)]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True, text=True
    )
    assert done.stdout == "True False False\n" * 2, done.stderr
    rule = re.compile(r"sdy.sharding_rule = (#sdy.op_sharding_rule<.*?>)")
    assert rule.findall(ours.lower(x).as_text()) == rule.findall(wanted.lower(x).as_text())
    assert not rule.findall(stagec.jit(ours.__wrapped__, frontend="arrays").lower(x).as_text())
    for a, b in zip(jax.tree.leaves(ours(x)), jax.tree.leaves(wanted(x)), strict=True):
        np.testing.assert_allclose(np.asarray(a), b, 1e-4, 1e-4)
