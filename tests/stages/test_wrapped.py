"""`stagec.jit`: JAX's first stages in front of stagec's own.

Modules: `frontends/jax/exporting.py`, `frontends/jax/tracer.py`, `frontends/common/jit.py`,
`frontends/common/options.py`, `frontends/staging.py`.
"""

import collections
import contextlib
import dataclasses
import functools
import inspect
import re
import threading
import types
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import stagec
from stagec.core.messages.errors import StagecError
from stagec.core.sizes.avals import parse_aval
from stagec.frontends.common.jit import Traced, Wrapped
from stagec.frontends.common.options import Options
from stagec.stages.info import ArgInfo
from stagec.stages.shardings import Mesh, NamedSharding, PartitionSpec
from tests.conformance.views import portable


def f32(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def scale(x: Any, n: int, *, shift: float = 0.0) -> Any:
    """Multiply and add."""
    return x * n + shift


def test_a_wrapped_function() -> None:
    wrapped = stagec.jit(scale, static_argnames=("n", "shift"))
    assert isinstance(wrapped, Wrapped)
    assert (wrapped.__name__, wrapped.__doc__, repr(wrapped)) == ("scale", "Multiply and add.", "Wrapped(scale)")
    for args, kwargs in (((f32(3), 2), {}), ((f32(3), 3), {"shift": 1.5}), ((f32(3),), {"n": 2}), ((f32(4), 2), {})):
        result = wrapped(*args, **kwargs)
        assert type(result) is np.ndarray
        np.testing.assert_array_equal(result, jax.jit(scale, static_argnames=("n", "shift"))(*args, **kwargs))


@pytest.mark.parametrize(
    "options", [{"static_argnums": 1}, {"static_argnums": (-1,)}, {"static_argnames": "n"}], ids=lambda o: next(iter(o))
)
def test_static_arguments_are_found_by_number_and_by_name(options: dict[str, Any]) -> None:
    def power(x: Any, n: int) -> Any:
        return x**n

    wrapped = stagec.jit(power, **options)
    np.testing.assert_array_equal(wrapped(f32(3), 2), f32(3) * f32(3))
    np.testing.assert_array_equal(wrapped(f32(3), 1), f32(3))
    lowered = wrapped.lower(f32(3), 2)
    assert lowered.in_tree.num_leaves == 1
    np.testing.assert_array_equal(lowered.compile()(f32(3)), f32(3) * f32(3))
    if "static_argnums" not in options or options["static_argnums"] == 1:
        np.testing.assert_array_equal(wrapped(f32(3), n=2), f32(3) * f32(3))


def test_each_signature_is_traced_once() -> None:
    traced = []

    @stagec.jit
    def function(x: Any) -> Any:
        traced.append(x.shape)
        return x + 1

    for shape in ((3,), (4,), (3,), (4,)):
        function(f32(*shape))
    assert traced == [(3,), (4,)]
    function(1.0)  # weakly typed
    function(np.float32(1))
    assert traced == [(3,), (4,), (), ()]


class Window:
    """An array, and static data."""

    def __init__(self, array: Any, index: Any) -> None:
        self.array, self.index = array, index


jax.tree_util.register_pytree_node(Window, lambda w: ((w.array,), w.index), lambda index, c: Window(c[0], index))


@dataclasses.dataclass
class Changing:
    factor: Any


class Same:
    """What has a comparison and no hash."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same)

    __hash__: Any = None


@pytest.mark.parametrize(("setting", "x"), [("jax_debug_nans", -1.0), ("jax_debug_infs", 0.0)])
def test_settings_that_look_at_results(setting: str, x: float) -> None:
    def function(x: Any) -> Any:
        return {"log": jnp.log(x)}

    wrapped = stagec.jit(function)
    for _ in range(2):  # also after a call that was compiled
        assert not np.isfinite(wrapped(np.float32(x))["log"])
        jax.config.update(setting, True)
        try:
            messages = []
            for jitted in (wrapped, jax.jit(function)):
                with pytest.raises(FloatingPointError) as error:
                    jitted(np.float32(x))
                messages.append(str(error.value))
            assert messages[0] == messages[1]
            assert type(wrapped(np.float32(1))["log"]) is np.ndarray
        finally:
            jax.config.update(setting, False)


STATIC: dict[str, Any] = {
    "an index": (..., slice(1)),
    "constants of C": (NotImplemented, Ellipsis),
    "an ordered dict": collections.OrderedDict(a=[1]),
    "a mutable dataclass": Changing(2),
    "a deque": collections.deque([1]),
    "a mapping": {"a": [Changing(1), types.MappingProxyType({1: [2]})]},
    "bytes": bytearray(b"a"),
    "a comparison": Same(),
}


@pytest.mark.parametrize("name", STATIC)
def test_static_data_of_nodes_without_a_hash(name: str) -> None:
    """JAX wants a hash of static arguments alone."""
    given = Window(f32(4, 3), STATIC[name])

    def double(window: Window) -> Window:
        return Window(window.array * 2, window.index)

    wrapped, jitted = stagec.jit(double), jax.jit(double)
    for _ in range(2):
        result, wanted = wrapped(given), jitted(given)
        assert result.index is wanted.index is given.index
        np.testing.assert_array_equal(result.array, wanted.array)
    if name != "a mapping":  # nobody can describe a view of a dict
        read = stagec.Exported.deserialize(wrapped.trace(given).export().serialize())
        np.testing.assert_array_equal(read.call(given).array, wanted.array)


def test_static_data_is_compared_in_type_and_value() -> None:
    traced = []

    @stagec.jit
    def scaled(window: Window) -> Any:
        traced.append(window.index.factor)
        return window.array * window.index.factor

    for factor in (2, 2.0, [2], True, 2, 2.0):
        with contextlib.suppress(TypeError):  # of a list
            scaled(Window(np.ones(3, np.int32), Changing(factor)))
    assert list(map(repr, traced)) == ["2", "2.0", "[2]", "True"]


@pytest.mark.parametrize("static", [re.compile("a"), threading.Lock()], ids=["a pattern", "a lock"])
def test_what_cannot_be_described_is_not_written(static: Any) -> None:
    wrapped, given = stagec.jit(lambda window: window.array * 2), Window(f32(3), static)
    np.testing.assert_array_equal(wrapped(given), f32(3) * 2)  # here, everybody knows what it is
    messages = []
    for write in (wrapped.trace(given).export, wrapped.lower(given).compile().serialize):
        with pytest.raises(StagecError) as error:
            write()
        messages.append(str(error.value))
    assert messages[0] == messages[1]
    assert messages[0].startswith(f"<lambda>: the arguments have a {__name__}.Window (your class), which cannot be")


def test_keys_that_cannot_be_described_are_not_written() -> None:
    compiled = stagec.jit(lambda x: {frozenset({1, 2}): x}).lower(f32(3)).compile()
    with pytest.raises(StagecError, match="the result has a dict with a key that cannot be described"):
        compiled.serialize()


def test_a_decorator_with_options() -> None:
    @stagec.jit(static_argnames="n")
    def function(x: Any, n: int) -> Any:
        return x * n

    np.testing.assert_array_equal(function(f32(3), n=3), f32(3) * 3)


def methods(jit: Any) -> type:
    """A class with methods of each kind, made by `stagec.jit` or `jax.jit`."""

    class Model:
        def __init__(self, factor: float) -> None:
            self.factor = factor

        def plain(self, x: Any) -> Any:
            return x * self.factor

        @functools.partial(jit, static_argnums=(0, 1))
        def scaled(self, n: int, x: Any) -> Any:
            return x * self.factor * n

        @functools.partial(jit, static_argnames="self")
        def shifted(self, x: Any) -> Any:
            return self.scaled(2, x) + 1

        tripled = functools.partialmethod(scaled, 3)

        @classmethod
        @functools.partial(jit, static_argnums=0)
        def named(cls, x: Any) -> Any:
            return x + len(cls.__name__)

        @staticmethod
        @jit
        def alone(x: Any) -> Any:
            return x - 1

    @jax.tree_util.register_pytree_node_class
    class Node(Model):
        @jit
        def called(self, x: Any) -> Any:
            return x * self.factor

        def shifted(self, x: Any) -> Any:
            return super().shifted(x) * 10

        def tree_flatten(self) -> Any:
            return (self.factor,), None

        @classmethod
        def tree_unflatten(cls, _: Any, children: Any) -> Any:
            return cls(*children)

    return Node


CALLS: dict[str, Any] = {
    "static self": lambda jit, model, x: model(2.0).scaled(3, x),
    "of the class": lambda jit, model, x: model.scaled(model(2.0), 3, x),
    "inherited": lambda jit, model, x: model(2.0).shifted(x),
    "partialmethod": lambda jit, model, x: model(2.0).tripled(x),
    "class method": lambda jit, model, x: (model.named(x), model(2.0).named(x)),
    "static method": lambda jit, model, x: (model.alone(x), model(2.0).alone(x)),
    "traced self": lambda jit, model, x: model(2.0).called(x),
    "bound": lambda jit, model, x: jit(model(2.0).plain)(x),
    "partial": lambda jit, model, x: jit(functools.partial(model.plain, model(2.0)))(x),
    "unbound": lambda jit, model, x: jit(model.plain, static_argnums=0)(model(2.0), x),
    "bound and jitted": lambda jit, model, x: jit(model(2.0).scaled, static_argnums=0)(3, x),
    "grad": lambda jit, model, x: jax.grad(lambda x: model(2.0).scaled(3, x).sum())(x),
    "vmap": lambda jit, model, x: jax.vmap(model(2.0).shifted)(x),
    "closes over a tracer": lambda jit, model, x: jax.jit(lambda x: jit(lambda y: y + x)(1.0))(x),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_methods_are_as_in_jax(call: Any) -> None:
    x = f32(3)
    ours, theirs = (jax.tree.leaves(call(jit, methods(jit), x)) for jit in (stagec.jit, jax.jit))
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_method_is_bound_to_its_instance() -> None:
    model = methods(stagec.jit)
    assert type(model.scaled) is Wrapped
    assert type(model(2.0).scaled) is types.MethodType
    # As in JAX: the members of a bound method are those of the function.
    instance = model(2.0)
    lowered = instance.scaled.lower(instance, 3, f32(3))
    np.testing.assert_array_equal(lowered.compile()(f32(3)), f32(3) * 6)
    assert stagec.jit(functools.partial(scale, n=2)).__name__ == jax.jit(functools.partial(scale, n=2)).__name__


@pytest.mark.parametrize("options", [{"static_argnums": 1}, {"static_argnames": "n"}], ids=lambda o: next(iter(o)))
def test_a_static_argument_without_a_hash(options: dict[str, Any]) -> None:
    what = r"Wrapped\(<lambda>\): static argument 'n' is a list without a hash: .*; pass what has one, such as a tuple"
    with pytest.raises(ValueError, match=what):
        stagec.jit(lambda x, n: x, **options)(f32(3), n=[1])


def test_attributes_of_a_callable_object() -> None:
    class Function:
        def __init__(self) -> None:
            self.factor = 2.0
            self._jitted = self._compiled = None

        def __call__(self, x: Any) -> Any:
            return x * self.factor

    wrapped = stagec.jit(stagec.jit(Function()))
    assert wrapped.factor == 2.0
    np.testing.assert_array_equal(wrapped(f32(3)), f32(3) * 2)


def test_every_parameter_of_jax_jit_is_taken_or_refused() -> None:
    ours = {"fun", *Options.__annotations__}
    refused = set(inspect.signature(jax.jit).parameters) - ours
    assert refused == {"device", "backend"}


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("device", "write in_shardings and out_shardings over a mesh, or name a target when compiling"),
        ("backend", 'write lower(platforms=("tpu",)) or export(platforms=("tpu",))'),
        ("abstracted_axes", "write symbolic dimensions instead"),
        ("no_such", "jit() got an unexpected keyword argument 'no_such'"),
    ],
)
def test_what_jit_refuses(name: str, advice: str) -> None:
    with pytest.raises(TypeError) as error:
        stagec.jit(scale, **{name: None})
    assert advice in str(error.value)


def test_python_numbers_and_wide_arrays() -> None:
    function = stagec.jit(lambda x, y: x * y)
    for args in ((2, 3.5), (np.float64(2), 3), (np.arange(3.0), 2), (jnp.arange(3), True), (2, 3)):
        result, expected = function(*args), jax.jit(lambda x, y: x * y)(*args)
        assert result.dtype == expected.dtype
        np.testing.assert_array_equal(result, expected)


def test_disabled_jit_calls_the_function_itself() -> None:
    def positive(x: Any, n: int) -> Any:
        """Not to be traced: its result depends on values."""
        assert type(x) is np.ndarray
        return {"n": n, "x": jnp.sin(x) * n if x.sum() > 0 else x, "key": jax.random.key(n)}

    ours, theirs = (jit(positive, static_argnames="n") for jit in (stagec.jit, jax.jit))
    for x in (f32(3), -np.abs(f32(3)), np.ones(3)):
        with jax.disable_jit():
            result, expected = ours(x, n=2), theirs(x, n=2)
        assert (result["n"], type(result["x"]), result["x"].dtype) == (2, np.ndarray, expected["x"].dtype)
        np.testing.assert_array_equal(result["x"], expected["x"])
        np.testing.assert_array_equal(result["key"], jax.random.key_data(expected["key"]))
    with pytest.raises(AssertionError):
        ours(f32(3), n=2)  # a tracer


def test_keys() -> None:
    function = stagec.jit(lambda key: jax.random.normal(key, (3,)))
    np.testing.assert_array_equal(function(jax.random.key(1)), jax.random.normal(jax.random.key(1), (3,)))
    words = stagec.jit(jax.random.key)(7)
    np.testing.assert_array_equal(words, jax.random.key_data(jax.random.key(7)))


Pair = collections.namedtuple("Pair", ["first", "second"])  # noqa: PYI024  # types at run time only


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    count: Any
    weights: Any


class Opaque:
    """A node that says nothing of its fields."""

    def __init__(self, child: Any) -> None:
        self.child = child


jax.tree_util.register_pytree_node(Opaque, lambda node: ((node.child,), None), lambda _, children: Opaque(*children))


def test_types_of_the_users_own() -> None:
    function = stagec.jit(
        lambda state, pair, opaque: (State(state.count + 1, pair), Opaque(opaque.child * 2), {1: pair})
    )
    state, opaque, numbered = function(State(np.int32(1), f32(2)), Pair(f32(2), f32(3)), Opaque(f32(1)))
    assert isinstance(state, State)
    assert isinstance(state.weights, Pair)
    assert isinstance(opaque, Opaque)
    np.testing.assert_array_equal(opaque.child, f32(1) * 2)
    np.testing.assert_array_equal(numbered[1].second, f32(3))


def test_a_compiled_function_takes_them_or_their_fields() -> None:
    compiled = stagec.jit(lambda state: State(state.weights, state.count)).lower(State(f32(2), f32(3))).compile()
    for argument in (State(f32(2), f32(3)), {"count": f32(2), "weights": f32(3)}):
        result = compiled(argument)
        assert isinstance(result, State)
        np.testing.assert_array_equal(result.count, f32(3))


def test_a_traced_function() -> None:
    traced = stagec.jit(scale, static_argnums=1, donate_argnums=0).trace(f32(3), 2, shift=np.float32(1))
    theirs = jax.jit(scale, static_argnums=1, donate_argnums=0).trace(f32(3), 2, shift=np.float32(1))
    assert isinstance(traced, Traced)
    assert traced.fun_name == theirs.fun_name == "scale"
    assert str(traced.jaxpr) == str(theirs.jaxpr)
    assert traced.args_info == (
        (ArgInfo((3,), np.dtype("float32"), True),),
        {"shift": ArgInfo((), np.dtype("float32"), False)},
    )
    assert list(traced.in_tree.paths()) == ["[0][0]", "[1]['shift']"]
    assert (traced.in_tree.num_leaves, traced.out_tree.num_leaves) == (2, 1)
    lowered = traced.lower()
    assert lowered.donated == (True, False)
    assert (lowered.in_tree, lowered.out_tree) == (traced.in_tree, traced.out_tree)
    np.testing.assert_array_equal(lowered.compile()(f32(3), shift=np.float32(1)), f32(3) * 2 + 1)


def test_each_platform() -> None:
    traced = stagec.jit(jnp.sin).trace(f32(3))
    assert [traced.lower((platform,)).platform for platform in ("cpu", "cuda", "tpu")] == ["cpu", "cuda", "tpu"]
    with pytest.raises(ValueError, match=r"lower\(\) takes one platform, not \('cpu', 'tpu'\)"):
        traced.lower(("cpu", "tpu"))
    exported = traced.export(("cpu", "tpu"))
    assert exported.platforms == ("cpu", "tpu")
    np.testing.assert_array_equal(exported.call(f32(3)), jax.jit(jnp.sin)(f32(3)))
    assert exported.vjp().vjp().has_vjp()
    assert stagec.Exported.deserialize(exported.serialize(vjp_order=2)).vjp().has_vjp()
    assert jax.export.deserialize(bytearray(exported.serialize())).platforms == ("cpu", "tpu")


def test_what_was_traced_is_lowered_whatever_is_set_then() -> None:
    mesh = jax.sharding.AbstractMesh((2,), ("d",), (jax.sharding.AxisType.Auto,))
    split: Any = jax.lax.with_sharding_constraint
    with jax.enable_x64(True), jax.sharding.use_abstract_mesh(mesh):

        def function(x: Any) -> Any:
            return split(jnp.cumsum(x) + jnp.arange(4), jax.P("d"))

        ours: Traced = stagec.jit(function).trace(np.ones(4))
        theirs = jax.jit(function).trace(np.ones(4))
    assert portable(ours.lower().as_text()) == portable(theirs.lower(lowering_platforms=("cpu",)).as_text())
    assert ours.export().out_avals == (parse_aval("f64[4]"),)


def test_calls_that_no_version_guarantees() -> None:
    def pivoted(x: jax.Array) -> Any:
        return jax.scipy.linalg.qr(x, pivoting=True)

    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    for ours, theirs in zip(stagec.jit(pivoted)(x), jax.jit(pivoted)(x), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    with pytest.raises(ValueError, match="custom calls whose targets have no compatibility guarantees"):
        stagec.jit(pivoted).trace(x).export()


def test_symbolic_dimensions() -> None:
    (batch,) = jax.export.symbolic_shape("batch", constraints=["mod(batch, 8) == 0", "batch <= 64"])
    traced = stagec.jit(lambda x: jnp.concatenate([x, x])).trace(jax.ShapeDtypeStruct((batch,), jnp.float32))
    exported = traced.export()
    assert exported.call(f32(16)).shape == (32,)
    for size, text in ((12, "floordiv"), (72, "batch <= 64")):
        with pytest.raises(stagec.CannotLower, match=text):
            exported.call(f32(size))
    with pytest.raises(stagec.CannotLower, match='dimension "batch" has no size'):
        traced.lower()


def test_callbacks_are_refused() -> None:
    def talks(x: Any) -> Any:
        jax.debug.print("{}", x)
        return x

    with pytest.raises(NotImplementedError, match=r": a host callback \(debug_print\) cannot be built"):
        stagec.jit(talks)(f32(1))


def test_compiler_options() -> None:
    wrapped = stagec.jit(jnp.exp, compiler_options={"xla_cpu_enable_fast_math": True})
    compiled = wrapped.lower(f32(3)).compile({"xla_cpu_copy_insertion_use_region_analysis": True})
    assert compiled.description.target.compiler_options == {
        "xla_cpu_copy_insertion_use_region_analysis": True,
        "xla_cpu_enable_fast_math": True,
    }
    with pytest.raises(stagec.CannotCompile, match="has no option xla_cpu_no_such"):
        stagec.jit(jnp.exp, compiler_options={"xla_cpu_no_such": 1})(f32(3))


def test_donation_and_kept_arguments() -> None:
    def function(state: Any, unused: Any) -> Any:
        return state + 1

    compiled = stagec.jit(function, donate_argnames="state", keep_unused=True).lower(f32(3), f32(2)).compile()
    assert compiled.description.kept_var_idx == (0, 1)
    state = stagec.device_put(f32(3))
    np.testing.assert_array_equal(compiled(state, f32(2)), f32(3) + 1)
    assert state.is_deleted()
    mine = f32(3)
    stagec.jit(function, donate_argnums=0)(mine, f32(2))
    np.testing.assert_array_equal(mine, f32(3))


def test_shardings_over_our_own_mesh() -> None:
    mesh = Mesh((2, 2), ("x", "y"))
    rows, columns = NamedSharding(mesh, PartitionSpec("x", None)), NamedSharding(mesh, PartitionSpec(None, "y"))
    wrapped = stagec.jit(lambda a, b: a @ b, in_shardings=(rows, columns), out_shardings=rows)
    a, b = np.arange(32, dtype=np.float32).reshape(8, 4), np.arange(24, dtype=np.float32).reshape(4, 6)
    np.testing.assert_array_equal(wrapped(a, b), a @ b)
    compiled = wrapped.lower(a, b).compile()
    assert compiled.nr_devices == 4
    assert str(compiled.output_shardings.spec) == "P(x)"
    exported = wrapped.trace(a, b).export()
    assert exported.in_shardings_jax(mesh) == (rows, columns)


def test_what_is_raised_while_tracing_is_the_users_own() -> None:
    def fails(x: Any) -> Any:
        raise KeyError(x.shape)

    with pytest.raises(KeyError, match="3"):
        stagec.jit(fails)(f32(3))
