"""Artifacts that older versions of JAX, and stagec without JAX, wrote are read and run forever."""

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")  # a program is for four devices

import jax
import jax.export
import ml_dtypes
import numpy as np
import pytest

import stagec

ARTIFACTS = sorted(Path(__file__).parent.glob("*/*.exported"))
VJP_ORDERS = {"mlp": 2, "symbolic": 1, "turns": 1, "rank": 1, "devices": 1}
OURS = [path for path in ARTIFACTS if "stagec" in path.parent.name]


def arrays(path: Path) -> list[np.ndarray[Any, Any]]:
    with np.load(path) as stored:
        return [stored[f"arr_{i}"] for i in range(len(stored.files))]


def name_of(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


def test_every_version_wrote_every_program() -> None:
    folders = {path.parent.name for path in ARTIFACTS}
    assert folders >= {"2025-11-jax-0.8.1", "2026-11-jax-0.10.1", "2026-11-stagec-0.1.0"}
    assert len(ARTIFACTS) == 9 * len(folders)


def inputs(path: Path, exported: stagec.Exported) -> list[np.ndarray[Any, Any]]:
    """The inputs of an artifact; numpy stores no bfloat16: such ones were written as float32."""
    return [
        leaf.astype(ml_dtypes.bfloat16) if aval.dtype == "bf16" else leaf
        for leaf, aval in zip(arrays(path.with_suffix(".inputs.npz")), exported.in_avals, strict=True)
    ]


@pytest.mark.parametrize("path", ARTIFACTS, ids=name_of)
def test_an_artifact_runs(path: Path) -> None:
    exported = stagec.Exported.deserialize(path.read_bytes())
    leaves = inputs(path, exported)
    args, kwargs = exported.in_tree.unflatten(leaves)
    found = exported.out_tree.flatten(exported.call(*args, **kwargs))
    for ours, theirs in zip(found, arrays(path.with_suffix(".outputs.npz")), strict=True):
        np.testing.assert_allclose(np.asarray(ours).astype(theirs.dtype), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("path", ARTIFACTS, ids=name_of)
def test_an_artifact_is_written_again(path: Path) -> None:
    exported = stagec.Exported.deserialize(path.read_bytes())
    order = VJP_ORDERS.get(path.stem, 0)
    written = exported.serialize(order)
    again = stagec.Exported.deserialize(written)
    assert again.serialize(order) == written
    assert again.in_avals == exported.in_avals
    assert again.mlir_module_serialized == exported.mlir_module_serialized
    for _ in range(order):
        assert again.has_vjp()
        again = again.vjp()
    assert not again.has_vjp()


@pytest.mark.parametrize("path", OURS, ids=name_of)
def test_jax_runs_and_differentiates_what_stagec_wrote(path: Path) -> None:
    theirs, ours = jax.export.deserialize(bytearray(path.read_bytes())), stagec.Exported.deserialize(path.read_bytes())
    if theirs.nr_devices > len(jax.devices()):
        pytest.skip("another test has made fewer devices")
    leaves = inputs(path, ours)
    args, kwargs = jax.tree.unflatten(theirs.in_tree, leaves)

    def place(exported: Any, leaves: list[Any]) -> list[Any]:
        if exported.nr_devices == 1:
            return leaves
        mesh = jax.make_mesh((exported.nr_devices,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
        whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        wanted = exported.in_shardings_jax(mesh)
        return [jax.device_put(leaf, one or whole) for leaf, one in zip(leaves, wanted, strict=True)]

    found = theirs.call(*args, **kwargs) if theirs.nr_devices == 1 else jax.jit(theirs.call)(*place(theirs, leaves))
    for one, wanted in zip(jax.tree.leaves(found), arrays(path.with_suffix(".outputs.npz")), strict=True):
        np.testing.assert_allclose(np.asarray(one).astype(wanted.dtype), wanted, 1e-5, 1e-5)
    assert theirs.has_vjp() == (path.stem in VJP_ORDERS)
    if not theirs.has_vjp():
        return
    wanted = arrays(path.with_suffix(".cotangents.npz"))
    results = [np.asarray(one) for one in jax.tree.leaves(found)]
    ones = [np.ones(one.shape, one.dtype if one.dtype.kind == "f" else jax.dtypes.float0) for one in results]
    of_jax = jax.jit(theirs.vjp().call)(*place(theirs.vjp(), [*leaves, *ones]))
    bools = [one if one.dtype.kind == "f" else np.zeros(one.shape, bool) for one in ones]
    for one, other, stored in zip(jax.tree.leaves(of_jax), ours.vjp().call(*leaves, *bools), wanted, strict=True):
        np.testing.assert_allclose(one, stored, 1e-5, 1e-5)
        np.testing.assert_allclose(other, stored, 1e-5, 1e-5)
