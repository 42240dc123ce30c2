"""Calls with JAX's arrays: results are JAX's, on JAX's client, without copies, and equal to those of `jax.jit`.

Modules: `loader/jax_calls.py`, `pjrt/jax_arrays.py`.
"""

import functools
import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st
from jax.experimental.layout import Format, Layout
from jaxlib import xla_client

import stagec
from stagec.loader.jax_calls import JaxCalls
from tests.building import COMPILER, ROOT, build_model

MANIFEST = """
[manifest]
name = "m"
version = "1"
[functions.step]
entry = "model:step"
args = [{ w = "f32[2,3]", b = "f32[3]" }, "f32[n,2]", "f32[]"]
donate_argnums = [0]
buckets = { n = [2, 4] }
targets = ["cpu-avx2"]
[functions.keys]
entry = "model:keys"
args = ["key<fry>[]", "f32[3]"]
targets = ["cpu-avx2"]
[functions.measured]
entry = "model:measured"
avals = "model:measured_avals"
targets = ["cpu-avx2"]
[functions.drops]
entry = "model:drops"
args = ["f32[3]", "f32[5]"]
targets = ["cpu-avx2"]
"""
MODEL = """
import dataclasses
import functools
import jax
import jax.numpy as jnp

def step(state, x, rate):
    return {"w": state["w"] - rate * x.sum(), "b": state["b"] + rate}, (x @ state["w"]).sum()

def keys(key, x):
    return jax.random.split(key), x + jax.random.normal(key, (3,))

def drops(x, unused):
    return [x * 2]

@functools.partial(jax.tree_util.register_dataclass, data_fields=["x"], meta_fields=["power"])
@dataclasses.dataclass
class Length:
    x: jax.Array
    power: float

def measured(length):
    return length.x ** length.power

def measured_avals():
    return (Length(jax.ShapeDtypeStruct((3,), jnp.float32), 1),)
"""
STATE = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(3, np.float32)}
ROWS = np.arange(8, dtype=np.float32).reshape(4, 2)
RATE = np.float32(0.5)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("jax_calls")
    return build_model(folder, MANIFEST, MODEL)


@pytest.fixture
def bundle(built: Path) -> Iterator[stagec.Bundle]:
    with stagec.load(built, policy="executable_only") as loaded:
        yield loaded


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each call of which nothing was remembered."""
    calls: list[int] = []
    run = JaxCalls.run

    def counted(self: JaxCalls, leaves: Any, donate: bool = True) -> Any:
        calls.append(len(leaves))
        return run(self, leaves, donate)

    monkeypatch.setattr(JaxCalls, "run", counted)
    return calls


THEIRS: dict[str, Any] = {"__name__": "model"}
exec(MODEL, THEIRS)  # the functions as JAX has them


@functools.cache
def jitted(name: str) -> Any:
    return jax.jit(THEIRS[name])


def expected() -> Any:
    """The results of `step`, by JAX."""
    return jitted("step")(STATE, ROWS, RATE)


def assert_same(results: Any, wanted: Any) -> None:
    """Types, dtypes, elements and weak types are those of JAX's results."""
    structures: list[Any] = [jax.tree.structure(results), jax.tree.structure(wanted)]
    assert structures[0] == structures[1]
    for own, theirs in zip(jax.tree.leaves(results), jax.tree.leaves(wanted), strict=True):
        assert isinstance(own, jax.Array)
        assert (own.aval, own.sharding, own.committed) == (theirs.aval, theirs.sharding, theirs.committed)
        of_keys = jnp.issubdtype(theirs.dtype, jax.dtypes.prng_key)
        read = jax.random.key_data if of_keys else np.asarray
        np.testing.assert_array_equal(read(own), read(theirs))


def test_results_are_those_of_jax_and_calls_are_remembered(bundle: stagec.Bundle, looked_at: list[int]) -> None:
    step, theirs = bundle["step"], jitted("step")
    state, wanted = jax.device_put(STATE), jax.device_put(STATE)
    for _ in range(5):
        (state, own), (wanted, other) = step(state, jnp.asarray(ROWS), jnp.asarray(RATE)), theirs(wanted, ROWS, RATE)
        assert_same((state, own), (wanted, other))
    # The leaves of the first call and the arguments of the second are looked at; from then on `pjit` knows the call.
    assert len(looked_at) == 1
    assert float(jnp.sum(state["w"])) == float(jnp.sum(wanted["w"]))


def test_what_is_donated_is_where_the_result_is_and_is_deleted(bundle: stagec.Bundle) -> None:
    step = bundle["step"]
    state = {name: jnp.array(array, copy=True) for name, array in STATE.items()}  # memory that is nobody else's
    for _ in range(3):
        before = {name: array.unsafe_buffer_pointer() for name, array in state.items()}
        after, _ = step(state, jnp.asarray(ROWS), jnp.asarray(RATE))
        assert {name: array.unsafe_buffer_pointer() for name, array in after.items()} == before
        assert all(array.is_deleted() for array in state.values())
        with pytest.raises(stagec.CallError) as refusal:
            step(state, jnp.asarray(ROWS), jnp.asarray(RATE))
        what = "was donated to an earlier call; pass that call's result"
        assert (refusal.value.code, str(refusal.value)) == ("deleted", f"step: state['b'] {what}")
        state = after


def test_arrays_are_kept_where_the_caller_asks_for_it(bundle: stagec.Bundle) -> None:
    step, state = bundle["step"].with_options(donate=False), jax.device_put(STATE)
    for _ in range(3):
        assert_same(step(state, jnp.asarray(ROWS), jnp.asarray(RATE)), expected())


@pytest.mark.parametrize("first", ["jax", "numpy"])
def test_numpys_arrays_give_numpys_arrays_between_calls_with_jaxs(bundle: stagec.Bundle, first: str) -> None:
    step = bundle["step"]
    for number in range(60):
        if (number % 2 == 0) == (first == "jax"):
            assert_same(step(jax.device_put(STATE), ROWS, RATE), expected())
        else:
            results = step(STATE, ROWS, RATE)
            assert {type(leaf) for leaf in jax.tree.leaves(results)} == {np.ndarray}
            jax.tree.map(np.testing.assert_array_equal, results, expected())


def aligned(values: Any) -> Any:
    """A copy that XLA can use where it is: it begins at a multiple of 64 bytes."""
    memory = np.empty(values.nbytes + 64, np.uint8)
    first = -memory.ctypes.data % 64
    array = memory[first : first + values.nbytes].view(values.dtype).reshape(values.shape)
    array[...] = values
    return array


KINDS: dict[str, Any] = {
    "jax": jnp.asarray,
    "committed": lambda x: jax.device_put(x, jax.devices()[0]),
    "numpy": aligned,
    "device": lambda x: stagec.device_put(x, jax.devices()[0]),
    "number": lambda x: float(x) if np.ndim(x) == 0 else np.array(x),
    "double": lambda x: np.asarray(x, np.float64),
}


@given(st.lists(st.tuples(*[st.sampled_from([*KINDS])] * 4, st.sampled_from([2, 4])), min_size=1, max_size=12))
def test_any_mixture_of_arguments(built: Path, calls: list[tuple[str, str, str, str, int]]) -> None:
    """Kinds of arguments, and buckets, in any order: what is remembered of one call changes no other."""
    with stagec.load(built, policy="executable_only", devices=jax.devices()) as bundle:
        for w, b, x, rate, size in calls:
            state = {"w": KINDS[w](STATE["w"]), "b": KINDS[b](STATE["b"])}
            arguments = state, KINDS[x](ROWS[:size]), KINDS[rate](RATE)
            kinds = {w, b, x, rate}
            results = bundle["step"](*arguments)
            if kinds & {"jax", "committed"}:
                wanted: type = type(jnp.ones(()))
                assert {leaf.committed for leaf in jax.tree.leaves(results)} == {"committed" in kinds}
            else:
                wanted = stagec.pjrt.arrays.DeviceArray if "device" in kinds else np.ndarray
            assert {type(leaf) for leaf in jax.tree.leaves(results)} == {wanted}
            theirs = jitted("step")(STATE, ROWS[:size], RATE)
            for own, other in zip(jax.tree.leaves(results), jax.tree.leaves(theirs), strict=True):
                assert own.dtype == other.dtype
                np.testing.assert_array_equal(np.asarray(own), np.asarray(other))
            for kind, name in ((w, "w"), (b, "b")):
                if kind in ("jax", "committed", "device"):
                    assert state[name].is_deleted()
                else:  # memory of the caller's
                    np.testing.assert_array_equal(state[name], STATE[name])


def test_keys_of_jax(bundle: stagec.Bundle) -> None:
    key, x = jax.random.key(3), jnp.ones(3)
    for _ in range(3):
        assert_same(bundle["keys"](key, x), jitted("keys")(key, x))
    words, _ = bundle["keys"](np.array([0, 3], np.uint32), np.ones(3, np.float32))
    np.testing.assert_array_equal(words, jax.random.key_data(jax.random.split(key)))


def test_an_argument_that_the_program_drops(bundle: stagec.Bundle, looked_at: list[int]) -> None:
    x, unused = jnp.ones(3), jnp.ones(5)
    for _ in range(4):
        assert_same(bundle["drops"](x, unused), [x * 2])
    assert looked_at == [2]
    with pytest.raises(stagec.CallError) as refusal:
        bundle["drops"](x, jnp.ones(5, jnp.int32))
    assert refusal.value.code == "dtype"


@pytest.mark.parametrize("times", [1, 4])
def test_arguments_that_do_not_fit_are_refused_as_ever(bundle: stagec.Bundle, times: int) -> None:
    step = bundle["step"]
    fits: Any = jnp.asarray(ROWS), jnp.asarray(RATE)
    for _ in range(times):
        step(jax.device_put(STATE), *fits)
    state = jax.device_put(STATE)
    for arguments, code, what in (
        ((state, *fits, 1), "structure", "step: "),
        (({1: state["w"], "b": state["b"]}, *fits), "structure", "step: "),
        ((state, jnp.ones((3, 2)), fits[1]), "shape", "step: "),
        ((state, jnp.ones((4, 2), jnp.int32), fits[1]), "dtype", "step: x has dtype int32; expected float32"),
    ):
        with pytest.raises(stagec.CallError, match=what) as refusal:
            step(*arguments)
        assert refusal.value.code == code
    assert_same(step(state, *fits), expected())


def test_a_traced_value_is_refused(bundle: stagec.Bundle) -> None:
    for _ in range(2):
        with pytest.raises(stagec.CallError) as refusal:
            jax.jit(lambda x: bundle["drops"](x, x))(jnp.ones(3))
        what = "drops: x is traced by JAX, and an executable takes values: call stagec.jax.function(bundle, 'drops')"
        assert (refusal.value.code, str(refusal.value)) == ("traced", f"{what} there instead")
        bundle["drops"](jnp.ones(3), jnp.ones(5))


def test_an_array_in_another_layout(bundle: stagec.Bundle) -> None:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    by_columns = jax.device_put(ROWS, Format(Layout((1, 0)), sharding))
    for _ in range(2):
        for x in (by_columns, jnp.asarray(ROWS), by_columns):
            (_, own), (_, theirs) = bundle["step"](jax.device_put(STATE), x, RATE), expected()
            assert float(own) == float(theirs)


def test_static_parts_are_compared_in_type_and_value(bundle: stagec.Bundle) -> None:
    """`pjit` compares with `==`, to which 1, 1.0 and True are the same; the result has no type of the model's."""
    x = jnp.arange(3.0)
    for _ in range(3):
        np.testing.assert_array_equal(bundle["measured"](THEIRS["Length"](x, 1)), x)
    for power in (True, 1.0, 2):
        with pytest.raises(stagec.CallError, match=f"power is {power}, it was 1 when the function was built"):
            bundle["measured"](THEIRS["Length"](x, power))


def test_settings_of_jax_change_nothing(bundle: stagec.Bundle) -> None:
    arguments = jnp.asarray(ROWS), jnp.asarray(RATE)
    for _ in range(2):
        assert_same(bundle["step"](jax.device_put(STATE), *arguments), expected())
        wanted = expected()
        with jax.disable_jit():
            assert_same(bundle["step"](jax.device_put(STATE), *arguments), wanted)
        with jax.enable_x64(True):
            assert_same(bundle["step"](jax.device_put(STATE), *arguments), wanted)


def test_types_of_a_model_and_bound_weights_and_padding(zoo: Path, looked_at: list[int]) -> None:
    import tests.zoo.nodes
    import tests.zoo.zoo as functions

    with stagec.load(zoo, policy="executable_only") as bundle:
        vector = jnp.arange(3.0)
        cloud = functions.Cloud(vector, [functions.Point(vector, vector + 1)] * 2, "m")
        x = jnp.arange(2.0)
        rows = jnp.arange(9.0).reshape(3, 3)
        for _ in range(3):
            assert_same(bundle["typed"](cloud, jnp.float32(2)), jax.jit(functions.typed)(cloud, jnp.float32(2)))
            with pytest.raises(stagec.CallError, match="unit is 'km', it was 'm' when the function was built"):
                bundle["typed"](functions.Cloud(vector, cloud.points, "km"), jnp.float32(2))
            weights = {
                path: np.asarray(weight.on(_aval(weight))) for path, weight in bundle["from_file"].weights.items()
            }
            kernel, bias = (next(w for path, w in weights.items() if name in path) for name in ("kernel", "bias"))
            own = bundle["from_file"](x)
            assert isinstance(own, jax.Array)
            np.testing.assert_allclose(own, kernel @ np.asarray(x) + bias, rtol=1e-6)
            pooled = bundle["pooled"](rows)
            assert {type(leaf) for leaf in pooled.values()} == {type(x)}
            np.testing.assert_array_equal(pooled["rows"], rows * 2)
            np.testing.assert_array_equal(pooled["mean"], rows.mean(axis=0))
    del tests
    # Of padded calls nothing is remembered.
    assert looked_at.count(len(jax.tree.leaves(cloud)) + 1) == 1


def _aval(weight: Any) -> Any:
    from stagec.pjrt.arrays import abstract_array, single_device

    return abstract_array(weight.shape, weight.dtype, single_device())


def test_arrays_of_another_client_are_refused(built: Path) -> None:
    client: Any = xla_client.make_cpu_client(num_devices=1)
    state, arguments = jax.device_put(STATE), (ROWS, RATE)
    with stagec.load(built, devices=client.local_devices()) as bundle:
        with pytest.raises(stagec.CallError) as refusal:
            bundle["step"](state, *arguments)
        what = "step: state['b'] is a JAX array, and the bundle was loaded for other devices than JAX's: "
        advice = "load it with devices=jax.devices(), or pass numpy's arrays"
        assert (refusal.value.code, str(refusal.value)) == ("client", what + advice)
        assert type(bundle["step"](STATE, *arguments)[1]) is np.ndarray
    with stagec.load(built) as bundle:
        own = stagec.device_put(ROWS, client.local_devices()[0])
        with pytest.raises(stagec.CallError) as refusal:
            bundle["step"](state, own, RATE)
        what = "step: x is on another device than JAX's, and other arguments are JAX arrays: "
        assert (refusal.value.code, str(refusal.value)) == ("client", f"{what}pass jax.numpy.from_dlpack(array)")
        _, loss = bundle["step"](state, jnp.from_dlpack(own), RATE)
        assert float(loss) == float(expected()[1])
    with stagec.load(built, devices=jax.devices()) as bundle:
        assert_same(bundle["step"](jax.device_put(STATE), *arguments), expected())


def test_a_closed_bundle(built: Path) -> None:
    bundle = stagec.load(built)
    step = bundle["step"]
    for _ in range(3):
        results = step(jax.device_put(STATE), ROWS, RATE)
    bundle.close()
    assert_same(results, expected())
    with pytest.raises(stagec.CallError) as refusal:
        step(jax.device_put(STATE), ROWS, RATE)
    assert (refusal.value.code, str(refusal.value)) == ("closed", "step: the bundle was closed")


def test_a_bundle_that_nobody_has_is_freed_at_once(built: Path) -> None:
    bundle = stagec.load(built)
    for _ in range(3):
        bundle["step"](jax.device_put(STATE), ROWS, RATE)
    freed = weakref.ref(bundle["step"]._of[""])
    gc.disable()
    try:
        del bundle
        assert freed() is None
    finally:
        gc.enable()


def run(script: str, *arguments: object, devices: int = 1) -> str:
    """Run a script in a process of its own; return what it prints."""
    env = {"PYTHONPATH": f"{COMPILER}:{ROOT}:{':'.join(sys.path)}", "JAX_PLATFORMS": "cpu"}
    env["JAX_NUM_CPU_DEVICES"] = str(devices)
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


LATER = """
import sys
import numpy as np
import stagec

state = {"w": np.arange(6, dtype="f4").reshape(2, 3), "b": np.ones(3, "f4")}
rows, rate = np.arange(8, dtype="f4").reshape(4, 2), np.float32(0.5)
step = stagec.load(sys.argv[1], policy="executable_only")["step"]
results = step(state, rows, rate)
on_device = step(stagec.device_put(state), rows, rate)
assert "jax" not in sys.modules
import jax, jax.numpy as jnp

assert stagec.devices()[0].client is not jax.devices()[0].client  # it has begun with its own
for _ in range(3):
    of_jax = step(jax.device_put(state), rows, rate)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(of_jax))
    jax.tree.map(np.testing.assert_array_equal, step(state, rows, rate), of_jax)
    assert type(step(state, rows, rate)[1]) is np.ndarray
    assert type(step(stagec.device_put(state), rows, rate)[1]) is type(on_device[1])
    jax.tree.map(np.testing.assert_array_equal, results, of_jax)
"""


def test_jax_may_be_imported_later(built: Path) -> None:
    run(LATER, built)


FIRST = """
import sys
import jax
import numpy as np
import stagec

assert stagec.pjrt.clients.of_jax("cpu") == []  # JAX has not started
x = jax.numpy.ones(2)
assert stagec.devices() == jax.devices()[:1]
assert stagec.devices("cpu", 3) == jax.devices()[:3]
assert stagec.devices("cpu", 5)[0].client is not jax.devices()[0].client
assert stagec.device_put(np.ones(2))._buffer.sharding.device_set == {jax.devices()[0]}
"""


def test_jaxs_client_is_everybodys_where_jax_has_started_first() -> None:
    run(FIRST.replace("import stagec\n", "import stagec.pjrt.clients\n"), devices=4)


SHARDED = """
import sys
import jax
import numpy as np
import stagec
from tests.zoo import zoo

bundle = stagec.load(sys.argv[1], policy="executable_only")
mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
P = jax.P
specs = {"w": P(None, "model"), "b": P("model")}, P("data")
rng = np.random.default_rng(0)
params = {"w": rng.random((6, 4), "f4"), "b": rng.random(4, "f4")}
x = rng.random((4, 6), "f4")
put = lambda tree: jax.tree.map(lambda a, p: jax.device_put(a, jax.NamedSharding(mesh, p)), tree, specs)
with jax.set_mesh(mesh):
    theirs = jax.jit(zoo.sharded)(*put((params, x)))
for _ in range(3):
    results = bundle["sharded"](*put((params, x)))
    assert results["y"].sharding == jax.NamedSharding(mesh, P("data")), results["y"].sharding
    assert results["total"].sharding.is_equivalent_to(theirs["total"].sharding, 2)
    jax.tree.map(np.testing.assert_array_equal, results, theirs)
    assert float(jax.numpy.sum(results["y"])) == float(jax.numpy.sum(theirs["y"]))
    # Arrays that lie elsewhere are moved.
    moved = bundle["sharded"](params, jax.numpy.asarray(x))
    jax.tree.map(np.testing.assert_array_equal, moved, theirs)
    jax.tree.map(np.testing.assert_array_equal, bundle["sharded"](params, x), theirs)
print("equal")
"""


def test_arrays_on_several_devices(zoo: Path) -> None:
    assert run(SHARDED, zoo, devices=4) == "equal\n"


def test_jax_has_too_few_devices(zoo: Path) -> None:
    with stagec.load(zoo) as bundle:
        with pytest.raises(stagec.CallError) as refusal:
            bundle["halves"](jnp.ones((4, 3)))
        what = "halves: it runs on 2 devices of cpu, and JAX has 1 in this process: "
        advice = "pass numpy's arrays, or give JAX more (jax_num_cpu_devices for a CPU)"
        assert (refusal.value.code, str(refusal.value)) == ("client", what + advice)
