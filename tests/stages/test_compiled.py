"""`Exported.call`, `Lowered` and `Compiled`: what they compute and say is what JAX computes and says.

Modules: `stages/compiling.py`, `stages/describing.py`, `stages/info.py`.
"""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import stagec
from stagec.bundle.description import DeviceAssignment
from stagec.core.builds.specs import CpuTarget
from stagec.core.messages.refusal import LoadError
from stagec.core.sizes.avals import parse_aval
from stagec.stages.compiled import Compiled
from stagec.stages.errors import CannotLower
from stagec.stages.exported import Exported
from stagec.stages.info import ArgInfo
from stagec.stages.lowered import Lowered
from stagec.stages.lowering import lower_exported
from stagec.stages.shardings import Format, GSPMDSharding, Layout, Mesh, SingleDeviceSharding
from tests.building import COMPILER


def f32(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def export(function: Any, *args: Any, platforms: tuple[str, ...] = ("cpu",), **options: Any) -> Exported:
    exported = jax.export.export(jax.jit(function, **options), platforms=list(platforms))(*args)
    return Exported.deserialize(exported.serialize())


def lower(function: Any, *args: Any, **options: Any) -> Lowered:
    return lower_exported(export(function, *args, **options), "cpu", {})


def model(params: Any, x: Any) -> Any:
    return jnp.tanh(x @ params["w"]).sum(), params


PARAMS, X = {"b": f32(2), "w": f32(3, 2)}, f32(4, 3)


def exported_text(function: Any, *args: Any) -> str:
    """What JAX says of the module that it exports."""
    return jax.export.export(jax.jit(function), platforms=["cpu"])(*args).mlir_module()


def instructions(hlo: str) -> str:
    """A program's text without the tables of source locations, and without references to them."""
    return re.sub(r", metadata=\{[^}]*\}", "", hlo[hlo.index("\n%") if "\n%" in hlo else 0 :])


def test_texts_are_jaxs() -> None:
    ours, theirs = lower(model, PARAMS, X), jax.jit(model).lower(PARAMS, X)
    # An exported artifact leaves out what is the default and orders constants in its own way; HLO has neither.
    assert ours.as_text("hlo") == theirs.as_text("hlo")
    assert re.findall(r"stablehlo\.\w+", ours.as_text()) == re.findall(
        r"stablehlo\.\w+", exported_text(model, PARAMS, X)
    )
    assert ours.as_text("stablehlo", debug_info=True).count("loc(") > 10
    assert "metadata=" in ours.as_text("hlo", debug_info=True)
    assert ours.compiler_ir("hlo").as_hlo_module().name == theirs.compiler_ir("hlo").as_hlo_module().name
    assert str(ours.compiler_ir()) == ours.as_text()
    with pytest.raises(ValueError, match="unknown dialect: mhlo; write stablehlo or hlo"):
        ours.as_text("mhlo")


def test_analyses_are_jaxs() -> None:
    ours, theirs = lower(model, PARAMS, X), jax.jit(model).lower(PARAMS, X)
    assert ours.cost_analysis() == theirs.cost_analysis()
    compiled, reference = ours.compile(), theirs.compile()
    assert compiled.cost_analysis() == reference.cost_analysis()
    assert str(compiled.memory_analysis()) == str(reference.memory_analysis())
    assert instructions(compiled.as_text()) == instructions(reference.as_text())
    assert type(compiled.runtime_executable()) is type(reference.runtime_executable())


def test_what_is_known_of_arguments_and_results() -> None:
    compiled = lower(model, PARAMS, X, donate_argnums=0).compile()
    reference = jax.jit(model, donate_argnums=0).lower(PARAMS, X).compile()
    args, kwargs = compiled.args_info
    assert kwargs == {}
    assert args == (
        {"b": ArgInfo((2,), np.dtype("float32"), True), "w": ArgInfo((3, 2), np.dtype("float32"), True)},
        ArgInfo((4, 3), np.dtype("float32"), False),
    )
    theirs = jax.tree.leaves(reference.args_info)
    ours = [args[0]["b"], args[0]["w"], args[1]]
    assert [(i.shape, i.dtype, i.donated) for i in ours] == [(i.shape, i.dtype, i.donated) for i in theirs]
    assert compiled.in_tree.num_leaves == reference.in_tree.num_leaves
    assert compiled.out_tree.num_leaves == reference.out_tree.num_leaves
    assert compiled.input_shardings[0][1] == SingleDeviceSharding()
    layout = Layout((0, 1), (), 0)
    assert compiled.input_formats[0][1] == Format(layout, SingleDeviceSharding())
    (their_args, _), (_, their_params) = reference.input_formats, reference.output_formats
    assert their_args[1].layout.major_to_minor == layout.major_to_minor
    assert compiled.output_formats[1]["w"].layout.major_to_minor == their_params["w"].layout.major_to_minor


def test_an_argument_that_is_not_used() -> None:
    compiled = lower(lambda x, unused: x + 1, f32(3), f32(4)).compile()
    assert compiled.input_shardings == ((SingleDeviceSharding(), None), {})
    assert compiled.input_formats[0][1] == Format(None, None)
    np.testing.assert_array_equal(compiled(f32(3), f32(4)), f32(3) + 1)
    kept = lower(lambda x, unused: x + 1, f32(3), f32(4), keep_unused=True).compile()
    assert kept.input_shardings == ((SingleDeviceSharding(), SingleDeviceSharding()), {})


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        ((PARAMS, f32(5, 3)), "shape", "model: {1} is f32[5,3]; expected f32[4,3]"),
        ((PARAMS, X.astype(np.int32)), "dtype", "model: {1} has dtype int32; expected float32 (f32[4,3])"),
        (
            ({"w": X}, X),
            "structure",
            "model: {0}: key 'b' is missing\n"
            "  the call is model({0}, {1}, /) -> result\n"
            "    {0}.b  f32[2]\n"
            "    {0}.w  f32[3,2]",
        ),
    ],
)
def test_a_call_that_does_not_fit(args: tuple[Any, ...], code: str, text: str) -> None:
    calls: dict[Any, tuple[str, str]] = {
        lower(model, PARAMS, X).compile(): ("args[0]", "args[1]"),
        export(model, PARAMS, X).call: ("params", "x"),  # the names are in JAX's module
        stagec.jit(model).lower(PARAMS, X).compile(): ("params", "x"),
    }
    for call, names in calls.items():
        with pytest.raises(stagec.CallError) as error:
            call(*args)
        assert (error.value.code, str(error.value)) == (code, text.format(*names))


def test_names_are_those_of_python() -> None:
    def function(params: Any, unused: Any, *rest: Any, scale: Any, power: int = 2, **more: Any) -> Any:
        return sum(rest, params) ** power * scale + more["shift"]

    wrapped = stagec.jit(function, static_argnames="power")
    compiled = wrapped.lower(X, X, X, X, scale=X, power=3, shift=X).compile()
    with pytest.raises(stagec.CallError) as error:
        compiled(X, X, X, X, scale=X)
    assert str(error.value) == dedent("""\
        function: kwargs: key 'shift' is missing
          the call is function(params, unused, /, *rest, scale, shift) -> f32[4,3]
            params   f32[4,3]
            unused   f32[4,3]
            rest[0]  f32[4,3]
            rest[1]  f32[4,3]
            scale    f32[4,3]
            shift    f32[4,3]""")


WIDE = [
    (jnp.float32, np.float64([1.5, 1e300, np.nan])),
    (jnp.float32, np.float64(1.5)),
    (jnp.int32, np.int64([3, -1, 2**40 + 7])),
    (jnp.uint32, np.uint64([3, 2**40 + 7])),
    (jnp.complex64, np.complex128([1 + 2j])),
    (jnp.float16, np.float64([1.5])),
    (jnp.bfloat16, np.float64([1.5])),
    (jnp.float32, np.int64([3])),
    (jnp.int32, np.float64([3])),
    (jnp.int32, np.uint64([3])),
    (jnp.int16, np.int64([3])),
    (jnp.int32, np.int16([3])),
    (jnp.float32, 2j),
    (jnp.int32, 1.5),
    (jnp.int32, 2**40),
]


@pytest.mark.parametrize("enable_x64", [False, True])
def test_wide_arguments_are_taken_as_jax_takes_them(enable_x64: bool) -> None:
    def outcome(called: Any, argument: Any) -> Any:
        try:
            return np.asarray(called(argument)).tobytes()
        except (TypeError, ValueError, OverflowError, stagec.CallError):
            return "refused"

    for dtype, argument in WIDE:
        aval = jax.ShapeDtypeStruct(np.shape(argument), dtype)
        jitted = jax.jit(lambda x: x)
        theirs = jitted.lower(aval).compile(), jax.export.export(jitted)(aval).call
        ours = stagec.jit(lambda x: x).lower(aval).compile(), export(lambda x: x, aval).call
        with jax.enable_x64(enable_x64):
            found, expected = ([outcome(one, argument) for one in side] for side in (ours, theirs))
        assert found == expected, (dtype, argument)


def test_python_numbers_are_taken_where_they_fit() -> None:
    for dtype, number in ((jnp.bfloat16, 1.5), (jnp.float32, 3), (jnp.uint8, 255), (jnp.complex64, True)):
        result = lower(lambda x: x, jax.ShapeDtypeStruct((), dtype)).compile()(number)
        assert (result.dtype, result) == (dtype, number)
    for dtype, number, text in (
        (jnp.uint8, 256, "args[0] is a number that uint8 cannot hold (u8[])"),
        (jnp.uint8, -1, "args[0] is a number that uint8 cannot hold (u8[])"),
        (jnp.int32, 2**31, "args[0] is a number that int32 cannot hold (i32[])"),
        (jnp.float32, 10**400, "args[0] is a number that float32 cannot hold (f32[])"),
        (jnp.bfloat16, 2j, "args[0] is a Python complex; expected bfloat16 (bf16[])"),
        (jnp.bool_, 1, "args[0] is a Python int; expected bool (bool[])"),
    ):
        with pytest.raises(stagec.CallError) as refusal:
            lower(lambda x: x, jax.ShapeDtypeStruct((), dtype)).compile()(number)
        assert (refusal.value.code, str(refusal.value)) == ("dtype", f"<lambda>: {text}")


def test_donated_device_arrays_are_consumed() -> None:
    compiled = lower(lambda state, x: (state + x, x * 2), f32(4), f32(4), donate_argnums=0).compile()
    state = stagec.device_put(f32(4))
    result, _ = compiled(state, f32(4))
    assert state.is_deleted()
    np.testing.assert_array_equal(result, f32(4) + f32(4))
    with pytest.raises(stagec.CallError, match=r"args\[0\] was donated to an earlier call") as error:
        compiled(state, f32(4))
    assert error.value.code == "deleted"
    mine = f32(4)
    compiled(mine, f32(4))
    np.testing.assert_array_equal(mine, f32(4))


def test_compiler_options() -> None:
    lowered = lower(lambda x: jnp.exp(x) @ x.T, f32(8, 8))
    compiled = lowered.compile({"xla_cpu_enable_fast_math": False})
    assert compiled.description.target.compiler_options == {"xla_cpu_enable_fast_math": False}
    with pytest.raises(stagec.CannotCompile, match="has no option xla_cpu_no_such"):
        lowered.compile({"xla_cpu_no_such": True})


def test_a_named_target_needs_a_prepared_process() -> None:
    target = CpuTarget("server", "AVX2", 4, {})
    with pytest.raises(stagec.CannotCompile) as error:
        lower(model, PARAMS, X).compile(target=target)
    assert str(error.value) == (
        "this process is not prepared to compile for server: call prepare_process(target) of "
        "stagec.backends.cpu.compiler before jaxlib is first used, or compile for this machine (target=None)"
    )


def test_a_platform_that_cannot_be_compiled_here() -> None:
    lowered = lower_exported(export(model, PARAMS, X, platforms=("tpu",)), "tpu", {})
    assert "stablehlo" in lowered.as_text()
    with pytest.raises(
        stagec.CannotCompile, match="model is lowered for tpu; without a target, it is compiled for cpu"
    ):
        lowered.compile()


def test_a_platform_that_was_not_exported() -> None:
    with pytest.raises(CannotLower, match="model was exported for tpu, not for cpu"):
        export(model, PARAMS, X, platforms=("tpu",)).call(PARAMS, X)


def test_each_signature_is_compiled_once() -> None:
    exported = export(lambda x: x.sum(), jax.ShapeDtypeStruct(jax.export.symbolic_shape("b"), jnp.float32))
    for size in (3, 4, 3):
        np.testing.assert_allclose(exported.call(f32(size)), f32(size).sum(), rtol=1e-6)
    assert len(exported._executables) == 2


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ((3, 5, 6), "<lambda>: x.shape[1] is 5; expected 4 (2*c with c = 2)"),
        ((3, 4, 7), "<lambda>: x.shape[2] is 7; expected 6 (b+c+1 with b = 3, c = 2)"),
        ((3, 4), "<lambda>: x has shape (3, 4); expected 3 dimensions (f32[b,2*c,b+c+1])"),
    ],
)
def test_sizes_that_do_not_follow(shape: tuple[int, ...], text: str) -> None:
    symbols = jax.export.symbolic_shape("b, 2*c, b+c+1")
    exported = export(lambda x: x.sum(), jax.ShapeDtypeStruct(symbols, jnp.float32))
    np.testing.assert_allclose(exported.call(np.ones((3, 4, 6), np.float32)), 72)
    with pytest.raises(stagec.CallError) as error:
        exported.call(np.ones(shape, np.float32))
    assert (error.value.code, str(error.value)) == ("shape", text)


def test_dimensions_of_the_result_follow() -> None:
    b, c = jax.export.symbolic_shape("b, c")
    exported = export(
        lambda x, y: jnp.concatenate([x.reshape(-1), y]),
        jax.ShapeDtypeStruct((b, c), jnp.float32),
        jax.ShapeDtypeStruct((b * c,), jnp.float32),
    )
    assert exported.out_avals == (parse_aval("f32[2*b*c]"),)
    assert exported.call(f32(2, 3), f32(6)).shape == (12,)
    with pytest.raises(stagec.CallError, match=r"\.shape\[0\] is 7; expected 6 \(b\*c with b = 2, c = 3\)"):
        exported.call(f32(2, 3), f32(7))


def test_ordered_and_unordered_effects() -> None:
    """An effect that serializes: a class without parameters. Its tokens are bound when the module is lowered."""
    from jax._src import core, effects
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir.dialects import hlo

    class Ordered(effects.Effect):
        def __hash__(self) -> int:
            return hash("Ordered")

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Ordered)

    class Unordered(effects.Effect):
        def __hash__(self) -> int:
            return hash("Unordered")

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Unordered)

    effects.ordered_effects.add_type(Ordered)
    for kind in (Ordered, Unordered):
        effects.lowerable_effects.add_type(kind)
    primitive = core.Primitive("with_effects")
    primitive.def_effectful_abstract_eval(lambda x: (x, {Ordered(), Unordered()}))

    def lowering(ctx: Any, x: Any) -> Any:
        token = ctx.tokens_in.get(Ordered())
        ctx.set_tokens_out(mlir.TokenSet({Ordered(): token}))
        return [hlo.add(x, x)]

    mlir.register_lowering(primitive, lowering)
    exported = export(primitive.bind, f32(3), platforms=("tpu", "cpu"))
    assert [name.rpartition(".")[2] for name in exported.ordered_effects] == ["Ordered'>"]
    assert [name.rpartition(".")[2] for name in exported.unordered_effects] == ["Unordered'>"]
    assert "token" in exported.mlir_module()
    np.testing.assert_array_equal(exported.call(f32(3)), f32(3) * 2)
    read = jax.export.deserialize(bytearray(exported.serialize()))
    assert read.ordered_effects == (Ordered(),)


# Four devices. Whole numbers: their sum is exact in any order.
ROWS = np.arange(24, dtype=np.float32).reshape(8, 3)
AUTO = jax.sharding.AxisType.Auto
MESH = AbstractMesh((4,), ("d",), (AUTO,))


def four_devices() -> Exported:
    spec = PartitionSpec("d")
    function = jax.shard_map(
        lambda x, s: (lax.psum(x, "d") + s, x * lax.axis_index("d")),
        mesh=MESH,
        in_specs=(spec, PartitionSpec()),
        out_specs=(PartitionSpec(), spec),
    )
    return export(
        function, ROWS, np.float32(1), in_shardings=(NamedSharding(MESH, spec), NamedSharding(MESH, PartitionSpec()))
    )


def test_four_devices() -> None:
    exported = four_devices()
    assert exported.nr_devices == 4
    total, parts = exported.call(ROWS, np.float32(1))
    np.testing.assert_array_equal(total, ROWS.reshape(4, 2, 3).sum(0) + 1)
    np.testing.assert_array_equal(parts, ROWS * np.repeat(np.arange(4, dtype=np.float32), 2)[:, None])
    compiled = lower_exported(exported, "cpu", {}).compile()
    assert (compiled.nr_devices, compiled.mesh and compiled.mesh.shape) == (4, {"d": 4})
    assert compiled.description.device_assignment == DeviceAssignment(("d",), (4,), (0, 1, 2, 3))
    ((x, s), _), (all_of_it, split) = compiled.input_shardings, compiled.output_shardings
    assert [str(sharding.spec) for sharding in (x, s, all_of_it, split)] == ["P(d)", "P()", "P()", "P(d)"]
    again = Compiled.deserialize(compiled.serialize())
    assert again.input_shardings == compiled.input_shardings
    np.testing.assert_array_equal(again(ROWS, np.float32(1))[0], total)
    # Arrays stay on the devices, and go from one layout to another.
    on_device, moved = again(stagec.device_put(ROWS), np.float32(1))
    np.testing.assert_array_equal(on_device, total)
    np.testing.assert_array_equal(again(moved, np.float32(1))[1].numpy(), compiled(np.asarray(moved), np.float32(1))[1])


def test_four_devices_over_two_axes() -> None:
    mesh = AbstractMesh((2, 2), ("x", "y"), (AUTO, AUTO))

    def on(*axes: Any) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*axes))

    a, b = np.arange(32, dtype=np.float32).reshape(8, 4), np.arange(24, dtype=np.float32).reshape(4, 6)
    exported = export(lambda a, b: a @ b, a, b, in_shardings=(on("y", "x"), on("x")), out_shardings=on(None, ("y",)))
    compiled = lower_exported(exported, "cpu", {}).compile()
    np.testing.assert_array_equal(compiled(a, b), a @ b)
    assert str(compiled.output_shardings.spec) == "P(None, y)"
    assert str(compiled.input_formats[0][0].sharding.spec) == "P(y, x)"


@pytest.mark.parametrize(
    ("sizes", "a_spec", "b_spec", "spec", "dtype"),
    [
        ((4, 1), (None, "x"), ("x",), PartitionSpec(None, None, unreduced={"x"}), jnp.bfloat16),
        ((2, 2), (None, "y"), ("y",), PartitionSpec(None, None, unreduced={"y"}), jnp.float32),
        ((2, 2), (None, ("x", "y")), (("x", "y"),), PartitionSpec(None, None, unreduced={"x", "y"}), jnp.int8),
        ((2, 2), ("y", "x"), ("x",), PartitionSpec("y", None, unreduced={"x"}), jnp.float16),
    ],
    ids=["one axis of one", "one axis of two", "both axes", "split over the other"],
)
def test_sums_that_are_pending_over_devices(
    sizes: tuple[int, int], a_spec: Any, b_spec: Any, spec: PartitionSpec, dtype: Any
) -> None:
    mesh = AbstractMesh(sizes, ("x", "y"), (jax.sharding.AxisType.Explicit,) * 2)
    a, b = np.arange(16).reshape(4, 4).astype(dtype), (np.arange(12) % 5).reshape(4, 3).astype(dtype)
    product = (a.astype(np.int32) @ b.astype(np.int32)).astype(dtype)

    def aval(x: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    with jax.sharding.use_abstract_mesh(mesh):
        exported = export(
            lambda a, b: jnp.einsum("ij,jk->ik", a, b, out_sharding=spec),
            aval(a, PartitionSpec(*a_spec)),
            aval(b, PartitionSpec(*b_spec)),
            out_shardings=NamedSharding(mesh, spec),
        )
        taken = export(lambda u: jax.sharding.reshard(u + u, PartitionSpec(a_spec[0])), aval(product, spec))
        takes = lower_exported(taken, "cpu", {}).compile()
    np.testing.assert_array_equal(exported.call(a, b), product)
    compiled = lower_exported(exported, "cpu", {}).compile()
    for one in (compiled, Compiled.deserialize(compiled.serialize())):
        np.testing.assert_array_equal(one(a, b), product)
        on_devices = one(stagec.device_put(a), b)
        np.testing.assert_array_equal(on_devices.numpy(), product)
        np.testing.assert_array_equal(np.asarray(takes(on_devices)), product + product)
        assert one.output_shardings.spec.unreduced == tuple(sorted(spec.unreduced))
    np.testing.assert_array_equal(takes(product), product + product)
    assert takes.input_shardings[0][0].spec.unreduced == tuple(sorted(spec.unreduced))
    assert compiled.description.abi["results"][0]["unreduced"] == sorted(spec.unreduced)
    read = jax.export.deserialize(bytearray(exported.serialize()))
    assert read._out_named_shardings[0].spec == spec


def test_arguments_in_the_memory_of_the_host() -> None:
    x = f32(4, 3)
    single = stagec.NamedSharding(stagec.Mesh((1,), ("x",)), stagec.PartitionSpec("x"), "pinned_host")
    several = stagec.NamedSharding(stagec.Mesh((2,), ("x",)), stagec.PartitionSpec("x"), "pinned_host")
    for sharding in (single, several):
        function = stagec.jit(lambda x, y: x * 2 + y, in_shardings=(sharding, None))
        compiled = function.lower(x, x).compile()
        for one in (compiled, Compiled.deserialize(compiled.serialize())):
            np.testing.assert_array_equal(one(x, x), x * 2 + x)
            assert one.input_shardings[0][0].memory_kind == "pinned_host"
            assert one.input_shardings[0][1].memory_kind is one.output_shardings.memory_kind is None
            assert one.description.memory_kinds == {0: "pinned_host"}
            buffer = one._loaded.put(0, x)
            assert buffer._sharding.memory_kind == "pinned_host"
            assert one._loaded.put(1, x)._sharding.memory_kind == "device"


@pytest.mark.parametrize("kind", ["pinned_host", "unpinned_host"])
def test_a_donated_argument_in_the_memory_of_the_host_is_refused(kind: str) -> None:
    x = f32(4, 3)
    on = stagec.NamedSharding(stagec.Mesh((1,), ("x",)), stagec.PartitionSpec("x"), kind)
    words = f"parameter 0 is donated and lies in {kind}, and a CPU reuses the buffers of its own memory alone"
    function = stagec.jit(lambda x: x * 2, in_shardings=on, donate_argnums=0)
    with pytest.raises(stagec.CannotCompile, match=words) as error:
        function(x)
    assert str(error.value).endswith("; leave out the donation, or the kind of memory")
    with pytest.raises(stagec.CannotCompile, match=words):
        function.trace(x).export().call(x)
    # An executable of others, whose description says so.
    compiled = stagec.jit(lambda x: x * 2, donate_argnums=0).lower(x).compile()
    row = {**compiled.description.abi["parameters"][0], "memory_kind": kind}
    abi = {**compiled.description.abi, "parameters": [row]}
    wrong = dataclasses.replace(compiled, description=compiled.description._replace(abi=abi))
    with pytest.raises(LoadError, match=words):
        Compiled.deserialize(wrong.serialize())(x)


def test_a_hundred_thousand_devices_are_refused() -> None:
    words = "100,000 devices are asked for, and a machine's CPU becomes 4,096 at most"
    x = f32(4)
    with pytest.raises(LoadError, match=words):
        stagec.devices("cpu", 100_000)
    exported = dataclasses.replace(stagec.jit(lambda x: x * 2).trace(x).export(), nr_devices=100_000)
    with pytest.raises(stagec.CannotCompile, match=words):
        Exported.deserialize(exported.serialize()).call(x)
    with pytest.raises(stagec.CannotCompile, match=words):
        lower_exported(exported, "cpu", {}).compile()
    compiled = stagec.jit(lambda x: x * 2).lower(x).compile()
    wrong = dataclasses.replace(compiled, description=compiled.description._replace(nr_devices=100_000))
    with pytest.raises(LoadError, match=words):
        Compiled.deserialize(wrong.serialize())(x)


def test_donation_over_devices() -> None:
    on = NamedSharding(MESH, PartitionSpec("d"))
    exported = export(lambda s: s + 1, ROWS, in_shardings=on, out_shardings=on, donate_argnums=0)
    compiled = lower_exported(exported, "cpu", {}).compile()
    state = compiled(stagec.device_put(ROWS))
    after = compiled(state)
    assert state.is_deleted()
    np.testing.assert_array_equal(after, ROWS + 2)


def test_dtypes_over_devices() -> None:
    on = NamedSharding(MESH, PartitionSpec("d"))
    x = ROWS.astype(jnp.bfloat16)
    result = export(lambda x: x * 2, x, in_shardings=on, out_shardings=on).call(x)
    assert result.dtype == x.dtype
    np.testing.assert_array_equal(result, x * 2)


def test_a_sharding_without_a_mesh_is_xlas_own() -> None:
    compiled = lower_exported(four_devices(), "cpu", {}).compile()
    found = Compiled(compiled.executable, compiled.description).input_shardings[0][0]
    assert found == GSPMDSharding("{devices=[4,1]<=[4]}")
    assert Mesh((4,), ("d",)).size == 4


def test_serialized_executables() -> None:
    compiled = lower(model, PARAMS, X).compile()
    data = compiled.serialize()
    again = Compiled.deserialize(data)
    assert again.serialize() == data
    assert again.description == compiled.description
    assert b"pickle" not in data
    np.testing.assert_array_equal(again(PARAMS, X)[0], compiled(PARAMS, X)[0])
    assert again.cost_analysis() == compiled.cost_analysis()
    assert "ENTRY" in again.as_text()


def test_damaged_executables() -> None:
    data = lower(model, PARAMS, X).compile().serialize()
    for damaged, code in (
        (data[:-1], "not-a-bundle"),
        (data.replace(b"model", b"madel"), "digest"),
        (b"", "not-a-bundle"),
    ):
        with pytest.raises(stagec.LoadError) as error:
            Compiled.deserialize(damaged)
        assert error.value.code == code


def test_executables_of_another_jaxlib_or_cpu() -> None:
    import dataclasses

    compiled = lower(model, PARAMS, X).compile()
    older = compiled.description._replace(versions={**compiled.description.versions, "jaxlib": "0_9_9"})
    with pytest.raises(stagec.LoadError, match="it was compiled with jaxlib 0_9_9, here is") as error:
        Compiled.deserialize(dataclasses.replace(compiled, description=older).serialize())
    assert error.value.code == "jaxlib-version"
    target = compiled.description.target._replace(settings={"architecture": "riscv64"})
    other = compiled.description._replace(target=target)
    with pytest.raises(stagec.LoadError, match="its machine code is for riscv64, and this machine is") as error:
        Compiled.deserialize(dataclasses.replace(compiled, description=other).serialize())
    assert error.value.code == "architecture"
    target = compiled.description.target._replace(requires=("avx1024",))
    other = compiled.description._replace(target=target)
    with pytest.raises(stagec.LoadError, match="this machine's CPU has no avx1024") as error:
        Compiled.deserialize(dataclasses.replace(compiled, description=other).serialize())
    assert error.value.code == "cpu-feature"
    for_it = dataclasses.replace(compiled, description=other, _executable=None)
    for call in (for_it, for_it.call):  # as what was compiled for a target that this machine is not
        with pytest.raises(stagec.LoadError, match="model: this machine's CPU has no avx1024"):
            call(PARAMS, X)
    assert for_it.memory_analysis().argument_size_in_bytes == compiled.memory_analysis().argument_size_in_bytes


WITHOUT_JAX = """
import sys
sys.modules["jax"] = None
import numpy as np
import stagec
from stagec.stages.lowering import lower_exported
folder = sys.argv[1]
read = lambda name: open(f"{folder}/{name}", "rb").read()
inputs = np.load(f"{folder}/inputs.npz")
exported = stagec.Exported.deserialize(read("model.exported"))
args = {"b": inputs["b"], "w": inputs["w"]}, inputs["x"]
lowered = lower_exported(exported, "cpu", {})
assert "stablehlo" in lowered.as_text() and "HloModule" in lowered.as_text("hlo")
assert lowered.cost_analysis() and lowered.args_info
compiled = lowered.compile()
assert compiled.as_text() and compiled.memory_analysis() and compiled.output_formats and compiled.input_shardings
again = stagec.Compiled.deserialize(read("model.compiled"))
calls = exported.call, compiled, again, stagec.Compiled.deserialize(compiled.serialize())
results = [call(*args)[0] for call in calls]
assert exported.vjp().vjp().mlir_module()
cotangents = exported.vjp().call(*(inputs[name] for name in ("b", "w", "x", "ct", "b", "w")))
parallel = stagec.Exported.deserialize(read("parallel.exported"))
mesh = stagec.Mesh((4,), ("d",))
assert parallel.in_shardings_jax(mesh)[0] == stagec.NamedSharding(mesh, stagec.PartitionSpec("d"))
total, _ = parallel.call(inputs["rows"], np.float32(1))
assert stagec.Exported.deserialize(exported.serialize(2)) == exported
assert not [name for name in sys.modules if name == "jax" and sys.modules[name] or name.startswith("jax.")]
np.savez(f"{folder}/outputs.npz", *results, *cotangents, total)
"""


def test_everything_after_tracing_works_without_jax(tmp_path: Path) -> None:
    theirs = jax.export.export(jax.jit(model), platforms=["cpu", "tpu"])(PARAMS, X)
    (tmp_path / "model.exported").write_bytes(theirs.serialize(vjp_order=2))
    (tmp_path / "model.compiled").write_bytes(lower(model, PARAMS, X).compile().serialize())
    (tmp_path / "parallel.exported").write_bytes(four_devices().serialize())
    np.savez(tmp_path / "inputs.npz", **PARAMS, x=X, ct=np.float32(2), rows=ROWS)
    (tmp_path / "run.py").write_text(WITHOUT_JAX)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "run.py"), str(tmp_path)],
        env={"PYTHONPATH": ":".join([str(COMPILER), *filter(None, sys.path)])},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    outputs = list(np.load(tmp_path / "outputs.npz").values())
    for result in outputs[:4]:
        np.testing.assert_array_equal(result, jax.jit(model)(PARAMS, X)[0])
    for result, expected in zip(
        outputs[4:7],
        jax.tree.leaves(theirs.vjp().call(*PARAMS.values(), X, np.float32(2), *PARAMS.values())),
        strict=True,
    ):
        np.testing.assert_array_equal(result, expected)
    np.testing.assert_array_equal(outputs[7], ROWS.reshape(4, 2, 3).sum(0) + 1)


def test_sizes_that_do_not_divide() -> None:
    """XLA splits an array evenly or not at all where it may choose; an uneven part would be padded."""
    on = NamedSharding(MESH, PartitionSpec("d"))
    x = np.arange(8, dtype=np.float32)
    compiled = lower(lambda x: (x[:6] * 2, lax.with_sharding_constraint(x[:6], on) + 1), x, in_shardings=on).compile()
    for result, expected in zip(compiled(x), (x[:6] * 2, x[:6] + 1), strict=True):
        np.testing.assert_array_equal(result, expected)
    uneven = compiled._loaded.parameter_shardings[0]
    with pytest.raises(ValueError, match=r"shape \(6,\) does not divide into 4 parts"):
        uneven.parts((6,))
