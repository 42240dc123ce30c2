"""`stagec_arrays.numpy`: the same results outside a trace, inside one, and in NumPy.

Modules: `stagec_arrays/dtypes.py`, `stagec_arrays/tracing.py`, `stagec_arrays/namespace/array_object.py`,
`stagec_arrays/namespace/creation.py`, `stagec_arrays/namespace/datatypes.py`,
`stagec_arrays/namespace/elementwise.py`, `stagec_arrays/namespace/indexing.py`, `stagec_arrays/namespace/linear.py`,
`stagec_arrays/namespace/manipulation.py`, `stagec_arrays/namespace/promotion.py`,
`stagec_arrays/namespace/searching.py`, `stagec_arrays/namespace/statistical.py`,
`stagec_arrays/primitives/slicing.py`, `stagec_arrays/primitives/structural.py`.
"""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import stagec
import stagec_arrays
import stagec_arrays.numpy as xp
from stagec_arrays.tracing import LeakedTracer, TracerError

X = np.linspace(0.1, 2.0, 12, dtype=np.float32).reshape(3, 4)
I = np.asarray([2, 0, 1], np.int32)  # noqa: E741

BOTH: dict[str, Callable[[Any, Any, Any], Any]] = {
    "slices": lambda n, x, i: x[1:, ::-2],
    "new axes": lambda n, x, i: x[None, ..., 1, None],
    "rows": lambda n, x, i: x[i],
    "rows and slices": lambda n, x, i: x[i, 1:3],
    "negative indices": lambda n, x, i: x[i - 3, -1],
    "arrays apart": lambda n, x, i: x[None][0:1, i, 0],
    "matmul": lambda n, x, i: x @ x.T,
    "statistics": lambda n, x, i: n.var(x, axis=0) + n.mean(x) - n.max(x, axis=0),
    "cumulative": lambda n, x, i: n.cumulative_sum(x, axis=1) * n.cumulative_prod(x, axis=1),
    "sort": lambda n, x, i: n.sort(n.flip(x, axis=1), axis=1) + n.argsort(x[:, i[0]])[:, None],
    "where": lambda n, x, i: n.where(x > 1, x, -x) // 0.3 + x % 0.7,
    "shapes": lambda n, x, i: n.roll(n.concat([x, n.tile(x, (1, 1))], axis=0).reshape((4, 6)), 1, axis=0),
    "take": lambda n, x, i: n.take(x, i, axis=0) + n.take_along_axis(x, i[:, None], axis=1),
    "search": lambda n, x, i: n.searchsorted(x[0, :], x[:, 1]),
    "triangles": lambda n, x, i: n.tril(x) - n.triu(x, k=1) + n.eye(3, 4),
    "integers": lambda n, x, i: (i << 2) ^ (i | 1),
    "members": lambda n, x, i: n.isin(i, i[:1]) | n.isin(i, 1, invert=True),
    "far diagonals": lambda n, x, i: n.tril(x, k=2**31) + n.triu(x, k=2**31 - 1) + n.eye(3, 4, k=-(2**40)),
}


def same(found: Any, wanted: Any) -> None:
    assert tuple(found.shape) == np.shape(wanted)
    np.testing.assert_allclose(np.asarray(found, np.float64), np.asarray(wanted, np.float64), 2e-6, 2e-6)


@pytest.mark.parametrize("name", BOTH)
def test_results_are_numpys(name: str) -> None:
    function = BOTH[name]
    wanted = function(np, X, I)
    same(function(xp, xp.asarray(X), xp.asarray(I)), wanted)
    same(stagec.jit(lambda x, i: function(xp, x, i), frontend="arrays")(X, I), wanted)


def test_python_numbers_are_weak() -> None:
    small = xp.ones(2, dtype=xp.bfloat16)
    assert (small * 2.5).dtype == ml_dtypes.bfloat16
    assert (xp.ones(2, dtype=xp.int8) + 1).dtype == np.int8
    assert (xp.ones(2, dtype=xp.int8) + 1.5).dtype == np.float32
    assert stagec.jit(lambda x, y: x * y, frontend="arrays")(small, 2.0).dtype == ml_dtypes.bfloat16
    with pytest.raises(OverflowError, match="300 is out of the range of int8"):
        xp.ones(2, dtype=xp.int8) + 300


def test_default_dtypes_follow_x64() -> None:
    assert (xp.asarray(1.0).dtype, xp.asarray(1).dtype) == (np.float32, np.int32)
    assert xp.asarray(np.ones(2)).dtype == np.float32
    with stagec_arrays.enable_x64():
        assert (xp.asarray(1.0).dtype, xp.asarray(1).dtype) == (np.float64, np.int64)
    with pytest.warns(UserWarning, match="you asked for float64 and get float32"):
        xp.ones(2, dtype=xp.float64)


def test_float8_does_not_promote() -> None:
    with pytest.raises(TypeError, match="float8_e4m3fn and float32 do not promote"):
        xp.ones(2, dtype=xp.float8_e4m3fn) + xp.ones(2)


def test_elements_are_changed() -> None:
    def function(x: Any, i: Any) -> Any:
        x = xp.asarray(x, copy=True)
        x[0, 1] = 7.0
        return x.at[i].add(1.0)

    wanted = X.copy()
    wanted[0, 1] = 7.0
    wanted += 1
    x = xp.asarray(X)
    same(stagec.jit(function, frontend="arrays")(x, I), wanted)
    same(x, X)
    same(function(x, xp.asarray(I)), wanted)


def test_arrays_go_to_numpy_and_back() -> None:
    x = xp.asarray(X)
    assert type(np.ones((3, 4), np.float32) + x) is type(x)
    assert x.__array_namespace__() is xp


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "if": (lambda x: 1 if x[0] > 0 else 2, "Python's if, while, and, or, not or bool"),
    "int": (lambda x: int(x[0]), r"int\(\) needs the elements"),
    "numpy": (lambda x: np.sin(x) + x, "NumPy needs the elements"),
    "mask": (lambda x: x[x > 0], r"a mask as an index .*; write where\(mask, x, other\)"),
    "nonzero": (lambda x: xp.nonzero(x)[0], r"nonzero\(\) needs the elements"),
    "range": (lambda x: list(range(x[0])), "an index or a Python number"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_elements_of_a_trace_are_not_known(name: str) -> None:
    function, message = REFUSED[name]
    with pytest.raises(TracerError, match=message) as caught:
        stagec.jit(function, frontend="arrays")(np.ones(3, np.float32))
    assert f"{__file__}:{function.__code__.co_firstlineno}: " in str(caught.value)


def test_values_do_not_leave_their_trace() -> None:
    kept: list[Any] = []

    def leaking(x: Any) -> Any:
        kept.append(x)
        return x

    stagec.jit(leaking, frontend="arrays")(1.0)
    uses: list[Callable[[], Any]] = [
        lambda: kept[0] + 1,
        lambda: stagec.jit(lambda x: x + kept[0], frontend="arrays")(1.0),
    ]
    for use in uses:
        with pytest.raises(LeakedTracer, match=r"a value of the traced function leaking \(~f32\[\]\) is used"):
            use()


def test_an_error_leaves_no_trace_behind() -> None:
    with pytest.raises(ValueError, match=r"shapes \(2,\), \(3,\) do not broadcast"):
        stagec.jit(lambda x: x + np.ones(3, np.float32), frontend="arrays")(np.ones(2, np.float32))
    assert float(xp.asarray(2.0) * 2) == 4.0


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (lambda x: xp.sum(x, axis=2), IndexError, "axis 2 is out of range for an array of 2 dimensions"),
        (lambda x: x[3], IndexError, "index 3 is out of range|out of bounds"),
        (lambda x: xp.add(x, "a"), TypeError, "add: expected an array, not a str"),
        (lambda x: x @ x, ValueError, r"matmul: shapes \(3, 4\) and \(3, 4\) do not fit"),
        (lambda x: x & x, TypeError, "and: expected an array of a .* dtype, not of float32"),
        (
            lambda x: xp.signbit(x * 1j),
            TypeError,
            "signbit: expected an array of a real-valued dtype, not of complex64",
        ),
        (lambda x: xp.copysign(x * 1j, x), TypeError, "copysign: expected an array of a real-valued dtype"),
        (lambda x: xp.reshape(x, (5, -1)), ValueError, r"an array of shape \(3, 4\) has no shape \(5, -1\)"),
    ],
)
def test_mistakes_are_named(function: Callable[[Any], Any], error: type[Exception], message: str) -> None:
    for call in (function, stagec.jit(function, frontend="arrays")):
        with pytest.raises(error, match=message):
            call(xp.asarray(X))
