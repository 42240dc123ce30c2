"""Symbolic sizes in functions of arrays: slices by them, and sizes of results that may be negative.

Modules: `stagec_arrays/dims.py`, `stagec_arrays/primitives/slicing.py`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import stagec
import stagec_arrays
from stagec.core.sizes.size import canonical_dimension
from stagec_arrays import lax, numpy as xp

SLICES: dict[str, Callable[[Any, Any], Any]] = {
    "floordiv(b,2)": lambda b, c: np.s_[: b // 2],
    "b-floordiv(b,2)": lambda b, c: np.s_[b // 2 :],
    "b-1": lambda b, c: np.s_[: b - 1],
    "max(0,b-5)": lambda b, c: np.s_[:-5],
    "min(b,5)": lambda b, c: np.s_[:5],
    "-min(b,2)+min(b,5)": lambda b, c: np.s_[2:5],
    "b-max(0,b-5)": lambda b, c: np.s_[-5:],
    "min(b,c)": lambda b, c: np.s_[:c],
    "b-min(b,c)": lambda b, c: np.s_[c:],
    "b-max(0,b-c)": lambda b, c: np.s_[-c:],
    "min(b,2*c)-min(b,c)": lambda b, c: np.s_[c : 2 * c],
    "0": lambda b, c: np.s_[2 * c : c],
    "floordiv(b+1,2)": lambda b, c: np.s_[::-2],
    "floordiv(b+1,3)": lambda b, c: np.s_[1:b:3],
    "b": lambda b, c: np.s_[::-1],
    "min(b-1,5)+1": lambda b, c: np.s_[5::-1],
    "b-floordiv(b,2)-1": lambda b, c: np.s_[: b // 2 : -1],
    "floordiv(b,2)+1": lambda b, c: np.s_[b // 2 :: -1],
    "floordiv(max(0,-min(b-1,3)+min(b-1,c))+1,2)": lambda b, c: np.s_[c:3:-2],
    "floordiv(max(0,-min(b,3)+min(b,c))+1,2)": lambda b, c: np.s_[3:c:2],
}


def slices(x: Any, y: Any) -> Any:
    return [x[key(x.shape[0], y.shape[0])] for key in SLICES.values()]


def struct(*shape: Any) -> stagec_arrays.ShapeDtypeStruct:
    return stagec_arrays.ShapeDtypeStruct(shape, xp.float32)


def test_slices_by_symbolic_sizes_are_those_of_numpy() -> None:
    """Their sizes are those of JAX, in its words."""
    jax = pytest.importorskip("jax")
    b, c = stagec_arrays.symbolic_shape("b, c")
    exported = stagec.jit(slices, frontend="arrays").trace(struct(b), struct(c)).export()
    assert [str(aval) for aval in exported.out_avals] == [f"f32[{size}]" for size in SLICES]
    theirs = jax.export.export(jax.jit(slices))(
        *(jax.ShapeDtypeStruct((size,), "float32") for size in jax.export.symbolic_shape("b, c"))
    )
    last = -2  # JAX has max(0, ...) around another part of these
    assert [str(canonical_dimension(str(aval.shape[0]))) for aval in theirs.out_avals][:last] == [*SLICES][:last]
    read = jax.export.deserialize(bytearray(exported.serialize()))
    for sizes in ((1, 1), (3, 8), (5, 2), (9, 4)):
        x, y = (np.arange(size, dtype=np.float32) for size in sizes)
        for results in (exported.call(x, y), read.call(x, y)):
            for result, wanted in zip(results, slices(x, y), strict=True):
                np.testing.assert_array_equal(result, wanted)


def test_bounds_of_a_slice_are_decided_by_constraints() -> None:
    function = stagec.jit(lambda x: x[: x.shape[0] - 5], frontend="arrays")
    (b,) = stagec_arrays.symbolic_shape("b")
    with pytest.raises(ValueError, match=r"_sizes.py:\d+: whether b-5 >= 0 depends on .*; add a constraint"):
        function.trace(struct(b))
    (b,) = stagec_arrays.symbolic_shape("b", constraints=["b >= 5"])
    assert str(function.trace(struct(b)).export().out_avals[0]) == "f32[b-5]"


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("broadcast", lambda x: xp.zeros(x.shape[0] - 2, dtype=x.dtype) + 1),
        ("slice", lambda x: lax.slice_in_dim(x, 2, x.shape[0])),
        ("broadcast", lambda x: xp.ones((x.shape[0] % 7 - x.shape[0] % 5, 2))),
        ("iota", lambda x: xp.eye(x.shape[0] - 2)),
    ],
)
def test_a_size_of_a_result_that_may_be_negative_is_refused(name: str, function: Callable[[Any], Any]) -> None:
    (b,) = stagec_arrays.symbolic_shape("b")
    with pytest.raises(ValueError, match=rf"_sizes.py:\d+: {name}: a size of the result, .*, may be negative"):
        stagec.jit(function, frontend="arrays").trace(struct(b))


def test_sizes_of_arguments_are_what_they_are() -> None:
    (size,) = stagec_arrays.symbolic_shape("b-3")
    exported = stagec.jit(lambda x: xp.zeros(x.shape) + x, frontend="arrays").trace(struct(size)).export()
    np.testing.assert_array_equal(exported.call(np.ones(4, np.float32)), np.ones(4))
    assert exported.call(np.ones(0, np.float32)).shape == (0,)


def test_equal_sizes_by_constraints() -> None:
    """8*floordiv(b,8) is b where b is a multiple of 8, and a is 2*b where a constraint says so; as in JAX."""
    (b,) = stagec_arrays.symbolic_shape("b", constraints=["mod(b,8) == 0"])
    function = lambda x: xp.reshape(x, (x.shape[0] // 8, 8)) * 2  # noqa: E731
    exported = stagec.jit(function, frontend="arrays").trace(struct(b)).export()
    np.testing.assert_array_equal(exported.call(np.arange(16, dtype=np.float32)), np.arange(0, 32, 2).reshape(2, 8))
    a, b = stagec_arrays.symbolic_shape("a, b", constraints=["a == 2*b"])
    exported = stagec.jit(lambda x, y: x + xp.concat([y, y]), frontend="arrays").trace(struct(a), struct(b)).export()
    x = np.arange(6, dtype=np.float32)
    np.testing.assert_array_equal(exported.call(x, x[:3]), x + np.tile(x[:3], 2))
