"""Functions of bundles inside JAX: jit, grad and vmap give what JAX gives for the function itself.

Modules: `jax.py`.
"""

import doctest
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stagec
import stagec.jax
from tests.building import ROOT, build_model

MANIFEST = """
[manifest]
name = "m"
version = "1"
[functions.mlp]
entry = "model:mlp"
args = [{ w = "f32[6,4]", b = "f32[4]" }, "f32[batch,6]"]
vjp_order = 2
targets = ["cpu-avx2"]
buckets = { batch = [2] }
[functions.mixed]
entry = "model:mixed"
platforms = ["cpu"]
args = ["f32[batch,3]", "i32[batch]"]
kwargs = { scale = "f32[]" }
vjp_order = 1
[functions.mean]
entry = "model:mean"
platforms = ["cpu"]
args = ["f32[batch,3]"]
vjp_order = 1
[functions.doubled]
entry = "model:doubled"
platforms = ["cpu"]
args = ["f32[batch]"]
[functions.columns]
entry = "model:columns"
platforms = ["cpu"]
args = ["f32[3,batch]"]
[functions.power]
entry = "model:power"
platforms = ["cpu"]
args = ["f32[3]"]
vjp_order = 1
[functions.power.variants.square]
static = { n = 2 }
[functions.power.variants.cube]
static = { n = 3 }
[functions.draw]
entry = "model:draw"
platforms = ["cpu"]
args = ["key<fry>[]", "f32[3]"]
vjp_order = 1
[functions.typed]
entry = "model:typed"
platforms = ["cpu"]
avals = "model:typed_avals"
vjp_order = 1
"""
MODEL = """
import dataclasses
import functools
import jax
import jax.numpy as jnp

def mlp(params, x):
    return jnp.tanh(x @ params["w"] + params["b"]).sum(axis=1)

def mixed(x, labels, *, scale):
    return {"loss": scale * jnp.take_along_axis(jax.nn.log_softmax(x), labels[:, None], 1)[:, 0], "labels": labels + 1}

def mean(x):
    return (x**2).mean(axis=0), x - x.mean()

def doubled(x):
    return jnp.concatenate([x, x])

def columns(x):
    return {"y": jnp.cumsum(x, axis=0)}

def power(x, *, n):
    return x**n

def draw(key, x):
    return jax.random.split(key), x * jax.random.normal(key, (3,))

@functools.partial(jax.tree_util.register_dataclass, data_fields=["x"], meta_fields=["unit"])
@dataclasses.dataclass
class Length:
    x: jax.Array
    unit: str

def typed(length):
    return Length(length.x**2, length.unit)

def typed_avals():
    return (Length(jax.ShapeDtypeStruct((3,), jnp.float32), "m"),)
"""
RNG = np.random.default_rng(0)
PARAMS = {"w": RNG.random((6, 4), np.float32), "b": RNG.random(4, np.float32)}
X = RNG.random((3, 5, 6), np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("jax_functions")
    build_model(folder, MANIFEST, MODEL)
    return folder


@pytest.fixture
def model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    import importlib

    monkeypatch.syspath_prepend(str(folder))
    return importlib.import_module("model")


@pytest.fixture
def bundle(folder: Path) -> Iterator[stagec.Bundle]:
    with stagec.load(folder / "m.aot") as loaded:
        yield loaded


def close(own: Any, theirs: Any) -> None:
    structures: list[Any] = [jax.tree.structure(own), jax.tree.structure(theirs)]
    assert structures[0] == structures[1]
    for a, b in zip(jax.tree.leaves(own), jax.tree.leaves(theirs), strict=True):
        assert isinstance(a, jax.Array)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6)


def summed(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: jnp.sum(jnp.sin(f(*arguments)))


TRANSFORMED: dict[str, Callable[[Any], Any]] = {
    "call": lambda f: f(PARAMS, X[0]),
    "jit": lambda f: jax.jit(f)(PARAMS, X[0]),
    "grad": lambda f: jax.grad(summed(f), (0, 1))(PARAMS, X[0]),
    "jit of grad": lambda f: jax.jit(jax.grad(summed(f)))(PARAMS, X[0]),
    "vmap": lambda f: jax.vmap(f, (None, 0))(PARAMS, X),
    "vmap along another axis": lambda f: jax.vmap(f, (None, 1), 1)(PARAMS, np.moveaxis(X, 0, 1)),
    "jit of vmap": lambda f: jax.jit(jax.vmap(f, (None, 0)))(PARAMS, X),
    "vmap of vmap": lambda f: jax.vmap(jax.vmap(f, (None, 0)), (None, 0))(PARAMS, np.stack([X, X + 1])),
    "grad of vmap": lambda f: jax.grad(summed(jax.vmap(f, (None, 0))), (0, 1))(PARAMS, X),
    "vmap of grad": lambda f: jax.vmap(jax.grad(summed(f), (0, 1)), (None, 0))(PARAMS, X),
    "vmap of grad of rows": lambda f: jax.jit(jax.vmap(jax.grad(summed(f), 1), (None, 0)))(PARAMS, X),
    "scan": lambda f: jax.lax.scan(lambda carry, x: (carry + f(PARAMS, x).sum(), carry), 0.0, X),
    "grad of grad": lambda f: jax.grad(lambda x: jnp.sum(jax.grad(summed(f), 1)(PARAMS, x) ** 2))(X[0]),
    "vmap of no rows": lambda f: jax.vmap(f, (None, 0))(PARAMS, X[:0]),
    "grad of vmap of no rows": lambda f: jax.grad(summed(jax.vmap(f, (None, 0))))(PARAMS, X[:0]),
    "vmap of grad of no rows": lambda f: jax.jit(jax.vmap(jax.grad(summed(f), (0, 1)), (None, 0)))(PARAMS, X[:0]),
    "jacrev of jacrev": lambda f: jax.jacrev(jax.jacrev(lambda x: f(PARAMS, x).sum()))(X[0]),
    "checkpoint": lambda f: jax.grad(summed(jax.checkpoint(f)))(PARAMS, X[0]),
}


@pytest.mark.parametrize("vmap", ["batch", "loop"])
@pytest.mark.parametrize("transformation", TRANSFORMED)
def test_transformations(bundle: stagec.Bundle, model: Any, transformation: str, vmap: str) -> None:
    own = stagec.jax.function(bundle, "mlp", vmap=vmap)
    close(TRANSFORMED[transformation](own), TRANSFORMED[transformation](model.mlp))


FORWARD: dict[str, Callable[[Any], Any]] = {
    "jvp": lambda f: jax.jvp(f, (PARAMS, X[0]), (jax.tree.map(np.cos, PARAMS), X[1])),
    "jit of jvp": lambda f: jax.jit(lambda x, v: jax.jvp(lambda x: f(PARAMS, x), (x,), (v,)))(X[0], X[1]),
    "jacfwd": lambda f: jax.jacfwd(f, (0, 1))(PARAMS, X[0]),
    "vmap of jvp": lambda f: jax.vmap(lambda x: jax.jvp(f, (PARAMS, x), (PARAMS, x)))(X),
    "linearize": lambda f: jax.linearize(f, PARAMS, X[0])[1](PARAMS, X[1]),
    "call": lambda f: jax.vmap(f, (None, 0))(PARAMS, X),
}
BACK: dict[str, Callable[[Any], Any]] = {
    "grad": lambda f: jax.grad(summed(f))(PARAMS, X[0]),
    "jit of grad": lambda f: jax.jit(jax.grad(summed(f)))(PARAMS, X[0]),
    "vjp": lambda f: jax.vjp(f, PARAMS, X[0])[1](jnp.ones(5)),
    "jacrev": lambda f: jax.jacrev(f)(PARAMS, X[0]),
    "hessian": lambda f: jax.hessian(summed(f), 1)(PARAMS, X[0]),
    "grad of vmap": lambda f: jax.grad(summed(jax.vmap(f, (None, 0))))(PARAMS, X),
}
"""What a function with forward derivatives has not."""


@pytest.mark.parametrize("transformation", FORWARD)
def test_forward_derivatives(bundle: stagec.Bundle, model: Any, transformation: str) -> None:
    own = stagec.jax.function(bundle, "mlp", vmap="loop", derivatives="forward")
    close(FORWARD[transformation](own), FORWARD[transformation](model.mlp))


def test_rows_are_one_call(bundle: stagec.Bundle) -> None:
    """Where the dimension is named, there is no loop in the program."""
    for vmap, loops in (("batch", False), ("loop", True)):
        mapped = jax.vmap(stagec.jax.function(bundle, "mlp", vmap=vmap), (None, 0))
        assert ("while" in jax.jit(mapped).lower(PARAMS, X).as_text()) == loops


def test_integers_and_keywords(bundle: stagec.Bundle, model: Any) -> None:
    labels, scale = np.array([[0, 2], [1, 1], [2, 0]], np.int32), jnp.float32(3)
    x = X[:, :2, :3]
    own = stagec.jax.function(bundle, "mixed", vmap="batch")

    def results(f: Callable[..., Any]) -> list[Any]:
        return [
            f(x[0], labels[0], scale=scale),
            f(x[0], labels[0], scale=2.0),
            jax.vmap(lambda a, b: f(a, b, scale=scale))(x, labels),
            jax.grad(lambda a: f(a, labels[0], scale=scale)["loss"].sum())(x[0]),
            jax.grad(lambda s: f(x[0], labels[0], scale=s)["loss"].sum())(scale),
            jax.vmap(jax.grad(lambda a, b: f(a, b, scale=scale)["loss"].sum()))(x, labels),
        ]

    close(results(own), results(model.mixed))


def test_another_place_of_the_dimension(bundle: stagec.Bundle, model: Any) -> None:
    x = RNG.random((4, 3, 2), np.float32)
    own = stagec.jax.function(bundle, "columns", vmap="batch")
    close(jax.vmap(own)(x), jax.vmap(model.columns)(x))
    close(jax.vmap(own, 2, 1)(np.moveaxis(x, 0, 2)), jax.vmap(model.columns, 2, 1)(np.moveaxis(x, 0, 2)))


def test_static_arguments(bundle: stagec.Bundle) -> None:
    power, x = stagec.jax.function(bundle, "power", vmap="loop"), jnp.arange(3.0)
    for n in (2, 3):
        close(jax.jit(lambda x, n=n: power(x, n=n))(x), x**n)
        close(jax.grad(lambda x, n=n: power(x, n=n).sum())(x), n * x ** (n - 1))
    with pytest.raises(stagec.CallError, match="power was not built with n=4") as refusal:
        power(x, n=4)
    assert refusal.value.code == "static"


def test_keys(bundle: stagec.Bundle, model: Any) -> None:
    draw, x, key = stagec.jax.function(bundle, "draw", vmap="loop"), jnp.ones(3), jax.random.key(5)
    for given in (key, jax.random.key_data(key), np.array([0, 5], np.uint32)):
        keys, drawn = jax.jit(draw)(given, x)
        wanted, expected = model.draw(key, x)
        np.testing.assert_array_equal(jax.random.key_data(keys), jax.random.key_data(wanted))
        close(drawn, expected)
    close(jax.grad(lambda x: draw(key, x)[1].sum())(x), jax.grad(lambda x: model.draw(key, x)[1].sum())(x))
    many = jax.random.split(key, 4)
    close(jax.vmap(lambda k: draw(k, x)[1])(many), jax.vmap(lambda k: model.draw(k, x)[1])(many))
    with pytest.raises(stagec.CallError, match=r"key has dtype key<rbg>; expected key<fry>"):
        draw(jax.random.key(0, impl="rbg"), x)


def test_types_of_a_model(bundle: stagec.Bundle, model: Any) -> None:
    typed, x = stagec.jax.function(bundle, "typed"), jnp.arange(3.0)
    result = jax.jit(typed)(model.Length(x, "m"))
    assert (type(result), result.unit) == (model.Length, "m")
    close(result.x, x**2)
    gradient = jax.grad(lambda length: typed(length).x.sum())(model.Length(x, "m"))
    close(gradient.x, 2 * x)
    with pytest.raises(stagec.CallError, match="unit is 'km'"):
        jax.jit(typed)(model.Length(x, "km"))


def test_bound_weights(zoo: Path) -> None:
    with stagec.load(zoo) as bundle:
        composed, x = stagec.jax.function(bundle, "from_file", vmap="loop"), jnp.arange(2.0)
        np.testing.assert_allclose(jax.jit(composed)(x), bundle["from_file"](x), rtol=1e-6)
        rows = jnp.stack([x, x + 1])
        np.testing.assert_allclose(jax.vmap(composed)(rows)[1], bundle["from_file"](rows[1]), rtol=1e-6)
        with pytest.raises(stagec.CallError, match="valid is left out, and inside JAX nothing is padded: pass it"):
            stagec.jax.function(bundle, "pooled")(jnp.ones((2, 3)))


def refused(call: Callable[[], Any]) -> tuple[str, str]:
    with pytest.raises(stagec.CallError) as refusal:
        call()
    return refusal.value.code, str(refusal.value)


def test_what_cannot_be_is_refused_by_name(bundle: stagec.Bundle) -> None:
    x = jnp.ones((2, 4, 3))
    mlp, mean, doubled = (stagec.jax.function(bundle, name) for name in ("mlp", "mean", "doubled"))
    assert refused(lambda: jax.vmap(mlp, (None, 0))(PARAMS, X)) == (
        "transformation",
        "mlp: stagec.jax.function(bundle, 'mlp', vmap=...) says what jax.vmap makes of it: "
        '"loop", or a dimension with independent rows; jax.jacfwd and jax.jacrev use jax.vmap',
    )
    rows = stagec.jax.function(bundle, "mlp", vmap="batch")
    assert refused(lambda: jax.vmap(rows)(jax.tree.map(lambda a: jnp.stack([a] * 3), PARAMS), X)) == (
        "transformation",
        "mlp: jax.vmap has params['b'] vary, which has no dimension batch: "
        'leave it out of in_axes, or write vmap="loop"',
    )
    assert refused(lambda: jax.vmap(stagec.jax.function(bundle, "mean", vmap="batch"))(x)) == (
        "transformation",
        'mean: the result float32[3] has no dimension batch, so its rows are not independent: write vmap="loop"',
    )
    close(jax.vmap(stagec.jax.function(bundle, "mean", vmap="loop"))(x)[0], jnp.ones((2, 3)))
    assert refused(lambda: jax.vmap(stagec.jax.function(bundle, "doubled", vmap="batch"))(x[0]))[0] == "transformation"
    assert refused(lambda: jax.grad(lambda x: doubled(x).sum())(jnp.ones(3))) == (
        "transformation",
        "doubled: the artifact has no derivative of order 1: write vjp_order = 1 in the manifest",
    )
    assert refused(lambda: jax.hessian(lambda x: mean(x)[0].sum())(x[0]))[0] == "transformation"
    hessian = "instead of jax.hessian write jax.jacrev of jax.jacrev, with derivatives='reverse'"
    needs = "jax.jvp and jax.jacfwd need stagec.jax.function(bundle, NAME, derivatives='forward'), and vjp_order = 2"
    needs += f" in the manifest; jax.jacfwd also vmap=...; {hessian}"
    assert refused(lambda: jax.jvp(mean, (x[0],), (x[0],))) == ("transformation", f"mean: {needs}")
    back = "mlp: jax.grad, jax.vjp and jax.jacrev need stagec.jax.function(bundle, NAME, derivatives='reverse')"
    for name, transformed in BACK.items():
        for vmap in ("loop", "batch"):
            own = stagec.jax.function(bundle, "mlp", vmap=vmap, derivatives="forward")
            assert refused(lambda own=own, transformed=transformed: transformed(own)) == (
                "transformation",
                f"{back}; {hessian}",
            ), name
    again = stagec.jax.function(bundle, "mlp", derivatives="forward")
    assert refused(lambda: jax.jvp(lambda v: jax.jvp(lambda x: again(PARAMS, x), (X[0],), (v,)), (X[0],), (X[1],))) == (
        "transformation",
        "mlp: an artifact has no derivative of jax.jvp; write jax.grad of jax.grad, with derivatives='reverse'",
    )
    forward = stagec.jax.function(bundle, "mean", derivatives="forward")
    assert refused(lambda: jax.jvp(forward, (x[0],), (x[0],))) == (
        "transformation",
        "mean: the artifact has no derivative of order 2: write vjp_order = 2 in the manifest",
    )
    with pytest.raises(ValueError, match="mlp: vmap is 'rows'; write one of 'loop', 'batch'"):
        stagec.jax.function(bundle, "mlp", vmap="rows")(PARAMS, X[0])
    with pytest.raises(KeyError, match="no function"):
        stagec.jax.function(bundle, "mpl")
    assert refused(lambda: jax.jit(mlp)(PARAMS, X))[0] == "shape"
    for none in (lambda: mlp(PARAMS, X[0, :0]), lambda: jax.vmap(rows, (None, 0))(PARAMS, X[:, :0])):
        assert refused(none) == ("shape", "mlp: Expected value >= 1 for dimension variable 'batch'")
    assert refused(lambda: jax.jit(mlp)(PARAMS, X[0].astype(np.int32)))[0] == "dtype"
    assert refused(lambda: jax.jit(mlp)({"w": PARAMS["w"]}, X[0]))[0] == "structure"


def test_the_documentation(zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block of docs/with-jax.md but those of the cache runs, and so does the example of the docstring."""
    (tmp_path / "model.aot").symlink_to(zoo)
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "with-jax.md").read_text().partition("\n## The compilation cache\n")[0]
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 5
    exec("\n".join(blocks), {})
    documentation = inspect.getdoc(stagec.jax.function) or ""
    example = doctest.DocTestParser().get_doctest(documentation, {"stagec": stagec}, "function", None, 0)
    assert example.examples
    printed: list[str] = []
    doctest.DocTestRunner().run(example, out=printed.append)
    assert printed == []
