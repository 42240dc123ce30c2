"""Shardings as data: XLA's form is JAX's, and comes back."""

import math

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import AbstractMesh, NamedSharding as JaxNamedSharding, PartitionSpec as JaxPartitionSpec
from jaxlib.xla_client import HloSharding

from stagec.stages.exported import Exported
from stagec.stages.shardings import Mesh, NamedSharding, PartitionSpec, named_sharding

NAMES = ("a", "b", "c")


def auto_mesh(sizes: tuple[int, ...], names: tuple[str, ...]) -> AbstractMesh:
    """JAX's mesh; the types are said because its default changed after 0.10."""
    return AbstractMesh(sizes, names, (jax.sharding.AxisType.Auto,) * len(sizes))


@st.composite
def shardings(draw: st.DrawFn) -> tuple[Mesh, tuple[tuple[str, ...], ...]]:
    """A mesh, and axes for each of three dimensions."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3))
    mesh = Mesh(tuple(sizes), NAMES[: len(sizes)])
    used = draw(st.permutations(mesh.axis_names))[: draw(st.integers(0, len(sizes)))]
    dims: list[list[str]] = [[], [], []]
    for axis in used:
        dims[draw(st.integers(0, 2))].append(axis)
    return mesh, tuple(map(tuple, dims))


@settings(max_examples=200)
@given(shardings())
def test_xlas_form_is_jaxs(case: tuple[Mesh, tuple[tuple[str, ...], ...]]) -> None:
    mesh, dims = case
    ours = NamedSharding(mesh, PartitionSpec(*dims)).to_hlo(3)
    theirs = JaxNamedSharding(
        auto_mesh(mesh.axis_sizes, mesh.axis_names), JaxPartitionSpec(*(axes or None for axes in dims))
    )
    assert ours == theirs._to_xla_hlo_sharding(3)
    again = named_sharding(ours, 3, mesh)
    assert again.to_hlo(3) == ours
    assert named_sharding(HloSharding.from_string(str(ours)), 3, mesh) == again


@pytest.mark.parametrize("kind", ["Manual", "Explicit"])
def test_types_of_axes(kind: str) -> None:
    ours = NamedSharding(Mesh((2, 2), ("a", "b"), ("Auto", kind)), PartitionSpec("a"))
    mesh = AbstractMesh((2, 2), ("a", "b"), (jax.sharding.AxisType.Auto, jax.sharding.AxisType[kind]))
    assert ours.to_hlo(2) == JaxNamedSharding(mesh, JaxPartitionSpec("a"))._to_xla_hlo_sharding(2)


def test_pending_sums() -> None:
    ours = NamedSharding(Mesh((2, 2), ("a", "b"), ("Explicit",) * 2), PartitionSpec("a", unreduced=["b"]))
    mesh = AbstractMesh((2, 2), ("a", "b"), (jax.sharding.AxisType.Explicit,) * 2)
    theirs = JaxNamedSharding(mesh, JaxPartitionSpec("a", unreduced={"b"}))
    assert ours.to_hlo(2) == theirs._to_xla_hlo_sharding(2)
    assert str(ours.spec) == "P(a), unreduced=('b',)"
    assert named_sharding(ours.to_hlo(2), 2, ours.mesh) == ours
    both = NamedSharding(ours.mesh, PartitionSpec(unreduced=["a", "b"]))
    assert named_sharding(both.to_hlo(2), 2, ours.mesh) == both


def test_what_is_partly_manual_has_no_name() -> None:
    hlo = HloSharding.from_string("{devices=[2,1,2]<=[4] last_tile_dims={manual}}")
    with pytest.raises(ValueError, match="is not a sharding over"):
        named_sharding(hlo, 2, Mesh((2, 2), ("a", "b")))


def test_a_sharding_of_another_mesh() -> None:
    hlo = NamedSharding(Mesh((6,), ("a",)), PartitionSpec("a")).to_hlo(1)
    with pytest.raises(ValueError, match=r"is not a sharding over Mesh\('b': 4, axis_types=\(Auto,\)\)"):
        named_sharding(hlo, 1, Mesh((4,), ("b",)))


def test_a_mesh_has_as_many_names_as_sizes() -> None:
    with pytest.raises(ValueError, match="a mesh has a size, a name and a type for each axis"):
        Mesh((2, 2), ("a",))
    assert Mesh((2, 3), ("a", "b")).size == math.prod(Mesh((2, 3), ("a", "b")).shape.values()) == 6


def exported() -> jax.export.Exported:
    mesh = auto_mesh((2, 2), ("x", "y"))
    jitted = jax.jit(
        lambda a, b, c: (a @ b, c),
        in_shardings=(
            JaxNamedSharding(mesh, JaxPartitionSpec("x", "y")),
            JaxNamedSharding(mesh, JaxPartitionSpec()),
            None,
        ),
        out_shardings=(JaxNamedSharding(mesh, JaxPartitionSpec(None, ("y", "x"))), None),
    )
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 4), (4, 12), (3,))]
    return jax.export.export(jitted, platforms=["cpu"])(*args)


def test_exported_over_a_mesh() -> None:
    theirs = exported()
    ours = Exported.deserialize(theirs.serialize())
    mesh = Mesh((2, 2), ("x", "y"))
    assert ours.in_shardings_jax(mesh) == (
        NamedSharding(mesh, PartitionSpec("x", "y")),
        NamedSharding(mesh, PartitionSpec()),
        None,
    )
    assert ours.out_shardings_jax(mesh) == (NamedSharding(mesh, PartitionSpec(None, ("y", "x"))), None)
    # JAX's own mesh is taken as well.
    assert ours.in_shardings_jax(auto_mesh((2, 2), ("x", "y"))) == ours.in_shardings_jax(mesh)
    read = jax.export.deserialize(theirs.serialize())
    for hlo, named in (
        (ours.in_shardings_hlo, read._in_named_shardings),
        (ours.out_shardings_hlo, read._out_named_shardings),
    ):
        assert hlo == tuple(sharding and sharding._to_xla_hlo_sharding(2) for sharding in named)


def test_exported_over_another_mesh() -> None:
    theirs = exported()
    ours = Exported.deserialize(theirs.serialize())
    with pytest.raises(ValueError, match="does not match the mesh") as error:
        ours.in_shardings_jax(Mesh((4, 1), ("x", "y")))
    with pytest.raises(ValueError, match="does not match the mesh") as of_jax:
        theirs.in_shardings_jax(auto_mesh((4, 1), ("x", "y")))
    assert str(error.value) == str(of_jax.value).replace("AbstractMesh(", "Mesh(")


def test_bytes_from_before_named_shardings() -> None:
    """Until January 2026 JAX stored XLA's form: such bytes stay so when they are written again."""
    import dataclasses

    named = Exported.deserialize(exported().serialize())
    old = dataclasses.replace(named, _in_shardings=named.in_shardings_hlo, _out_shardings=named.out_shardings_hlo)
    data = old.serialize()
    assert Exported.deserialize(data) == old
    assert old.in_shardings_jax(Mesh((2, 2), ("x", "y"))) == named.in_shardings_jax(Mesh((2, 2), ("x", "y")))
    if jax.__version_info__ < (0, 11):  # later versions do not read such bytes any more
        theirs = jax.export.deserialize(bytearray(data))
        assert not theirs._has_named_shardings
        assert theirs.in_shardings_hlo == old.in_shardings_hlo
    a = np.arange(32, dtype=np.float32).reshape(8, 4)
    b = np.arange(48, dtype=np.float32).reshape(4, 12)
    product, c = old.call(a, b, np.ones(3, np.float32))
    assert (product == a @ b).all()
    assert (c == 1).all()
