"""What `stagec.jit` promises, the same for both frontends (frontends/common/jit.py).

Modules: `stagec_arrays/frontend/staging.py`, `frontends/jax/tracer.py`, `frontends/common/jit.py`,
`frontends/staging.py`.
"""

import ast
import contextlib
import dataclasses
import enum
import math
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax._src import config

import stagec
import stagec_arrays
import stagec_arrays.numpy as snp
from stagec.core.trees import same
from stagec.frontends.jax import contexts
from stagec.stages.shardings import Mesh, NamedSharding, PartitionSpec

X = np.arange(1, 4, dtype=np.float32)
FRONTENDS = ("jax", "arrays")
NAMESPACES: dict[str, Any] = {"jax": jnp, "arrays": snp}


@pytest.fixture(params=FRONTENDS)
def frontend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Color(enum.IntEnum):
    RED = 1


class Size(enum.IntEnum):
    SMALL = 1


class Name(enum.StrEnum):
    A = "a"


class Pair(NamedTuple):
    first: Any
    second: Any = None


@dataclasses.dataclass(frozen=True)
class Options:
    rate: Any
    rest: Any = ()


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    x: Any
    step: Any
    kind: Any = dataclasses.field(default=None, metadata={"static": True})


def code(value: object) -> float:
    """Return a number that f32 holds and that tells values apart by their text."""
    return float(zlib.crc32(repr(value).encode()) % (1 << 20))


STATICS = (
    *(None, 0, 1, 2, 1.0, 2.0, 0.0, -0.0, True, False, 1j, 1 + 0j, math.inf, -math.inf, float("nan")),
    *("a", b"a", Name.A, Color.RED, Size.SMALL, np.int32(1), np.int64(1), np.float32(1), np.float64(1), np.bool_(True)),
    *(np.float32(0.0), np.float32(-0.0), np.str_("a"), np.dtype("f4"), np.dtype("f8"), int, float),
    *((1,), (1.0,), (True,), ((1,), 2), ((1.0,), 2), Pair(1), Pair(True), frozenset({1}), frozenset({1.0})),
    *(Options(1), Options(1.0), Options(-0.0), Options(0.0), Options((1,)), range(0, 3, 2), range(0, 4, 2)),
)


def counted(frontend: str) -> tuple[Any, list[Any]]:
    """A function whose result says which static value it was traced for, and the values that it was traced for."""
    traced: list[Any] = []

    def function(x: Any, p: Any) -> Any:
        traced.append(p)
        return x * 0 + code(p)

    return stagec.jit(function, static_argnums=1, frontend=frontend), traced


def test_each_static_value_has_its_own_program(frontend: str) -> None:
    function, traced = counted(frontend)
    for _ in range(2):
        for value in STATICS:
            assert np.asarray(function(X, value))[0] == code(value), value
        assert function(X, float("nan")) is not None  # another object, and the same value
    assert len(traced) == len(STATICS)
    assert len({same.key(value) for value in STATICS}) == len(STATICS)


# JAX compares static values of other functions, and NumPy's scalars compare with containers element by element.
LEAVES = st.sampled_from([value for value in STATICS if not hasattr(value, "dtype")])
DRAWN = st.recursive(
    LEAVES,
    lambda parts: st.one_of(
        st.lists(parts, max_size=2).map(tuple), st.builds(Pair, parts, parts), st.builds(Options, parts, parts)
    ),
    max_leaves=3,
)


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_drawn_statics(frontend: str) -> None:
    function, _ = counted(frontend)

    @settings(max_examples=10, deadline=None)
    @given(DRAWN, st.booleans())
    def check(value: Any, by_name: bool) -> None:
        result = function(X, p=value) if by_name else function(X, value)
        # JAX keeps one program for (1,) and (1.0,): one that it has not seen says what is right.
        theirs = jax.jit(lambda x, p: x * 0 + code(p), static_argnums=1)
        np.testing.assert_array_equal(np.asarray(result), theirs(X, value))

    check()


def test_static_data_of_nodes_is_told_apart(frontend: str) -> None:
    function = stagec.jit(lambda state: state.x * 0 + code(state.kind), frontend=frontend)
    keys = stagec.jit(lambda table: next(x * 0 + code(key) for key, x in table.items()), frontend=frontend)
    compiled = stagec.jit(lambda state: state.x + 1, frontend=frontend).lower(State(X, X, 1)).compile()
    compiled(State(X, X, 1))
    for _ in range(2):
        for kind in (1, 1.0, True, Color.RED, np.int32(1), (1,), (True,)):
            assert np.asarray(function(State(X, X, kind)))[0] == code(kind)
            if not same.same(kind, 1):
                with pytest.raises(stagec.CallError, match=r"state: (kind is|its)"):
                    compiled(State(X, X, kind))
        for key in (1, 1.0, True):
            assert np.asarray(keys({key: X}))[0] == code(key)


def test_numbers_in_trees_are_traced(frontend: str) -> None:
    traced = []

    @stagec.jit(frontend=frontend)
    def function(state: Any, pair: Any) -> Any:
        traced.append(None)
        return state.x * state.step, pair.first + 1, pair.second

    for step in (1, 2, 3):
        results = function(State(X, step), Pair(step / 2, step > 1))
        theirs = jax.jit(lambda s, p: (s.x * s.step, p.first + 1, p.second))(State(X, step), Pair(step / 2, step > 1))
        for ours, expected in zip(results, theirs, strict=True):
            np.testing.assert_array_equal(np.asarray(ours), expected)
            assert np.asarray(ours).dtype == expected.dtype
    assert len(traced) == 1


def names_and_numbers(x: Any, n: Any, *, k: Any = 1) -> Any:
    return x * n * k


@pytest.mark.parametrize(
    "options",
    [
        {"static_argnums": 1},
        {"static_argnums": np.int32(1)},
        {"static_argnums": -1},
        {"static_argnums": (1,), "static_argnames": ()},
        {"static_argnums": (), "static_argnames": "n"},
        {"static_argnums": (), "static_argnames": ()},
        {"static_argnames": ("n", "k")},
        {"static_argnums": 1, "static_argnames": "k"},
    ],
    ids=str,
)
def test_which_arguments_are_static_is_as_in_jax(frontend: str, options: dict[str, Any]) -> None:
    ours = stagec.jit(names_and_numbers, **options, frontend=frontend)
    theirs = jax.jit(names_and_numbers, **options)
    for args, kwargs in (((X, 2), {}), ((X,), {"n": 2}), ((X, 2), {"k": 3}), ((X,), {"n": np.int32(2), "k": 3})):
        try:
            result = theirs(*args, **kwargs)
        except ValueError:  # what is counted from the end may be another argument
            with pytest.raises(ValueError, match="without a hash"):
                ours(*args, **kwargs)
            continue
        np.testing.assert_array_equal(np.asarray(ours(*args, **kwargs)), result)
        lowered, expected = ours.lower(*args, **kwargs), theirs.lower(*args, **kwargs)
        assert lowered.in_tree.num_leaves == expected.in_tree.num_leaves


MESH = Mesh((2,), ("d",))
SETTINGS: dict[str, dict[str, tuple[Callable[[], Any], ...]]] = {
    "jax": {
        "x64": tuple(lambda on=on: jax.enable_x64(on) for on in (False, True)),
        "threefry": tuple(lambda on=on: jax.threefry_partitionable(on) for on in (False, True)),
        "dtypes": tuple(lambda how=how: jax.numpy_dtype_promotion(how) for how in ("standard", "strict")),
        "ranks": tuple(lambda how=how: jax.numpy_rank_promotion(how) for how in ("allow", "warn", "raise")),
        "precision": tuple(lambda how=how: jax.default_matmul_precision(how) for how in ("bfloat16", "highest")),
        "keys": tuple(lambda how=how: jax.default_prng_impl(how) for how in ("threefry2x32", "rbg")),
        "mesh": (
            contextlib.nullcontext,
            lambda: jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((2,), ("d",))),
            lambda: jax.set_mesh(jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))),
        ),
    },
    "arrays": {
        "x64": tuple(lambda on=on: stagec_arrays.enable_x64(on) for on in (False, True)),
        "precision": tuple(
            lambda how=how: stagec_arrays.default_matmul_precision(how) for how in ("bfloat16", "highest")
        ),
        "mesh": (contextlib.nullcontext, lambda: stagec_arrays.set_mesh(MESH)),
    },
}


def told(frontend: str) -> object:
    """What a program can see of the settings while it is traced."""
    if frontend == "arrays":
        from stagec_arrays import dtypes, meshes
        from stagec_arrays.primitives import contractions

        return dtypes.x64(), contractions.default_precision(), meshes.current()
    names = ("enable_x64", "threefry_partitionable", "numpy_dtype_promotion", "numpy_rank_promotion")
    names = (*names, "default_matmul_precision", "default_prng_impl")
    mesh = jax.sharding.get_abstract_mesh()
    return *(str(getattr(jax.config, f"jax_{name}")) for name in names), mesh.axis_names, mesh.axis_sizes


@pytest.mark.parametrize(
    ("frontend", "setting"), [(name, setting) for name, table in SETTINGS.items() for setting in table]
)
def test_each_setting_is_in_the_key(frontend: str, setting: str) -> None:
    function = stagec.jit(lambda x: x * 0 + code(told(frontend)), frontend=frontend)
    seen = set()
    for _ in range(2):
        for context in SETTINGS[frontend][setting]:
            with context():
                seen.add(code(told(frontend)))
                assert np.asarray(function(X))[0] == code(told(frontend))
    assert len(seen) == len(SETTINGS[frontend][setting])


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_drawn_settings_and_statics(frontend: str) -> None:
    function = stagec.jit(lambda x, p: x * 0 + code((p, told(frontend))), static_argnames="p", frontend=frontend)
    contexts = st.fixed_dictionaries({}, optional={k: st.sampled_from(v) for k, v in SETTINGS[frontend].items()})

    @settings(max_examples=10, deadline=None)
    @given(contexts, LEAVES)
    def check(drawn: dict[str, Any], value: Any) -> None:
        with contextlib.ExitStack() as stack:
            for context in drawn.values():
                stack.enter_context(context())
            assert np.asarray(function(X, p=value))[0] == code((value, told(frontend)))

    check()


def test_results_under_drawn_settings_are_those_of_jax() -> None:
    def function(x: Any, key: Any, n: Any) -> Any:
        return x[None] @ x[:, None] * n, jax.random.bits(key, (5,)), x.sum(dtype=float) + n, jax.random.PRNGKey(n)

    ours, table = stagec.jit(function, static_argnames="n"), SETTINGS["jax"]
    names = ("x64", "threefry", "dtypes", "precision", "keys")

    @settings(max_examples=8, deadline=None)
    @given(st.fixed_dictionaries({name: st.sampled_from(table[name]) for name in names}), st.sampled_from([1, 2, True]))
    def check(drawn: dict[str, Any], n: Any) -> None:
        with contextlib.ExitStack() as stack:
            for context in drawn.values():
                stack.enter_context(context())
            key = np.array([1, 2], np.uint32)
            results = []
            for jitted in (ours, jax.jit(lambda *a, n: function(*a, n=n), static_argnames="n")):
                try:
                    results.append(jitted(np.arange(3.0), jax.random.wrap_key_data(key, impl="threefry2x32"), n=n))
                except Exception as error:  # noqa: BLE001 - JAX's, of any kind
                    results.append(type(error))
            if isinstance(results[1], type):
                assert results[0] is results[1]
                return
            for one, other in zip(*results, strict=True):
                np.testing.assert_array_equal(one, other)
                assert one.dtype == other.dtype

    check()


# JAX's settings that do not change a program: caches, checks, messages, transfers, and what compiles and runs.
NO_PROGRAM = """
    array_garbage_collection_guard captured_constants_report_frames captured_constants_warn_bytes
    check_tracer_leaks compilation_cache_check_contents compilation_cache_dir compilation_cache_expect_pgle
    compilation_cache_include_metadata_in_key compilation_cache_max_size compiler_enable_remat_pass
    cpu_collectives_implementation debug_infs debug_leaked_clients_on_clear_backends debug_log_modules
    debug_nans disable_bwd_checks disable_vmap_shmap_error disallow_mesh_context_manager distributed_debug enable_checks
    enable_compilation_cache exec_time_optimization_effort experimental_unsafe_xla_runtime_errors
    explain_cache_misses export_calling_convention_version export_ignore_forward_compatibility
    include_full_tracebacks_in_locations log_checkpoint_residuals log_compiles logging_level
    memory_fitting_effort memory_fitting_level no_tracing optimization_level persistent_cache_enable_xla_caches
    persistent_cache_min_compile_time_secs persistent_cache_min_entry_size_bytes pgle_aggregation_percentile
    pjrt_client_create_options platforms raise_persistent_cache_errors
    remove_custom_partitioning_ptr_from_cache_key send_traceback_to_runtime serialization_version
    share_binary_between_hosts share_binary_between_hosts_timeout_ms source_url_schema thread_guard
    traceback_filtering traceback_in_locations_limit transfer_guard transfer_guard_device_to_device
    transfer_guard_device_to_host transfer_guard_host_to_device use_magma
    distributed_verify_secure_credentials export_deserialize_expired_versions mtls_ca_file mtls_cert_file mtls_key_file
    mtls_peer_uri_prefix pallas_auto_assign_collective_ids_limit use_cpp_shard_args
"""
# Releases that added or dropped one of these settings or of `_BEYOND`, after 0.10.2.
ADDED = {
    (0, 11, 0): "pallas_auto_assign_collective_ids use_cpp_shard_args use_rgv3",
    (0, 11, 1): "export_deserialize_expired_versions",
    (0, 11, 2): "distributed_verify_secure_credentials mtls_ca_file mtls_cert_file mtls_key_file mtls_peer_uri_prefix "
    "pallas_auto_assign_collective_ids_limit",
    (0, 12, 0): "mosaic_unzip_debug_locations",
}
DROPPED = {(0, 11, 1): "exec_time_optimization_effort memory_fitting_effort refs_to_pins"}


def test_no_setting_of_jax_is_forgotten() -> None:
    assert config.__file__ is not None
    calls = [node for node in ast.walk(ast.parse(Path(config.__file__).read_text())) if isinstance(node, ast.Call)]
    in_context, others = set(), set()
    for call in calls:
        words = {word.arg: word.value for word in call.keywords}
        name = words.get("name") or (call.args[0] if call.args else None)
        kind = getattr(call.func, "id", "")
        if kind.endswith("_state") and isinstance(name, ast.Constant):
            (in_context if "include_in_trace_context" in words else others).add(name.value)
    assert "jax_enable_x64" in in_context
    here = jax.__version_info__
    absent = " ".join(
        [names for release, names in ADDED.items() if here < release]
        + [names for release, names in DROPPED.items() if here >= release]
    )
    known = {f"jax_{name}" for name in NO_PROGRAM.split()} | {*contexts.BEYOND}
    assert {name for name in others if not name.startswith("jax2tf_")} == known - {f"jax_{n}" for n in absent.split()}


def test_weak_types_of_an_export_are_those_of_jax(frontend: str) -> None:
    def function(a: Any, x: Any, b: Any) -> Any:
        return a * 2, a * x, b, 1j

    @settings(max_examples=8, deadline=None)
    @given(st.tuples(*(st.sampled_from([1, 2.5, 1j, True, np.float32(3), X]) for _ in range(3))))
    def check(args: tuple[Any, ...]) -> None:
        theirs = jax.export.export(jax.jit(function))(*args)
        ours = stagec.jit(function, frontend=frontend).trace(*args).export()
        read = stagec.Exported.deserialize(ours.serialize())
        expected = jax.export.deserialize(theirs.serialize())
        for mine, other in ((ours, theirs), (read, expected)):
            assert [aval.weak_type for aval in mine.in_avals] == [aval.weak_type for aval in other.in_avals]
        assert [aval.weak_type for aval in read.out_avals] == [aval.weak_type for aval in expected.out_avals]
        if frontend == "jax":
            assert [aval.weak_type for aval in ours.out_avals] == [aval.weak_type for aval in theirs.out_avals]

    check()


def test_what_is_donated_in_a_call(frontend: str) -> None:
    function = stagec.jit(lambda state: state + 1, donate_argnums=0, frontend=frontend)
    mine = X.copy()
    np.testing.assert_array_equal(np.asarray(function(mine)), X + 1)
    np.testing.assert_array_equal(mine, X)  # numpy's arrays are copied
    lowered = function.lower(mine)
    assert lowered.donated == (True,)
    state = stagec.device_put(X)
    np.testing.assert_array_equal(np.asarray(lowered.compile()(state)), X + 1)
    assert state.is_deleted()


def test_shardings(frontend: str) -> None:
    rows = NamedSharding(MESH, PartitionSpec("d"))
    function = stagec.jit(lambda x: x * 2, in_shardings=rows, out_shardings=rows, frontend=frontend)
    x = np.arange(4, dtype=np.float32)
    for _ in range(2):
        np.testing.assert_array_equal(np.asarray(function(x)), x * 2)
    assert function.lower(x).compile().nr_devices == 2


def test_methods(frontend: str) -> None:
    def jit(*args: Any, **kwargs: Any) -> Any:
        return stagec.jit(*args, **kwargs, frontend=frontend)

    class Model:
        def __init__(self, factor: Any) -> None:
            self.factor = factor

        @jit(static_argnums=0)
        def scaled(self, x: Any) -> Any:
            return x * self.factor

    one, other = Model(2.0), Model(3.0)
    for model in (one, other, one):
        np.testing.assert_array_equal(np.asarray(model.scaled(X)), X * model.factor)
    assert type(Model.scaled) is stagec.Wrapped
    np.testing.assert_array_equal(np.asarray(Model.scaled.lower(one, X).compile()(X)), X * 2)


def test_threads(frontend: str) -> None:
    function, _ = counted(frontend)
    wrong: list[Any] = []

    def call(offset: int) -> None:
        for i in range(16):
            value = STATICS[(i + offset) % 8]
            if np.asarray(function(X, value))[0] != code(value):
                wrong.append(value)

    threads = [threading.Thread(target=call, args=(offset,)) for offset in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_clear_cache(frontend: str) -> None:
    function, traced = counted(frontend)
    for _ in range(2):
        function(X, 1)
    function.clear_cache()
    function(X, 1)
    assert traced == [1, 1]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([1], "static argument number 1 is a list without a hash: unhashable type: 'list'; pass what has one"),
        (np.ones(2), "static argument number 1 is a ndarray without a hash"),
    ],
    ids=str,
)
def test_static_arguments_without_a_hash(frontend: str, value: Any, text: str) -> None:
    function, _ = counted(frontend)
    with pytest.raises(ValueError, match=text):
        function(X, value)


def test_an_argument_that_is_not_an_array(frontend: str) -> None:
    with pytest.raises(TypeError):
        stagec.jit(lambda x: x, frontend=frontend)("text")


def test_what_the_function_raises(frontend: str) -> None:
    def fails(x: Any) -> Any:
        raise KeyError("mine")

    for _ in range(2):
        with pytest.raises(KeyError, match="mine"):
            stagec.jit(fails, frontend=frontend)(X)


class Holder:
    def __init__(self) -> None:
        self.w: Any = [X]


class Layer(Holder):
    def grown(self, x: Any) -> Any:
        self.w[0] = self.w[0] + x
        return x * 2

    __hash__ = None  # type: ignore[assignment]


HELD = Holder()
COPIES = {"jax": "jax.tree.map(lambda leaf: leaf, params)", "arrays": "copy.deepcopy(params)"}


def argument(params: Any, x: Any) -> Any:
    params["w"] = params["w"] - x
    return x[0]


def returned(params: Any, x: Any) -> Any:
    return argument(params, x), params


def of_a_copy(params: Any, x: Any) -> Any:
    return argument(dict(params), x)


def taken_out(params: Any, x: Any) -> Any:
    return params.pop("w") + x


def held(params: Any, x: Any) -> Any:
    HELD.w[0] = x
    return x[0]


@pytest.mark.parametrize("way", ["__call__", "trace", "lower", "eval_shape"])
def test_an_update_that_a_call_would_lose(frontend: str, way: str) -> None:
    for function, changes in ((argument, "params['w']"), (held, "HELD.w[0] (")):
        for _ in range(2):
            with pytest.raises(ValueError, match="in place, and a call would lose the change") as refused:
                getattr(stagec.jit(function, frontend=frontend), way)({"w": X}, X)
            assert str(refused.value).startswith(f"{function.__name__} changes {changes}")
    HELD.w[0] = X
    with pytest.raises(ValueError, match="argument changes") as refused:
        getattr(stagec.jit(argument, frontend=frontend), way)({"w": X}, x=X)
    assert str(refused.value) == (
        "argument changes params['w'] in place, and a call would lose the change\n"
        "  return params too, and give the next call what the result has;\n"
        f"  if no caller needs the change, make it to a copy: params = {COPIES[frontend]}"
    )


def test_updates_of_objects(frontend: str) -> None:
    write = "\n  make it an argument, and return the new value beside the result"
    local, mine = Holder(), Layer()

    def closing(x: Any) -> Any:
        local.w = x
        return x + 1

    class Static(Holder):
        def grown(self, x: Any) -> Any:
            self.w = x
            return x + 1

    cases: list[tuple[Any, str, tuple[Any, ...]]] = [
        (stagec.jit(closing, frontend=frontend), "closing changes local.w (", (X,)),
        (stagec.jit(mine.grown, frontend=frontend), "grown changes self.w[0] (", (X,)),
        (stagec.jit(Static.grown, static_argnums=0, frontend=frontend), "grown changes self.w (", (Static(), X)),
    ]
    for function, text, args in cases:
        with pytest.raises(ValueError, match="a call would lose") as refused:
            function(*args)
        assert str(refused.value).startswith(text)
        assert str(refused.value).endswith(write)


def test_updates_that_are_not_lost(frontend: str) -> None:
    def jit(function: Any) -> Any:
        return stagec.jit(function, frontend=frontend)

    for _ in range(2):
        loss, params = jit(returned)({"w": X}, X)
        np.testing.assert_array_equal(np.asarray(params["w"]), X * 0)
        assert np.asarray(loss) == np.asarray(jit(of_a_copy)({"w": X}, X)) == X[0]
        np.testing.assert_array_equal(np.asarray(jit(taken_out)({"w": X}, X)), X * 2)

    @jit
    def outer(x: Any) -> Any:
        y, kept = x * 2, [x]  # values of the trace around the inner one

        @jit
        def inner(z: Any) -> Any:
            return z + y + kept[0]

        return inner(x)

    np.testing.assert_array_equal(np.asarray(outer(X)), X * 4)


def test_a_function_within_another(frontend: str) -> None:
    """JAX takes its arguments apart; what is part of a program of stagec's changes them for its caller."""
    inner = stagec.jit(argument, frontend=frontend)

    def outer(params: Any, x: Any) -> Any:
        inner(params, x)
        return params["w"]

    whole = stagec.jit(outer, frontend=frontend)
    rows = NamedSharding(Mesh((1,), ("d",)), PartitionSpec("d"))
    split = stagec.jit(argument, in_shardings=(None, rows), frontend=frontend)
    if frontend == "arrays":
        np.testing.assert_array_equal(np.asarray(whole({"w": X}, X)), X * 0)
    else:
        with pytest.raises(ValueError, match=r"argument changes params\['w'\]"):
            whole({"w": X}, X)
    with pytest.raises(ValueError, match=r"argument changes params\['w'\]"):
        stagec.jit(lambda params, x: split(params, x) + 1, frontend=frontend)({"w": X}, X)


def scaled(params: Any, n: Any, *, shift: Any) -> Any:
    return {"y": params["x"] * n + shift, "n": params["n"]}


def test_a_traced_function_is_as_in_jax(frontend: str) -> None:
    options: dict[str, Any] = {"static_argnums": 1, "donate_argnums": 0}
    params, shift = {"x": X, "n": np.int32(3)}, np.float32(1)
    traced = stagec.jit(scaled, **options, frontend=frontend).trace(params, 2, shift=shift)
    theirs = jax.jit(scaled, **options).trace(params, 2, shift=shift)
    assert type(traced) is stagec.Traced
    assert traced.jaxpr is traced.program
    assert (traced.fun_name, traced.donate_argnums) == (theirs.fun_name, theirs.donate_argnums)
    assert list(traced.donated) == [True, True, False]
    for name in ("in_avals", "out_avals", "args_info", "out_info"):
        ours, expected = getattr(traced, name), getattr(theirs, name)
        assert jax.tree.structure(ours) == jax.tree.structure(expected)
        for mine, other in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
            assert (tuple(mine.shape), mine.dtype) == (tuple(other.shape), other.dtype)
    assert (traced.in_tree.num_leaves, traced.out_tree.num_leaves) == (3, 2)
    assert repr(traced) == "Traced(scaled(i32[], f32[3], f32[]) -> (i32[], f32[3]))"
    assert traced.as_text() == f"{traced.jaxpr}\n"
    assert "mul" in traced.as_text()


def test_a_traced_function_evaluates_its_program(frontend: str) -> None:
    traced = stagec.jit(scaled, static_argnums=1, frontend=frontend).trace({"x": X, "n": 3}, 2, shift=X)
    result = traced({"x": X, "n": 5}, shift=X + 1)
    np.testing.assert_array_equal(np.asarray(result["y"]), X * 3 + 1)
    assert np.asarray(result["n"]) == 5
    with pytest.raises({"jax": AssertionError, "arrays": TypeError}[frontend]):  # the first is JAX's
        traced({"x": X}, shift=X)


def test_a_traced_function_is_lowered_for_one_platform_and_exported_for_several(frontend: str) -> None:
    options: dict[str, Any] = {"donate_argnums": 0, "compiler_options": {"xla_cpu_enable_fast_math": True}}
    traced = stagec.jit(lambda x: x + 1, **options, frontend=frontend).trace(X)
    for platform in ("cpu", "cuda", "tpu"):
        for lowered in (traced.lower((platform,)), traced.lower(lowering_platforms=(platform,))):
            assert (lowered.platform, lowered.donated) == (platform, (True,))
            assert lowered.compiler_options == {"xla_cpu_enable_fast_math": True}
    with pytest.raises(
        ValueError, match=r"lower\(\) takes one platform, not \('cpu', 'tpu'\); for several write export"
    ):
        traced.lower(("cpu", "tpu"))
    exported = traced.export(("cpu", "tpu"))
    assert exported.platforms == ("cpu", "tpu")
    assert exported.vjp().vjp().has_vjp()
    np.testing.assert_array_equal(np.asarray(exported.call(X)), X + 1)


def test_checks_of_an_export(frontend: str) -> None:
    traced = stagec.jit(lambda x: x + 1, frontend=frontend).trace(X)
    checks = [jax.export.DisabledSafetyCheck.custom_call("mine")]
    if frontend == "jax":
        assert len(traced.export(disabled_checks=checks).disabled_safety_checks) == 1
    else:
        with pytest.raises(TypeError, match="does not take disabled_checks"):
            traced.export(disabled_checks=checks)


def test_settings_at_the_time_of_a_trace_are_those_of_its_export(frontend: str) -> None:
    on = {"jax": jax.enable_x64, "arrays": stagec_arrays.enable_x64}[frontend]
    function = stagec.jit(lambda x: x * 2, frontend=frontend)
    with on(True):
        traced = function.trace(np.ones(2))
    assert [str(aval) for aval in traced.export().out_avals] == ["f64[2]"]
    assert [str(aval) for aval in function.trace(np.ones(2)).export().out_avals] == ["f32[2]"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"device": None}, r"jit\(\) does not take device"),
        ({"no_such": None}, r"jit\(\) (got an unexpected keyword argument|does not take) '?no_such"),
    ],
    ids=str,
)
def test_options_that_jit_does_not_take(frontend: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        stagec.jit(abs, **options, frontend=frontend)
