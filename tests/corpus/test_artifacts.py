"""Artifacts that older versions of JAX wrote are read and run, for ever."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import stagec

ARTIFACTS = sorted(Path(__file__).parent.glob("*/*.exported"))
VJP_ORDERS = {"mlp": 2, "symbolic": 1}


def arrays(path: Path) -> list[np.ndarray[Any, Any]]:
    with np.load(path) as stored:
        return [stored[f"arr_{i}"] for i in range(len(stored.files))]


def name_of(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


def test_every_version_wrote_every_program() -> None:
    folders = {path.parent.name for path in ARTIFACTS}
    assert folders >= {"2025-11-jax-0.8.1", "2026-11-jax-0.10.1"}
    assert len(ARTIFACTS) == 9 * len(folders)


@pytest.mark.parametrize("path", ARTIFACTS, ids=name_of)
def test_an_artifact_runs(path: Path) -> None:
    exported = stagec.Exported.deserialize(path.read_bytes())
    # numpy stores no bfloat16: such inputs were written as float32.
    leaves = [
        leaf.astype(ml_dtypes.bfloat16) if aval.dtype == "bf16" else leaf
        for leaf, aval in zip(arrays(path.with_suffix(".inputs.npz")), exported.in_avals, strict=True)
    ]
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
