"""Bytes of an `Exported`: what stagec writes JAX reads, what JAX writes stagec reads, and both compute the same.

Modules: `stages/export_schema.py`.
"""

import dataclasses
import re
import struct
from pathlib import Path
from typing import Any

import flatbuffers
import jax
import jax.export
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax._src.export import serialization_generated
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import stagec
from stagec.core.sizes.avals import Aval
from stagec.stages import export_schema
from stagec.stages.errors import NotExported
from stagec.stages.exported import Exported

FIELDS = (
    *("fun_name", "in_tree", "out_tree", "nr_devices", "platforms", "ordered_effects", "unordered_effects"),
    *("mlir_module_serialized", "calling_convention_version", "module_kept_var_idx", "uses_global_constants"),
    *("in_shardings_hlo", "out_shardings_hlo", "_in_named_shardings", "_out_named_shardings"),
)


def f32(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def mlp(params: Any, x: Any) -> Any:
    return {"y": jnp.tanh(x @ params["w"]), "none": None, "pair": (x.sum(), [params["w"]])}


def cases() -> dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Jitted function, arguments, keyword arguments."""
    key = jax.random.key_data(jax.random.key(1))
    return {
        "trees": (jax.jit(mlp), ({"w": f32(3, 2)}, f32(4, 3)), {}),
        "kwargs": (jax.jit(lambda x, *, shift: x + shift), (f32(3),), {"shift": f32(3)}),
        "unused": (jax.jit(lambda x, unused, y: x * y), (f32(3), f32(5), f32(3)), {}),
        "kept": (jax.jit(lambda x, unused: x * 2, keep_unused=True), (f32(3), f32(5)), {}),
        "donated": (jax.jit(lambda s, x: (s + x, x.sum()), donate_argnums=0), (f32(4), f32(4)), {}),
        "dtypes": (
            jax.jit(lambda a, b, c, d, e: (a + 1, b * 2, ~c, d.astype(jnp.float32), e.astype(jnp.int8) + 1)),
            (
                np.arange(3, dtype=np.uint8),
                f32(3).astype(ml_dtypes.bfloat16),
                np.array([True, False]),
                f32(3).astype(ml_dtypes.float8_e4m3fn),
                np.arange(4).astype(ml_dtypes.int4),
            ),
            {},
        ),
        "scalars": (jax.jit(lambda x, n: x * n), (np.float32(2.5), np.int32(3)), {}),
        "empty": (jax.jit(lambda x: (x.sum(0), ())), (np.zeros((0, 3), np.float32),), {}),
        "words": (jax.jit(lambda k: jax.random.normal(jax.random.wrap_key_data(k), (3,))), (np.asarray(key),), {}),
    }


def bits(tree: Any) -> list[tuple[str, tuple[int, ...], bytes]]:
    return [(str(a.dtype), a.shape, a.tobytes()) for a in map(np.asarray, jax.tree.leaves(tree))]


@pytest.mark.parametrize("name", cases())
@pytest.mark.parametrize("platforms", [("cpu",), ("tpu", "cpu", "cuda")], ids=len)
def test_both_ways(name: str, platforms: tuple[str, ...]) -> None:
    function, args, kwargs = cases()[name]
    theirs = jax.export.export(function, platforms=list(platforms))(*args, **kwargs)
    written = bytes(theirs.serialize())
    ours = Exported.deserialize(written)
    rewritten = ours.serialize()
    assert Exported.deserialize(rewritten) == ours
    read, again = jax.export.deserialize(bytearray(written)), jax.export.deserialize(bytearray(rewritten))
    for field in FIELDS:
        assert getattr(again, field) == getattr(read, field), field
    assert again.in_avals == read.in_avals
    assert again.out_avals == read.out_avals
    expected = bits(jax.tree.map(np.asarray, jax.jit(theirs.call)(*args, **kwargs)))
    assert bits(ours.call(*args, **kwargs)) == expected
    assert bits(jax.jit(again.call)(*args, **kwargs)) == expected


def written_by(serialized: bytes) -> tuple[int, bytes | None]:
    """The fields by which JAX may refuse a file from 27 January 2027 on, as JAX's own accessors read them."""
    table = serialization_generated.Exported.GetRootAs(serialized)
    return table.SerializationVersion(), table.JaxVersion() if hasattr(table, "JaxVersion") else None


def test_a_file_says_which_jax_wrote_it() -> None:
    theirs = bytes(jax.export.export(jax.jit(jnp.sin))(f32(3)).serialize())
    kept = Exported.deserialize(theirs).serialize()
    assert written_by(kept) == written_by(theirs)
    staged = stagec.jit(jnp.sin).trace(f32(3)).export().serialize()
    made_here = dataclasses.replace(Exported.deserialize(theirs), _written_by=None).serialize()
    assert written_by(staged) == written_by(made_here) == written_by(theirs)


def test_what_another_release_wrote_stays_its_own() -> None:
    exported = Exported.deserialize(bytes(jax.export.export(jax.jit(jnp.sin))(f32(3)).serialize()))
    other = dataclasses.replace(exported, _written_by=(13, "0.99.0")).serialize()
    again = Exported.deserialize(other)
    assert again._written_by == (13, "0.99.0")
    assert again.serialize() == other
    np.testing.assert_array_equal(jax.export.deserialize(bytearray(other)).call(f32(3)), jnp.sin(f32(3)))


@pytest.mark.parametrize("order", [0, 1, 2])
def test_vector_jacobian_products(order: int) -> None:
    def cubed(x: Any) -> Any:
        return x**3

    x, ct, ct2 = f32(4), f32(4) + 1, (f32(4) - 1, f32(4) * 2)
    theirs = jax.export.export(jax.jit(cubed), platforms=["cpu"])(x)
    ours = Exported.deserialize(theirs.serialize(vjp_order=2))
    data = ours.serialize(vjp_order=order)
    read, again = jax.export.deserialize(bytearray(data)), Exported.deserialize(data)
    assert again.has_vjp() == read.has_vjp() == (order > 0)
    if order == 0:
        with pytest.raises(ValueError, match="No VJP is available"):
            again.vjp()
        with pytest.raises(ValueError, match="cubed has no vector-Jacobian product of an order that high"):
            again.serialize(vjp_order=1)
        return
    (expected,) = jax.vjp(jax.jit(cubed), x)[1](ct)
    np.testing.assert_array_equal(again.vjp().call(x, ct)[0], jax.jit(theirs.vjp().call)(x, ct)[0])
    np.testing.assert_allclose(again.vjp().call(x, ct)[0], expected, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(lambda v: read.call(v).sum())(x), 3 * x**2, rtol=1e-6)
    assert again.vjp().has_vjp() == (order > 1)
    if order > 1:
        second = again.vjp().vjp().call(x, ct, ct2[0])
        reference = jax.jit(theirs.vjp().vjp().call)(x, ct, ct2[0])
        assert bits(second) == bits(reference)
        grad = jax.grad(lambda v: read.call(v).sum())
        np.testing.assert_allclose(jax.grad(lambda v: grad(v).sum())(x), 6 * x, rtol=1e-6)


def test_keys_as_arguments() -> None:
    key = jax.random.key(3)
    theirs = jax.export.export(jax.jit(lambda k: (jax.random.normal(k, (2,)), jax.random.split(k))))(key)
    ours = Exported.deserialize(theirs.serialize())
    assert ours.in_avals == (Aval("key<fry>", ()),)
    normal, keys = ours.call(np.asarray(jax.random.key_data(key)))
    expected, split = jax.jit(theirs.call)(key)
    np.testing.assert_array_equal(normal, expected)
    np.testing.assert_array_equal(keys, jax.random.key_data(split))
    np.testing.assert_array_equal(jax.export.deserialize(bytearray(ours.serialize())).call(key)[0], expected)


def test_symbolic_shapes() -> None:
    shape = jax.export.symbolic_shape("b, 2*c, b+c+1", constraints=["mod(b, 2) == 0", "c <= 8"])
    theirs = jax.export.export(jax.jit(lambda x: x.sum(1)), platforms=["cpu", "tpu"])(
        jax.ShapeDtypeStruct(shape, jnp.float32)
    )
    ours = Exported.deserialize(theirs.serialize())
    again = jax.export.deserialize(bytearray(ours.serialize()))
    assert str(again.out_avals) == str(theirs.out_avals)
    for b, c in ((2, 1), (4, 3)):
        x = f32(b, 2 * c, b + c + 1)
        assert bits(ours.call(x)) == bits(jax.jit(theirs.call)(x)) == bits(jax.jit(again.call)(x))


def test_disabled_checks_survive() -> None:
    check = jax.export.DisabledSafetyCheck
    checks = [check.platform(), check.custom_call("some_call")]
    theirs = jax.export.export(jax.jit(jnp.sin), platforms=["tpu"], disabled_checks=checks)(f32(3))
    ours = Exported.deserialize(theirs.serialize())
    assert ours.disabled_safety_checks == ("platform", "custom_call:some_call")
    again = jax.export.deserialize(bytearray(ours.serialize()))
    assert list(again.disabled_safety_checks) == checks
    # It runs on a platform that it was not exported for, as the first check says.
    np.testing.assert_array_equal(ours.call(f32(3)), jax.jit(again.call)(f32(3)))


def test_meshes_and_their_devices_survive() -> None:
    device = jax.sharding.AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu")
    mesh = AbstractMesh((4, 2), ("x", "y"), (jax.sharding.AxisType.Explicit,) * 2, abstract_device=device)
    on = NamedSharding(mesh, PartitionSpec("x", None), memory_kind="pinned_host")
    theirs = jax.export.export(jax.jit(lambda x: x * 2), platforms=["tpu"])(
        jax.ShapeDtypeStruct((8, 2), jnp.float32, sharding=on)
    )
    theirs = dataclasses.replace(theirs, _in_named_shardings=(on,))
    ours = Exported.deserialize(theirs.serialize())
    again = jax.export.deserialize(bytearray(ours.serialize()))
    assert again._in_named_shardings == (on,)
    assert again._in_named_shardings[0].mesh.abstract_device == device
    assert again.in_avals == jax.export.deserialize(theirs.serialize()).in_avals


def test_a_dtype_that_the_format_lacks() -> None:
    ours = Exported.deserialize(jax.export.export(jax.jit(jnp.sin))(f32(3)).serialize())
    with pytest.raises(ValueError, match=r"the format of jax.export has no dtype i2; cast i2\[3\] to another"):
        dataclasses.replace(ours, in_avals=(Aval("i2", (3,)),)).serialize()


def test_trees_that_do_not_fit_the_avals() -> None:
    ours = Exported.deserialize(jax.export.export(jax.jit(jnp.sin))(f32(3)).serialize())
    with pytest.raises(NotExported, match="trees and avals do not agree"):
        Exported.deserialize(dataclasses.replace(ours, in_avals=(), _in_shardings=()).serialize())


def test_a_small_file_that_would_be_a_large_value() -> None:
    """Each node of the tree has the next one twice: 2**40 leaves in some hundred bytes."""
    builder = flatbuffers.Builder(0)

    def node(kind: int, children: list[int]) -> int:
        builder.StartVector(4, len(children), 4)
        for child in children:
            builder.PrependUOffsetTRelative(child)
        vector = builder.EndVector()
        builder.StartObject(5)
        builder.PrependInt8Slot(0, kind, 0)
        builder.PrependUOffsetTRelativeSlot(1, vector, 0)
        return int(builder.EndObject())

    tree = node(0, [])
    for _ in range(40):
        tree = node(2, [tree, tree])
    builder.StartObject(26)
    builder.PrependUOffsetTRelativeSlot(2, tree, 0)
    builder.PrependUOffsetTRelativeSlot(4, tree, 0)
    builder.Finish(builder.EndObject())
    with pytest.raises(NotExported, match="more is to be read than the file has"):
        Exported.deserialize(bytes(builder.Output()))


@pytest.mark.parametrize("count", [4, 0, -1])
def test_a_number_of_devices_of_older_bytes(count: int) -> None:
    exported = jax.export.export(jax.jit(jnp.sin), platforms=["cpu"])(f32(3))
    serialized = bytearray(exported.serialize())
    table = flatbuffers.table.Table(serialized, flatbuffers.encode.Get(struct.Struct("<I"), serialized, 0))
    new, old = (4 + 2 * slot for slot in (18, 6))  # 32 and 16 bits; the first since version 5
    vtable, place = table.Pos - struct.unpack_from("<i", serialized, table.Pos)[0], table.Offset(new)
    struct.pack_into("<h", serialized, table.Pos + place, count)
    struct.pack_into("<H", serialized, vtable + old, place)
    struct.pack_into("<H", serialized, vtable + new, 0)
    if count > 0:
        assert Exported.deserialize(bytes(serialized)).nr_devices == count
    else:
        with pytest.raises(NotExported, match="it is for no platform, or for no device"):
            Exported.deserialize(bytes(serialized))


def accessors() -> dict[str, dict[str, int]]:
    """The slot of each field of each table, in the accessors that JAX generated from its schema."""
    source = Path(str(serialization_generated.__file__)).read_text()
    found: dict[str, dict[str, int]] = {}
    tables = re.findall(r"^class (\w+)\(object\):\n(.*?)(?=^class |^def |\Z)", source, re.MULTILINE | re.DOTALL)
    for name, body in tables:
        for method, place in re.findall(r"def (\w+)\(self.*?\n\s+o = .*?Offset\((\d+)\)\)", body):
            field = re.sub(r"(?<!^)(?=[A-Z])", "_", method).lower()
            found.setdefault(name, {})[field] = int(place) // 2 - 2
    return found


def test_slots_are_those_of_jaxs_accessors() -> None:
    theirs = accessors()
    for table, fields in export_schema.TABLES.items():
        slots = {name: slot for slot, name in enumerate(fields) if name in theirs[table] or table != "Exported"}
        assert {name: theirs[table].get(name) for name in slots} == slots
        assert set(fields) - set(slots) <= {"jax_version"}  # since JAX 0.11.1
    assert set(theirs) == {*export_schema.TABLES}
