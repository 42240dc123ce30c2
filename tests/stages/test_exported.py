"""`Exported` is read as jax.export wrote it, and damaged bytes are refused.

Modules: `stages/errors.py`.
"""

from pathlib import Path

import jax
import jax.export
import pytest
from hypothesis import given, settings, strategies as st

from stagec.stages.errors import NotExported
from stagec.stages.exported import Exported
from tests.zoo import effects


def test_every_field_is_what_jax_reads(zoo: Path) -> None:
    files = sorted(zoo.parent.glob("*.exported"))
    assert files
    for file in files:
        ours = Exported.deserialize(file.read_bytes())
        if [*ours.in_tree.custom_nodes(), *ours.out_tree.custom_nodes()]:
            continue  # JAX reads those where their types are registered alone: tests/frontends
        theirs = jax.export.deserialize(bytearray(file.read_bytes()))
        assert ours.fun_name == theirs.fun_name
        assert ours.nr_devices == theirs.nr_devices
        assert ours.platforms == theirs.platforms
        assert ours.module_kept_var_idx == theirs.module_kept_var_idx
        assert ours.calling_convention_version == theirs.calling_convention_version
        assert ours.uses_global_constants == theirs.uses_global_constants
        assert ours.mlir_module_serialized == theirs.mlir_module_serialized
        assert ours.has_vjp() == theirs.has_vjp()
        assert ours.ordered_effects == tuple(str(type(effect)) for effect in theirs.ordered_effects)
        assert ours.unordered_effects == tuple(str(type(effect)) for effect in theirs.unordered_effects)
        if file.stem == "zoo.effectful":  # JAX reads effects of classes that it knows
            assert {type(effect) for effect in theirs.ordered_effects} == {effects.Read, effects.Write}
        assert ours.in_tree.num_leaves == theirs.in_tree.num_leaves
        assert [a.shape for a in ours.in_avals] == [tuple(_dim(d) for d in a.shape) for a in theirs.in_avals]
        paths = jax.tree_util.tree_leaves_with_path(jax.tree.unflatten(theirs.in_tree, theirs.in_avals))
        assert list(ours.in_tree.paths()) == [jax.tree_util.keystr(path) for path, _ in paths]


def _dim(dim: object) -> int | str:
    return dim if isinstance(dim, int) else str(dim)


def test_what_jax_exports_runs_in_jax(zoo: Path) -> None:
    exported = jax.export.deserialize(bytearray((zoo.parent / "zoo.mlp.exported").read_bytes()))
    params = {"w": jax.numpy.ones((16, 4)), "b": jax.numpy.zeros(4)}
    assert exported.call(params, jax.numpy.ones((7, 16))).shape == (7, 4)


def test_exported_bytes_hold_no_paths(zoo: Path) -> None:
    for file in zoo.parent.glob("*.exported"):
        data = file.read_bytes()
        assert b"zoo.py" not in data
        assert b"site-packages" not in data


@settings(max_examples=300)
@given(st.data())
def test_damaged_bytes_are_refused_or_read_as_what_they_say(zoo: Path, data: st.DataObject) -> None:
    original = (zoo.parent / "zoo.update.exported").read_bytes()
    at = data.draw(st.integers(0, len(original) - 1))
    damaged = original[:at] + data.draw(st.binary(max_size=4)) + original[at + data.draw(st.integers(0, 4)) :]
    told = ""
    try:
        read = Exported.deserialize(damaged)
    except NotExported as refusal:
        told = str(refusal)
    assert told.startswith("not a serialized jax.export.Exported (") or Exported.deserialize(read.serialize()) == read


@pytest.mark.parametrize("data", [b"", b"\0", b"hello world, this is text"])
def test_other_bytes(data: bytes) -> None:
    with pytest.raises(NotExported):
        Exported.deserialize(data)
