"""Arrays in layouts that a program asks for: calls give what `jax.jit` gives, wherever arrays come from and go.

Modules: `pjrt/executable.py`.
"""

import itertools
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from jaxlib import _jax
from safetensors.numpy import save_file

import stagec
from stagec.pjrt import arrays, clients, layouts
from stagec.pjrt.executable import Executable
from stagec.stages.compiled import Compiled
from stagec.stages.exported import Exported
from tests.building import build
from tests.bundles import without_executables

X = np.arange(6, dtype=np.float32).reshape(2, 3)
DTYPES = (np.float32, np.int8, np.bool_, np.complex64, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4)


def columns(sharding: Any = None) -> Format:
    """The layout of a matrix by columns."""
    return Format(Layout((1, 0)), sharding or SingleDeviceSharding(jax.devices("cpu")[0]))


@dataclass(frozen=True, eq=False)
class Drawn:
    """A function of two arrays, and how each is to lie; a layout is an order of dimensions, None or "auto"."""

    values: list[np.ndarray[Any, Any]]
    turns: list[tuple[int, ...]]
    inputs: list[Any]
    outputs: list[Any]
    donated: tuple[int, ...]
    split: bool

    def __call__(self, x: Any, y: Any) -> tuple[Any, ...]:
        return tuple(jnp.flip(jnp.transpose(one, turn)) for one, turn in zip((x, y), self.turns, strict=True))

    def options(self) -> dict[str, Any]:
        """Return them for `jax.jit`."""
        where: Any = SingleDeviceSharding(jax.devices()[0])
        if self.split:
            where = NamedSharding(jax.make_mesh((2,), ("d",)), PartitionSpec("d"))
        inputs, outputs = ([self._format(where, order) for order in orders] for orders in (self.inputs, self.outputs))
        return {"in_shardings": tuple(inputs), "out_shardings": tuple(outputs), "donate_argnums": self.donated}

    @staticmethod
    def _format(sharding: Any, order: Any) -> Any:
        if order is None:
            return sharding
        return Format(Layout.AUTO if order == "auto" else Layout(order), sharding)


@st.composite
def drawn(draw: st.DrawFn) -> Drawn:
    split = len(jax.devices()) > 1
    donated = draw(st.sampled_from([(), (0,), (1,), (0, 1)]))
    # XLA divides by zero where arrays without elements have layouts, and so does JAX's process end (0.10.1).
    values, turns, inputs, outputs = [], [], [], []
    for number in range(2):
        rank = draw(st.integers(1 if split else 0, 4))
        shape = draw(st.tuples(*[st.sampled_from((1, 2, 3, 5))] * rank))
        orders = list(itertools.permutations(range(rank)))
        turn = draw(st.sampled_from(orders))
        if split:  # both what is taken and what is given have an even first dimension
            even = {0, turn[0]}
            shape = tuple(2 * size if i in even else size for i, size in enumerate(shape))
        dtype = draw(st.sampled_from(DTYPES))
        count = int(np.prod(shape))
        values.append(((np.arange(count) * (number + 3)) % 7).astype(dtype).reshape(shape))
        turns.append(turn)
        layouts = st.sampled_from([None, *orders, *(() if donated else ("auto",))])  # JAX takes not all with donation
        inputs.append(draw(layouts))
        outputs.append(draw(layouts))
    return Drawn(values, turns, inputs, outputs, donated, split)


def same(results: Any, wanted: Any) -> None:
    for one, other in zip(map(np.asarray, results), map(np.asarray, wanted), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.tobytes() == other.tobytes()


@settings(max_examples=8)
@given(drawn())
def test_calls_give_what_jax_gives(function: Drawn) -> None:
    options = function.options()
    wanted = list(map(np.asarray, jax.jit(function)(*function.values)))  # JAX does not run all that it lowers (0.10.1)
    structs = [
        jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=getattr(s, "sharding", s))
        for v, s in zip(function.values, options["in_shardings"], strict=True)
    ]
    compiled = stagec.jit(function, **options).lower(*structs).compile()
    assert compiled.nr_devices == 1 + function.split
    for order, one in zip(function.inputs, compiled.input_formats[0], strict=True):
        assert order in (None, "auto") or one.layout.major_to_minor == order
    same(compiled(*function.values), wanted)
    again = Compiled.deserialize(compiled.serialize())
    for _ in range(2):
        results = again(*map(stagec.device_put, function.values))
        assert {type(result) for result in results} == {arrays.DeviceArray}
        same(results, wanted)
    same([result.copy() for result in results], wanted)
    for result, formatted in zip(results, again.output_formats, strict=True):
        held = [tuple(one.index) for one in result.addressable_shards]
        whole = np.asarray(result)
        same([one.data for one in result.addressable_shards], [whole[index] for index in held])
        assert result._buffer._pjrt_layout._xla_layout().minor_to_major()[::-1] == formatted.layout.major_to_minor
    # Results of one program are the arguments of another that wants them otherwise.
    back = Drawn(wanted, [tuple(range(one.ndim)) for one in wanted], [None, "auto"], [None, "auto"], (), function.split)
    same(stagec.jit(back, **back.options()).lower(*wanted).compile()(*results), back(*wanted))
    exported = stagec.jit(function, **options).trace(*structs).export()
    same(Exported.deserialize(exported.serialize()).call(*function.values), wanted)


def test_calls_on_two_devices_give_what_jax_gives() -> None:
    code = """
import jax, conftest
jax.config.update("jax_num_cpu_devices", 2)
from tests.pjrt.test_layouts import test_calls_give_what_jax_gives
test_calls_give_what_jax_gives()
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_array_in_the_wanted_layout_stays_where_it_is_and_is_consumed() -> None:
    step = stagec.jit(lambda x: x + 1, in_shardings=columns(), out_shardings=columns(), donate_argnums=0)
    step = step.lower(X).compile()
    by_rows = stagec.device_put(X)
    by_columns = step(by_rows)
    assert not by_rows.is_deleted()  # a copy of it in the other layout was consumed
    place = by_columns._buffer.unsafe_buffer_pointer()
    after = step(by_columns)
    assert after._buffer.unsafe_buffer_pointer() == place
    assert by_columns.is_deleted()
    assert np.array_equal(after, X + 2)


def test_an_array_without_elements_needs_no_copy_in_a_layout() -> None:
    empty = np.zeros((3, 0), np.float32)
    compiled = stagec.jit(lambda x: x + 1, in_shardings=columns(), out_shardings=columns()).lower(empty).compile()
    before = layouts.copying.cache_info().misses
    for argument in (empty, stagec.device_put(empty), compiled(stagec.device_put(empty))):
        same([compiled(argument)], [empty])
    assert layouts.copying.cache_info().misses == before


def test_a_jax_array_that_has_the_layout() -> None:
    by_columns = jax.device_put(X, columns())
    assert np.array_equal(stagec.jit(lambda x: x + 1)(by_columns), X + 1)
    assert np.array_equal(stagec.jit(lambda x: x + 1).lower(by_columns).compile()(X), X + 1)


MODULE = """
func.func @main(%x: tensor<4x3xf32> {mhlo.layout_mode = "{0,1}", tf.aliasing_output = 0 : i32},
                %w: tensor<4x3xf32> {mhlo.layout_mode = "{0,1}"})
    -> (tensor<4x3xf32> {mhlo.layout_mode = "{0,1}"}, tensor<4x3xf32>) {
  %0 = stablehlo.subtract %x, %w : tensor<4x3xf32>
  return %0, %0 : tensor<4x3xf32>, tensor<4x3xf32>
}
"""
MODEL = """
from jax.experimental.layout import Layout, with_layout_constraint

def constrained(x):
    return with_layout_constraint(x + 1, Layout((1, 0)))
"""
MANIFEST = """
[manifest]
name = "m"
version = "1"
[meshes.two]
axes = { d = 2 }
[functions.by_columns]
entry = "by_columns.mlir"
targets = ["cpu-avx2"]
[functions.bound]
entry = "by_columns.mlir"
targets = ["cpu-avx2"]
bind = { "args[1]" = { file = "w.safetensors", prefix = "w" } }
[functions.constrained]
entry = "model:constrained"
args = ["f32[4,3]"]
targets = ["cpu-avx2"]
[functions.split]
entry = "model:constrained"
args = ["f32[4,3]"]
mesh = "two"
in_shardings = ["P(d)"]
targets = ["cpu-avx2"]
"""
A = np.arange(12, dtype=np.float32).reshape(4, 3)
W = A[::-1] ** 2


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    (folder / "m.toml").write_text(MANIFEST)
    (folder / "model.py").write_text(MODEL)
    (folder / "by_columns.mlir").write_text(MODULE)
    save_file({"w": np.ascontiguousarray(W)}, folder / "w.safetensors")
    return build("m.toml", folder, folder)


@pytest.mark.parametrize("place", [np.array, stagec.device_put], ids=["numpy", "device"])
@pytest.mark.parametrize("donate", [True, False])
def test_calls_of_a_bundle(built: Path, place: Any, donate: bool) -> None:
    with stagec.load(built, policy="executable_only") as bundle:
        function, bound = (bundle[name].with_options(donate=donate) for name in ("by_columns", "bound"))
        for _ in range(3):  # the first is looked at, and then remembered
            same(function(place(A), W), (A - W, A - W))
            same(function(A, place(W)), (A - W, A - W))
            same(bound(place(A)), (A - W, A - W))
            same(bound(place(A), W + 1), (A - W - 1, A - W - 1))
            same(function.flat(A, W)(place(A), place(W)), (A - W, A - W))
        once, usual = function(stagec.device_put(A), W)
        assert (once.aval.layout, usual.aval.layout) == ("{0,1}", None)
        kinds_before = len(function._of[""]._prepared)
        for _ in range(3):  # one lies as the executable wants it, the other does not
            same(function(once.copy(), W), (A - W - W, A - W - W))
            same(function(usual.copy(), W), (A - W - W, A - W - W))
        assert not donate or len(function._of[""]._prepared) > kinds_before
        lived = bundle["by_columns"](once, W)
        assert once.is_deleted()
        same(lived, (A - W - W, A - W - W))


@pytest.mark.parametrize("name", ["constrained", "split"])
def test_a_result_in_the_layout_that_a_function_asks_for(built: Path, name: str) -> None:
    with stagec.load(built) as bundle:
        for _ in range(2):
            same([bundle[name](A)], [A + 1])
            result = bundle[name](bundle[name](stagec.device_put(A)))
            assert name == "split" or result.aval.layout == "{0,1}"  # XLA drops it where it splits the result
            same([result, result.copy()], [A + 2, A + 2])


def test_what_is_compiled_when_it_is_called_has_the_layouts(built: Path, tmp_path: Path) -> None:
    with stagec.load(without_executables(built, tmp_path / "m.aot")) as bundle:
        same(bundle["bound"](A), (A - W, A - W))
        assert bundle["bound"](stagec.device_put(A))[0].aval.layout == "{0,1}"


def test_a_program_without_python_learns_the_layouts(built: Path) -> None:
    with stagec.load(built) as bundle:
        (description,) = bundle["by_columns"].descriptions
    rows = {row["path"]: row["minor_to_major"] for rows in description.abi.values() for row in rows}
    assert rows == {"args[0]": [0, 1], "args[1]": [0, 1], "result[0]": [0, 1], "result[1]": [1, 0]}


def test_a_layout_in_the_memory_of_the_host_is_refused() -> None:
    text = """func.func @main(%x: tensor<4x3xf32> {mhlo.layout_mode = "{0,1}"}) -> tensor<4x3xf32> {
        return %x : tensor<4x3xf32>
    }"""
    device = clients.devices()[0]
    loaded = device.client.compile_and_load(text, _jax.DeviceList((device,)), clients.compile_options([device.id]))
    arrays_of = [((4, 3), np.dtype(np.float32))]
    with pytest.raises(ValueError, match=re.escape("in layout {0,1} in pinned_host")) as error:
        Executable(loaded, arrays_of, arrays_of, [device], {0: "pinned_host"})
    assert str(error.value).endswith("leave out the layout, or the kind of memory")
