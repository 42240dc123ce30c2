"""What is an array for a call: what it is for JAX. NumPy makes one of more objects, and drops what their classes add.

Modules: `stagec_arrays/namespace/creation.py`, `stagec_arrays/namespace/promotion.py`,
`stagec_arrays/frontend/staging.py`, `pjrt/arrays.py`, `pjrt/calling_convention.py`, `pjrt/making.py`.
"""

import array
import decimal
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import stagec
from stagec_arrays import numpy as xp
from tests.zoo import zoo as model

W = np.linspace(-1, 1, 64, dtype=np.float32).reshape(16, 4)
B = np.ones(4, np.float32)
X = np.linspace(0, 2, 64, dtype=np.float32).reshape(4, 16)


class Unit:
    """An array with a unit, as those of pint: a class of its own, with `__array__`."""

    def __init__(self, values: Any) -> None:
        self.values = np.asarray(values)
        self.shape, self.dtype, self.unit = self.values.shape, np.dtype(np.float32), "m"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return self.values if dtype is None else self.values.astype(dtype)


class Bare:
    """An array for NumPy alone."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return self.values if dtype is None else self.values.astype(dtype)


class Derived(np.ndarray[Any, Any]):
    """As astropy's quantities: NumPy's array, with a class of its own."""


def in_file(values: Any, folder: Path) -> Any:
    mapped = np.memmap(folder / "values", values.dtype, "w+", shape=values.shape)
    mapped[:] = values
    return mapped


KINDS: dict[str, Callable[[Any, Path], Any]] = {
    "an array": lambda values, _: values,
    "read-only": lambda values, _: np.broadcast_to(values, values.shape),
    "with gaps": lambda values, _: np.repeat(values, 2, 1)[:, ::2],
    "by columns": lambda values, _: np.asfortranarray(values),
    "of 64 bits": lambda values, _: values.astype(np.float64),
    "of 16 bits": lambda values, _: values.astype(np.float16),
    "of 80 bits": lambda values, _: values.astype(np.longdouble),
    "bfloat16": lambda values, _: values.astype(ml_dtypes.bfloat16),
    "objects": lambda values, _: values.astype(object),
    "strings": lambda values, _: values.astype("U"),
    "bytes": lambda values, _: values.astype("S"),
    "dates": lambda values, _: values.astype("M8[s]"),
    "masked": lambda values, _: np.ma.array(values, mask=values > 0),
    "masked nowhere": lambda values, _: np.ma.array(values),
    "masked, no elements": lambda values, _: np.ma.array(values[:0]),
    "the masked element": lambda values, _: np.ma.masked,
    "a matrix": lambda values, _: np.matrix(values),
    "records": lambda values, _: np.rec.array(values),
    "records with names": lambda values, _: np.rec.array([(1.0,)] * 16, [("a", "f4")]),
    "a structured dtype": lambda values, _: np.zeros(values.shape, [("a", "f4")]),
    "a file": in_file,
    "a derived class": lambda values, _: values.view(Derived),
    "a unit": lambda values, _: Unit(values),
    "__array__ alone": lambda values, _: Bare(values),
    "a memoryview": lambda values, _: memoryview(values),
    "an array of Python's": lambda values, _: array.array("f", values.ravel()),
    "bytes of Python's": lambda values, _: values.tobytes(),
    "a decimal": lambda values, _: decimal.Decimal(1),
    "a range": lambda values, _: range(4),
    "a string": lambda values, _: "abc",
    "an array of JAX's": lambda values, _: jnp.asarray(values),
    "a scalar": lambda values, _: np.float32(3),
    "a scalar of 64 bits": lambda values, _: np.float64(3),
    "a bfloat16 scalar": lambda values, _: ml_dtypes.bfloat16(3),
    "a bool": lambda values, _: True,
    "an integer": lambda values, _: 3,
    "a number": lambda values, _: 3.0,
}


Way = tuple[Callable[[Any], Any], Callable[[Any], Any]]
"""A way to hand over an array, and JAX's."""


@pytest.fixture(scope="module")
def ways(zoo: Path) -> Iterator[dict[str, Way]]:
    args = {"w": W, "b": B}, X
    theirs = jax.jit(model.mlp).lower(*args).compile()
    traced = stagec.jit(model.mlp).trace(*args)
    exported, compiled = traced.export(), traced.lower().compile()
    jitted = stagec.jit(model.mlp)
    arrays = stagec.jit(lambda w: X @ w, frontend="arrays")
    b, x = jnp.asarray(B), jnp.asarray(X)
    with stagec.load(zoo) as bundle:
        function = bundle["mlp"]
        flat = function.flat(*args)

        def new(function: Any) -> Any:
            """A new function for each call: the cache in C++ takes a masked array for an array that came before."""

            def call(w: Any) -> Any:
                return jax.jit(functools.partial(function))(w)

            return call

        def of_compiled(w: Any) -> Any:
            return theirs({"w": jax.device_put(w), "b": B}, X)

        yield {
            "stagec.jit": (lambda w: jitted({"w": w, "b": B}, X), new(lambda w: model.mlp({"w": w, "b": B}, X))),
            "stagec.jit, arrays": (arrays, new(lambda w: X @ w)),
            "Compiled": (lambda w: compiled({"w": w, "b": B}, X), of_compiled),
            "Exported": (lambda w: exported.call({"w": w, "b": B}, X), of_compiled),
            "Function": (lambda w: function({"w": w, "b": B}, X), of_compiled),
            "Function, device state": (lambda w: function({"w": w, "b": stagec.device_put(B)}, X), of_compiled),
            "Function, JAX's arrays": (lambda w: function({"w": w, "b": b}, x), of_compiled),
            "Flat": (lambda w: flat(B, w, X)[0], of_compiled),
            "device_put": (stagec.device_put, jax.device_put),
            "asarray": (xp.asarray, jnp.asarray),
            "an operation": (lambda w: xp.asarray(B) * w, new(lambda w: B * w)),
        }


def elements(of: Callable[[Any], Any], leaf: Any) -> Any:
    """Return the elements of a result, or None if the leaf is refused."""
    try:
        return np.asarray(of(leaf), np.float32)
    except (TypeError, ValueError):
        return None
    except stagec.CallError as refusal:
        return None if refusal.code in ("dtype", "shape") else refusal.code


@pytest.mark.parametrize("kind", KINDS)
def test_an_array_is_what_it_is_for_jax(kind: str, ways: dict[str, Way], tmp_path: Path) -> None:
    leaf = KINDS[kind](W, tmp_path)
    for way, (ours, of_jax) in ways.items():
        ours(W)  # a call that fitted before changes nothing
        given, wanted = elements(ours, leaf), elements(of_jax, leaf)
        assert (given is None) == (wanted is None), way
        if wanted is not None:
            np.testing.assert_allclose(given, wanted, rtol=1e-6, err_msg=way)


LOST = "a masked array, whose mask would be lost: pass x.filled(VALUE), or x.data and x.mask"
MASKED = np.ma.array(W, mask=W > 0)


@pytest.mark.parametrize("way", ["Compiled", "Exported", "Function", "Function, device state", "Flat"])
def test_a_refused_argument_is_named(way: str, ways: dict[str, Way]) -> None:
    call, _ = ways[way]
    for leaf, what in (
        (MASKED, LOST),
        (Unit(W.astype(object)), f"a {__name__}.Unit, which is not an array: pass numpy.asarray(x)"),
        (
            memoryview(W),
            "a memoryview, which is not an array: pass numpy.asarray(x)"
            ", or a dict of its fields, or a tuple of its children",
        ),
    ):
        with pytest.raises(stagec.CallError) as error:
            call(leaf)
        assert str(error.value) == f"mlp: params['w'] is {what}; expected float32 (f32[16,4])"


def test_masks_in_other_places() -> None:
    part = stagec.device_put(W)
    puts: list[Callable[[], object]] = [
        lambda: stagec.device_put({"w": [MASKED]}),
        lambda: stagec.make_array_from_single_device_arrays(W.shape, part.sharding, [MASKED]),
        lambda: stagec.make_array_from_process_local_data(part.sharding, MASKED),
    ]
    for put in puts:
        with pytest.raises(stagec.CallError) as refusal:
            put()
        assert (refusal.value.code, str(refusal.value)) == ("dtype", f"the argument is {LOST}")
    makes: dict[str, Callable[[], object]] = {
        f"asarray: {LOST}": lambda: xp.asarray([[W, (MASKED,)]]),
        f"full: {LOST}": lambda: xp.full(3, np.ma.masked),
        f"an index: {LOST}": lambda: xp.asarray(W)[np.ma.array([0, 1], mask=[0, 1])],
        f"add: an operand is {LOST}": lambda: xp.add(W, MASKED),
        f"an argument is {LOST}": lambda: stagec.jit(lambda w: w, frontend="arrays").lower(MASKED),
    }
    for text, make in makes.items():
        with pytest.raises(TypeError) as error:
            make()
        assert str(error.value) == text


def test_a_container_with_array_is_a_container() -> None:
    """As in JAX: what is registered as a node is one, also where NumPy could make an array of it."""

    class Param(Bare):
        pass

    jax.tree_util.register_pytree_node(Param, lambda p: ((p.values,), None), lambda _, children: Param(*children))
    put = stagec.device_put({"w": Param(W)})
    assert type(put["w"]) is Param
    np.testing.assert_array_equal(np.asarray(put["w"].values), W)
