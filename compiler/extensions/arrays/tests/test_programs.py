"""Programs: derivatives and control flow against JAX's, artifacts that JAX reads, and no JAX anywhere.

Modules: `stagec_arrays/binding.py`, `stagec_arrays/modules.py`, `stagec_arrays/lowering.py`,
`stagec_arrays/program.py`, `stagec_arrays/pytrees.py`, `stagec_arrays/namespace/control.py`,
`stagec_arrays/primitives/control.py`.
"""

import copy
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jaxlib import _jax
from jaxlib.mlir.dialects import stablehlo

import stagec
import stagec_arrays
import stagec_arrays.lax
import stagec_arrays.nn
import stagec_arrays.numpy as xp
from stagec.stages import mlir
from stagec_arrays import modules
from tests.building import EXTENSIONS, ROOT

RNG = np.random.default_rng(0)
W, X = (RNG.normal(size=shape).astype(np.float32) for shape in ((3, 3), (4, 3)))


def mixture(n: Any, w: Any, x: Any) -> Any:
    h = n.tanh(x @ w)
    e = n.exp(h - n.max(h, axis=-1, keepdims=True))
    y = n.sort(e / n.sum(e, axis=-1, keepdims=True), axis=0)
    t = n.where(y > 0.3, y**3, n.sqrt(y))
    rows = n.take(t, n.asarray([0, 1, 1]), axis=0)
    return n.mean(n.concat([t, rows], axis=0)) + n.prod(w[0]) + n.var(h) + n.sum(n.cumulative_sum(t, axis=1)[1])


def loops(n: Any, w: Any, x: Any) -> Any:
    lax = stagec_arrays.lax if n is xp else jax.lax

    def turn(carry: Any, row: Any) -> Any:
        h = n.tanh(carry @ w + row)
        return h, (h * 2, n.sum(h))

    carry, (ys, sums) = lax.scan(turn, n.zeros((3,), dtype="float32"), x)
    chosen = lax.cond(sums[0] > 0, lambda a: a * w[0], lambda a: a + 1, carry)
    power = lax.fori_loop(0, 3, lambda i, v: v * 1.5 + i, n.sum(chosen))
    mapped = lax.map(lambda row: n.sum(row * carry), ys)
    return n.sum(ys**2) + power + n.sum(mapped) + lax.switch(1, [lambda a: a, n.sin], sums[1])


@pytest.mark.parametrize("function", [mixture, loops])
def test_values_and_gradients_are_jaxs(function: Callable[..., Any]) -> None:
    wanted = jax.value_and_grad(lambda w, x: function(jnp, w, x), (0, 1))(W, X)
    ours = stagec_arrays.value_and_grad(lambda w, x: function(xp, w, x), (0, 1))
    for found in (ours(W, X), stagec.jit(ours, frontend="arrays")(W, X)):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a), b, 2e-5, 2e-5), found, wanted)


def test_derivatives_of_derivatives() -> None:
    ours = stagec_arrays.grad(lambda w: xp.sum(stagec_arrays.grad(lambda w: loops(xp, w, X))(w) ** 2))
    theirs = jax.grad(lambda w: jnp.sum(jax.grad(lambda w: loops(jnp, w, X))(w) ** 2))
    wanted = theirs(W)
    found = np.asarray(stagec.jit(ours, frontend="arrays")(W))
    np.testing.assert_allclose(found, wanted, 1e-4, 1e-4 * float(np.abs(wanted).max()))


def test_what_has_no_derivative_says_so() -> None:
    def function(x: Any) -> Any:
        return stagec_arrays.lax.while_loop(lambda v: v < 10, lambda v: v * 2, x)

    assert float(function(1.0)) == 16
    with pytest.raises(TypeError, match="while has no derivative: how often the loop turns is not known"):
        stagec_arrays.grad(function)(1.0)
    with pytest.raises(TypeError, match="argument 0 has integers"):
        stagec_arrays.grad(lambda x: x * 1.0)(1)


def test_derivatives_of_the_users() -> None:
    @stagec_arrays.custom_vjp
    def ours(x: Any) -> Any:
        return xp.exp(x)

    ours.defvjp(lambda x: (ours(x), x), lambda x, g: (10 * g * x,))
    assert float(stagec_arrays.grad(ours)(2.0)) == 20
    assert float(stagec_arrays.grad(lambda x: stagec_arrays.stop_gradient(x) * x)(3.0)) == 3
    wanted = float(jax.grad(lambda x: jnp.sin(jnp.sin(x)))(1.0))
    assert float(stagec_arrays.grad(stagec_arrays.checkpoint(lambda x: xp.sin(xp.sin(x))))(1.0)) == pytest.approx(
        wanted
    )


def test_a_derivative_of_the_users_has_the_functions_name_in_a_programs_text() -> None:
    @stagec_arrays.custom_vjp
    def scaled(x: Any) -> Any:
        return x * 2

    scaled.defvjp(lambda x: (x * 2, None), lambda _, g: (g * 2,))

    def function(x: Any) -> Any:
        return scaled(
            stagec_arrays.nn.relu6(
                stagec_arrays.nn.relu(stagec_arrays.nn.softmax(stagec_arrays.lax.clamp(0.0, x, 1.0)))
            )
        )

    lines = stagec.jit(function, frontend="arrays").trace(X).as_text().splitlines()
    calls = [line.split("custom_vjp")[1] for line in lines if "custom_vjp" in line]
    names = [call.partition(" ")[0] for call in calls]
    assert names == [f"[derivative={name}]" for name in ("clamp", "softmax", "relu", "relu6", "scaled")]


def test_known_bools_are_what_they_are() -> None:
    for count in (2, 7, 9):
        mask = RNG.random(count) > 0.5
        found = stagec.jit(lambda x, mask=mask: xp.where(xp.asarray(mask), x, 0), frontend="arrays")(np.ones(count))
        np.testing.assert_array_equal(np.asarray(found), mask)


def test_a_loop_gives_what_it_takes() -> None:
    with pytest.raises(TypeError, match=r"the body of a loop takes \(f32\[2\]\) and gives \(f32\[1\]\)"):
        stagec_arrays.lax.while_loop(lambda x: x[0] < 3, lambda x: x[:1], np.ones(2, np.float32))


def test_an_artifact_is_jaxs_too() -> None:
    """`jax.export` reads it, calls it and differentiates it, here and twice."""
    wrapped = stagec.jit(lambda w, x: (mixture(xp, w["a"], x), xp.argmax(x)), frontend="arrays")
    exported = wrapped.trace({"a": W}, X).export(("cpu", "tpu"))
    stored = exported.serialize(vjp_order=2)
    theirs, ours = jax.export.deserialize(bytearray(stored)), stagec.Exported.deserialize(stored)
    wanted = jax.vjp(lambda w, x: mixture(jnp, w["a"], x), {"a": W}, X)
    assert exported.serialize(vjp_order=2) == stored
    np.testing.assert_allclose(theirs.call({"a": W}, X)[0], wanted[0], 2e-5)
    np.testing.assert_allclose(ours.call({"a": W}, X)[0], wanted[0], 2e-5)
    cotangents = np.float32(1), np.zeros((), jax.dtypes.float0)
    for found in theirs.vjp().call(W, X, *cotangents), ours.vjp().call(W, X, np.float32(1), np.False_):
        np.testing.assert_allclose(found[1], wanted[1](np.float32(1))[1], 2e-5, 2e-5)
    assert theirs.vjp().has_vjp()
    assert not theirs.vjp().vjp().has_vjp()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (mixture(xp, x, x), loops(xp, x, x)),  # of StableHLO alone
        lambda x: xp.log1p(xp.astype(x, "complex64")),  # one that StableHLO writes with others
        lambda x: stagec_arrays.lax.scan(
            lambda carry, row: (stagec_arrays.lax.erf(carry + row), row), x[0], x
        ),  # of CHLO, in a loop
    ],
)
def test_the_portable_form_is_xlas(function: Callable[..., Any]) -> None:
    traced = stagec.jit(function, frontend="arrays").trace(W)
    with mlir.make_context():
        ours = modules.portable(modules.module(traced.program, (0,), ("cpu",)))
        requirement = stablehlo.StablehloCompatibilityRequirement.WEEK_12
        version = stablehlo.get_version_from_compatibility_requirement(requirement)
        module = modules.module(traced.program, (0,), ("cpu",))
        assert ours == _jax.mlir.serialize_portable_artifact(module, version, True)


def test_one_artifact_for_all_sizes() -> None:
    batch, rows = stagec_arrays.symbolic_shape("batch, 2*rows", constraints=["batch >= 2"])

    def function(x: Any) -> Any:
        halves = x[:, : x.shape[1] // 2] + x[:, x.shape[1] // 2 :]
        return xp.mean(xp.reshape(halves, (-1,))), xp.concat([x, xp.zeros_like(x)], axis=0), xp.arange(x.shape[0])

    struct = stagec_arrays.ShapeDtypeStruct((batch, rows), xp.float32)
    exported = stagec.jit(function, frontend="arrays").trace(struct).export()
    assert [str(aval) for aval in exported.out_avals] == ["f32[]", "f32[2*batch,2*rows]", "i32[batch]"]
    theirs = jax.export.deserialize(bytearray(exported.serialize()))
    for sizes in ((2, 4), (5, 2)):
        x = RNG.normal(size=sizes).astype(np.float32)
        halves = x[:, : sizes[1] // 2] + x[:, sizes[1] // 2 :]
        for found in (exported.call(x), theirs.call(x)):
            np.testing.assert_allclose(found[0], halves.mean(), 1e-5, 1e-6)
            assert found[1].shape == (2 * sizes[0], sizes[1])
            assert list(found[2]) == list(range(sizes[0]))
    with pytest.raises(ValueError, match=r"do not match the symbolic shape constraint batch >= 2: batch = 1"):
        exported.call(np.ones((1, 2), np.float32))
    with pytest.raises(ValueError, match="Error refining shapes"):
        theirs.call(np.ones((1, 2), np.float32))


def test_a_scan_over_arrays_of_symbolic_sizes() -> None:
    def cumulated(n: Any, x: Any) -> Any:
        lax = stagec_arrays.lax if n is xp else jax.lax
        turn = lambda carry, row: (n.tanh(carry + row), carry * row)  # noqa: E731
        return lax.scan(turn, x[0] * 0, x, reverse=True)

    struct = stagec_arrays.ShapeDtypeStruct((3, *stagec_arrays.symbolic_shape("batch, 2*n")), xp.float32)
    exported = stagec.jit(lambda x: cumulated(xp, x), frontend="arrays").trace(struct).export()
    theirs = jax.export.deserialize(exported.serialize(1))
    x = np.random.default_rng(0).normal(size=(3, 5, 4)).astype(np.float32)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-6), theirs.call(x), cumulated(jnp, x))
    wanted = jax.grad(lambda x: cumulated(jnp, x)[1].sum())(x)
    np.testing.assert_allclose(jax.grad(lambda x: theirs.call(x)[1].sum())(x), wanted, 1e-5, 1e-6)


@pytest.mark.parametrize(
    "alias",
    [
        lambda x: xp.asarray(x, copy=True),
        lambda x: xp.astype(x, x.dtype),
        lambda x: xp.reshape(x, (3,), copy=True),
        lambda x: +x,
        xp.clip,
        lambda x: xp.concat([x]),
        lambda x: xp.sum(x, axis=()),
        copy.copy,
        copy.deepcopy,
    ],
)
def test_an_assignment_changes_one_object(alias: Callable[[Any], Any]) -> None:
    def function(x: Any) -> Any:
        y = alias(x)
        y[0] = 9
        return x, y

    for run in (function, stagec.jit(function, frontend="arrays")):
        x, y = run(xp.zeros(3))
        assert (float(x[0]), float(y[0])) == (0, 9)


def test_a_symbolic_size_is_no_number() -> None:
    struct = stagec_arrays.ShapeDtypeStruct(stagec_arrays.symbolic_shape("batch"), xp.float32)
    with pytest.raises(TypeError, match="the symbolic size batch is used as a number"):
        stagec.jit(lambda x: x * range(x.shape[0])[0], frontend="arrays").trace(struct)


def test_donation_and_statics() -> None:
    function = stagec.jit(lambda x, y, by: {"x": x * by + y}, frontend="arrays", static_argnames="by", donate_argnums=0)
    traced = function.trace(X, X, by=3)
    assert (traced.donate_argnums, str(traced.in_tree.num_leaves)) == ((0,), "2")
    x = stagec_arrays.numpy.asarray(X)
    np.testing.assert_array_equal(np.asarray(function(x, X, by=3)["x"]), X * 3 + X)
    assert x.is_deleted()


def test_there_is_no_jax(tmp_path: Path) -> None:
    """Traced, exported, compiled, called and loaded in a process that cannot import it; importing stagec is light."""
    code = f"""
        import sys
        sys.path[:0] = {[str(ROOT / "compiler"), *EXTENSIONS]!r}
        sys.modules["jax"] = None
        import numpy as np
        import stagec
        assert "stagec_arrays" not in sys.modules and "jaxlib" not in sys.modules
        import stagec_arrays.numpy as xp
        assert not any(name.startswith(("stagec.stages", "stagec.backends", "stagec.loader")) for name in sys.modules)

        @stagec.jit(frontend="arrays")
        def softmax(x):
            e = xp.exp(x - xp.max(x, axis=-1, keepdims=True))
            return e / xp.sum(e, axis=-1, keepdims=True)

        x = np.ones((2, 3), np.float32)
        exported = softmax.trace(x).export()
        results = [softmax(x), exported.call(x), exported and softmax.lower(x).compile()(x)]
        assert all(np.allclose(np.asarray(one), 1 / 3) for one in results)
        assert softmax.trace(x).as_text().startswith("{{ lambda ; a:f32[2,3] . let")
        assert "jaxlib.mlir.dialects._mhlo_ops_gen" not in sys.modules  # 8,000 objects
        try:
            stagec.jit(lambda x: x)
        except ModuleNotFoundError as error:
            assert 'or write frontend="arrays"' in str(error), error
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, cwd=tmp_path)


def test_classes_of_the_users(tmp_path: Path) -> None:
    """Registered without JAX: in calls, in artifacts, and in those that this process reads."""
    code = f"""
        import dataclasses, sys
        sys.path[:0] = {[str(ROOT / "compiler"), *EXTENSIONS]!r}
        sys.modules["jax"] = None
        import numpy as np
        import stagec
        import stagec_arrays

        @stagec_arrays.register_dataclass
        @dataclasses.dataclass
        class State:
            w: object
            rate: float = dataclasses.field(default=0.1, metadata={{"static": True}})

        class Pair:
            def __init__(self, a, b, tag):
                self.a, self.b, self.tag = a, b, tag

        stagec_arrays.register_pytree_node(Pair, lambda p: ((p.a, p.b), p.tag), lambda tag, parts: Pair(*parts, tag))

        @stagec.jit(frontend="arrays")
        def step(state, pair):
            return State(state.w * state.rate + pair.a, state.rate), Pair(pair.b, pair.a, pair.tag)

        arguments = State(np.ones(3, np.float32), 0.5), Pair(np.ones(3, np.float32), np.zeros(2, np.float32), "x")
        exported = stagec.Exported.deserialize(step.trace(*arguments).export().serialize())
        for state, pair in (step(*arguments), exported.call(*arguments)):
            assert (type(state), state.rate, type(pair), pair.tag) == (State, 0.5, Pair, "x")
            assert np.array_equal(np.asarray(state.w), [1.5, 1.5, 1.5]) and pair.a.shape == (2,)
        try:
            stagec_arrays.register_dataclass(dict)
        except TypeError as error:
            assert str(error) == "builtins:dict is not a dataclass: give data_fields and meta_fields"
        else:
            raise AssertionError
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, cwd=tmp_path)


def test_arrays_of_jaxs_are_taken_as_numpys_are_and_what_it_traces_is_not() -> None:
    x = xp.asarray([1.0, 2.0, 3.0])
    for found in (x + jnp.ones(3), jnp.ones(3) + x, xp.add(jnp.ones(3), x)):
        assert isinstance(found, type(x))
        np.testing.assert_array_equal(np.asarray(found), [2, 3, 4])
    for mixed in (xp.sin, lambda y: x + y):
        with pytest.raises(TypeError, match="JAX traces this value, so a function of stagec"):
            jax.jit(mixed)(jnp.ones(3))


def test_a_recursion_without_an_end_is_the_users_own() -> None:
    def f(x: Any) -> Any:
        return f(x) + 1

    with pytest.raises(RecursionError) as found:
        stagec.jit(f, frontend="arrays").trace(stagec_arrays.ShapeDtypeStruct((3,), "float32"))
    assert [entry.path for entry in found.traceback][-1] == Path(__file__)
    # Nothing of that trace is left.
    np.testing.assert_array_equal(np.asarray(xp.asarray([1.0]) + 1), [2])
