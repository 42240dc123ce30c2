"""Elements written at keys of all kinds, beside NumPy: drawn, of large arrays, by symbolic sizes, of empty arrays.

Modules: `stagec_arrays/namespace/assignment.py`, `stagec_arrays/namespace/index_keys.py`,
`stagec_arrays/primitives/indexing.py`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import stagec
import stagec_arrays
from stagec_arrays import numpy as xp

WAYS: dict[str, Any] = {"set": None, "add": np.add, "multiply": np.multiply, "max": np.maximum, "min": np.minimum}


@st.composite
def keys(draw: st.DrawFn, shape: tuple[int, ...]) -> Any:
    """Return a key of an array: slices, integers, new axes, `...`, arrays of integers that broadcast, and masks."""
    if shape and draw(st.integers(0, 7)) == 0:
        own = shape[: draw(st.integers(1, len(shape)))]
        count = int(np.prod(own))
        return np.asarray(draw(st.lists(st.booleans(), min_size=count, max_size=count)), bool).reshape(own)
    arrays = draw(st.booleans())
    key: list[Any] = []
    for size in shape[: draw(st.integers(0, len(shape)))]:
        kind = draw(st.sampled_from(["slice", "slice", "integer", "array" if arrays else "slice"]))
        if kind == "slice" or size == 0:
            bound = st.none() | st.integers(-size - 2, size + 2)
            key.append(slice(draw(bound), draw(bound), draw(st.sampled_from([None, 1, 2, 3, -1, -2]))))
        elif kind == "integer":
            key.append(draw(st.integers(-size, size - 1)))
        else:
            index = st.integers(-size, size - 1)
            several = st.lists(index, min_size=1, max_size=1) | st.lists(index, min_size=2, max_size=2)
            key.append(np.asarray(draw(several | index)))
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        key.insert(draw(st.integers(0, len(key))), None)
    if draw(st.integers(0, 3)) == 0 or len([entry for entry in key if entry is not None]) == 0:
        key.insert(draw(st.integers(0, len(key))), ...)
    return tuple(key)


@st.composite
def updates(draw: st.DrawFn) -> tuple[np.ndarray[Any, Any], Any, Any, str]:
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 5, 6]), max_size=3)))
    x = np.arange(int(np.prod(shape)), dtype=draw(st.sampled_from(["float32", "int32"]))).reshape(shape)
    x[...] -= 7
    key = draw(keys(shape))
    wanted = x[key].shape
    kept = wanted[draw(st.integers(0, len(wanted))) :]
    own = tuple(1 if draw(st.integers(0, 4)) == 0 else size for size in kept)
    value = (np.arange(np.prod(own)).reshape(own) + 100).astype(x.dtype)
    return x, key, value, draw(st.sampled_from(sorted(WAYS)))


def by_numpy(x: Any, key: Any, value: Any, how: str) -> Any:
    changed = x.copy()
    if how == "set":
        changed[key] = value
    else:
        WAYS[how].at(changed, key, value)
    return changed


@settings(max_examples=60)
@given(updates())
def test_drawn_updates_are_those_of_numpy(drawn: tuple[Any, Any, Any, str]) -> None:
    """Traced, and outside a trace; an element that is set twice has the last value, as XLA does on a CPU."""
    x, key, value, how = drawn
    wanted = x[key], by_numpy(x, key, value, how)
    function = stagec.jit(lambda x, value: (x[key], getattr(x.at[key], how)(value)), frontend="arrays")
    traced = function(x, value)
    eager = xp.asarray(x)[key], getattr(xp.asarray(x).at[key], how)(xp.asarray(value))
    for results in (traced, eager):
        for result, right in zip(results, wanted, strict=True):
            assert (result.shape, str(result.dtype)) == (right.shape, str(right.dtype))
            np.testing.assert_array_equal(np.asarray(result), right)


SHAPED: dict[str, Callable[[Any, Any], Any]] = {
    "rows": lambda x, y: x.at[10:1900].set(y[10:1900]),
    "all": lambda x, y: x.at[...].set(y),
    "one": lambda x, y: x.at[3].set(y[4]),
    "steps": lambda x, y: x.at[::2, ::-3].add(y[::2, ::3]),
    "negative": lambda x, y: x.at[::-1, 5:].multiply(y[:, 5:]),
    "rows of indices": lambda x, y: x.at[xp.asarray([1, 5, 3]), 7:].max(y[:3, 7:]),
    "number": lambda x, y: x.at[100:200, 3].set(0.0),
}


@pytest.mark.parametrize("name", SHAPED)
def test_an_update_takes_no_bytes_for_its_elements(name: str) -> None:
    """Of 2000 x 2000 elements the artifact had 16 MB of places."""
    struct = stagec_arrays.ShapeDtypeStruct((2000, 2000), xp.float32)
    exported = stagec.jit(SHAPED[name], frontend="arrays").trace(struct, struct).export()
    assert len(exported.serialize()) < 6000
    assert "scatter" not in exported.mlir_module() or "indices" in name


def test_an_update_beyond_31_bits_is_written_where_it_belongs() -> None:
    struct = stagec_arrays.ShapeDtypeStruct((2**31 + 10,), xp.uint8)
    text = stagec.jit(lambda x: x.at[-5:].set(7), frontend="arrays").trace(struct).export().mlir_module()
    assert f"dense<{2**31 + 5}> : tensor<i64>" in text
    with_rows = stagec_arrays.ShapeDtypeStruct((2**16, 2**16), xp.uint8)
    text = stagec.jit(lambda x: x.at[-1, -1].set(7), frontend="arrays").trace(with_rows).export().mlir_module()
    assert text.count(f"dense<{2**16 - 1}> : tensor<i32>") >= 1


SYMBOLIC: dict[str, Callable[[Any, Any], Any]] = {
    "first half": lambda x, y: x.at[: x.shape[0] // 2].set(1.0),
    "some": lambda x, y: x.at[2:5].add(1.0),
    "by another": lambda x, y: x.at[: y.shape[0]].multiply(y[0]),
    "steps": lambda x, y: x.at[::2].set(-x[::2]),
    "turned": lambda x, y: x.at[::-1].set(x),
    "turned steps": lambda x, y: x.at[::-2].add(x[::2]),
    "steps of what may be nothing": lambda x, y: x.at[3 : y.shape[0] : 2].set(0.0),
    "from the end": lambda x, y: x.at[-2:].max(2.5),
    "last": lambda x, y: x.at[-1].set(9.0),
    "size": lambda x, y: x.at[x.shape[0] - 1].add(9.0),
    "one that may be outside": lambda x, y: x.at[2].set(9.0),
    "outside, of rows": lambda x, y: (x[:, None] * y[None]).at[2, 0].set(9.0),
}


def by_symbolic_sizes(x: Any, y: Any) -> list[Any]:
    return [update(x, y) for update in SYMBOLIC.values()]


def test_updates_by_symbolic_sizes() -> None:
    """What is not in the array is left out, as in JAX."""
    jax = pytest.importorskip("jax")
    b, c = stagec_arrays.symbolic_shape("b, c")
    structs = (stagec_arrays.ShapeDtypeStruct((size,), xp.float32) for size in (b, c))
    exported = stagec.jit(by_symbolic_sizes, frontend="arrays").trace(*structs).export()
    read = jax.export.deserialize(bytearray(exported.serialize()))
    for sizes in ((1, 1), (2, 9), (7, 4)):
        x, y = (np.arange(size, dtype=np.float32) + 1 for size in sizes)
        wanted = by_symbolic_sizes(jax.numpy.asarray(x), jax.numpy.asarray(y))
        for results in (exported.call(x, y), read.call(x, y)):
            for name, result, right in zip(SYMBOLIC, results, wanted, strict=True):
                np.testing.assert_array_equal(np.asarray(result), right, name)


DERIVED: dict[str, Callable[[Any, Any, Any], Any]] = {
    "set": lambda x, y, i: x.at[1:4, ::2].set(y[:3, :2]),
    "add": lambda x, y, i: x.at[::-2, 1].add(y[:2, 0]),
    "multiply": lambda x, y, i: x.at[::2, 1:].multiply(y[:2, :2]),
    "max": lambda x, y, i: x.at[1:, ::-1].max(y[:3]),
    "one": lambda x, y, i: x.at[2].set(y[0]),
    "all": lambda x, y, i: x.at[...].set(y),
    "none": lambda x, y, i: x.at[4:].set(y[4:]),
    "indices in a slice": lambda x, y, i: x.at[1:, i].add(y[:3, :2]),
    "twice": lambda x, y, i: x.at[[0, 0, 2]].add(y[:3]),
    "number": lambda x, y, i: x.at[1:3].set(y[0, 0]),
}


@pytest.mark.parametrize("name", DERIVED)
def test_derivatives_of_updates_are_those_of_jax(name: str) -> None:
    jax = pytest.importorskip("jax")
    random = np.random.default_rng(0)
    x, y, by = (random.normal(size=(4, 3)).astype(np.float32) for _ in range(3))
    i, update = np.asarray([2, 0]), DERIVED[name]
    if name == "twice":
        update = lambda x, y, i: x.at[i * 0].add(y[:2])  # noqa: E731 # a list is not an index in JAX
    ours = stagec_arrays.grad(lambda x, y, i: xp.sum(xp.tanh(update(x, y, i)) * by), argnums=(0, 1))
    theirs = jax.grad(lambda x, y, i: (jax.numpy.tanh(update(x, y, i)) * by).sum(), argnums=(0, 1))
    for result, right in zip(stagec.jit(ours, frontend="arrays")(x, y, i), theirs(x, y, i), strict=True):
        np.testing.assert_allclose(np.asarray(result), right, 1e-5, 1e-6)


EMPTY: dict[str, Callable[[Any, Any], Any]] = {
    "rows": lambda x, i: x[i],
    "columns": lambda x, i: x[:, i[:0]],
    "nothing of nothing": lambda x, i: x[:, i[:0], None],
    "take": lambda x, i: xp.take(x, i, axis=0),
    "along": lambda x, i: xp.take_along_axis(x, x[:, :0].astype("int32"), axis=1),
    "no rows": lambda x, i: xp.reshape(x, (0, 3))[i[:0]],
    "no rows along": lambda x, i: xp.take_along_axis(xp.reshape(x, (0, 3)), xp.zeros((0, 3), dtype="int32"), axis=0),
    "set": lambda x, i: x.at[i].set(1.0),
    "set of no rows": lambda x, i: xp.reshape(x, (0, 3)).at[i].set(1.0).mT,
    "add": lambda x, i: x.at[:, i[:0]].add(1.0),
}


@pytest.mark.parametrize("name", EMPTY)
def test_elements_of_an_empty_array(name: str) -> None:
    """NumPy's answer: an empty array, where it has one."""
    x, i = np.zeros((3, 0), np.float32), np.asarray([2, 0], np.int32)
    result = stagec.jit(EMPTY[name], frontend="arrays")(x, i)
    others = {"rows": (2, 0), "take": (2, 0), "nothing of nothing": (3, 0, 1)}
    others |= dict.fromkeys(("no rows", "no rows along"), (0, 3))
    assert np.asarray(result).shape == others.get(name, (3, 0))


def test_an_index_of_an_axis_of_size_0_is_refused() -> None:
    with pytest.raises(IndexError, match=r"test_updates.py:\d+: an index is out of range for axis 1 of size 0"):
        stagec.jit(lambda x, i: x[:, i], frontend="arrays")(np.zeros((3, 0), np.float32), np.asarray([0]))


def test_an_updated_array_is_another_one() -> None:
    x = xp.asarray([1.0, 2.0])
    for same in (x.at[0:0].set(5.0), x.at[...].set(x)):
        same[0] = 7.0
        assert float(x[0]) == 1.0
    with pytest.raises(TypeError, match="elements of int32 cannot be changed by an array of float32"):
        xp.asarray([1, 2]).at[xp.asarray([True, False])].set(xp.asarray(1.5))
