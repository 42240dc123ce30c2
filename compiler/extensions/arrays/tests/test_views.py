"""Assignments to elements: refused where NumPy would write through a view, and done in arrays of their own elements.

Modules: `stagec_arrays/values.py`, `stagec_arrays/namespace/*.py`.
"""

import copy
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as nps

import stagec
import stagec_arrays.numpy as xp

X = np.arange(6, dtype=np.float32).reshape(2, 3) + 1
SQUARE = np.eye(3, dtype=np.float32) * 2
MESSAGE = "NumPy has this array as a view of another array, whose elements would stay as they are; {}, or change a copy"

ARGUMENTS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "asarray": ((X,), {}),
    "astype": ((X, np.float32), {}),
    "bitwise_and": ((X > 1, X > 2), {}),
    "bitwise_or": ((X > 1, X > 2), {}),
    "bitwise_xor": ((X > 1, X > 2), {}),
    "bitwise_invert": ((X > 1,), {}),
    "bitwise_left_shift": ((np.ones(2, np.int32), 1), {}),
    "bitwise_right_shift": ((np.ones(2, np.int32), 1), {}),
    "broadcast_to": ((X, (2, 3)), {}),
    "concat": (([X],), {}),
    "cumulative_sum": ((X,), {"axis": 0}),
    "cumulative_prod": ((X,), {"axis": 0}),
    "diff": ((X,), {"n": 1}),
    "expand_dims": ((X,), {"axis": 0}),
    "full_like": ((X, 3.0), {}),
    "matmul": ((SQUARE, SQUARE), {}),
    "meshgrid": ((X[0],), {"indexing": "ij"}),
    "moveaxis": ((X, 0, 1), {}),
    "permute_dims": ((X, (0, 1)), {}),
    "pow": ((X, 1), {}),
    "repeat": ((X, 1), {"axis": 0}),
    "reshape": ((X, (2, 3)), {}),
    "roll": ((X, 0), {"axis": 0}),
    "searchsorted": ((X[0], X[0]), {}),
    "squeeze": ((X,), {"axis": ()}),
    "stack": (([X],), {}),
    "take": ((X, np.asarray([0, 1])), {"axis": 0}),
    "take_along_axis": ((X, np.asarray([[0], [1]])), {}),
    "tensordot": ((SQUARE, SQUARE), {"axes": 1}),
    "tile": ((X, (1, 1)), {}),
    "where": ((X > 1, X, X), {}),
    "sum": ((X,), {"axis": ()}),
    "prod": ((X,), {"axis": ()}),
    "max": ((X,), {"axis": ()}),
    "imag": ((X + 1j,), {}),
    "linalg.cross": ((X, X), {}),
    "linalg.diagonal": ((SQUARE,), {}),
    "linalg.matrix_power": ((SQUARE, 1), {}),
    "linalg.outer": ((X[0], X[0]), {}),
    "linalg.solve": ((SQUARE, SQUARE), {}),
    "linalg.tensordot": ((SQUARE, SQUARE), {"axes": 1}),
    "fft.fftfreq": ((3,), {}),
    "fft.rfftfreq": ((3,), {}),
}
"""Of functions that do not take a matrix, or two. Where NumPy would have nothing to do, its result may be a view."""
NO_ARRAYS = {
    *("__array_api_version__", "__array_namespace_info__", "can_cast", "finfo", "iinfo", "isdtype", "result_type"),
    *("enable_x64", "symbolic_shape", "broadcast_shapes", "Array", "ShapeDtypeStruct", "from_dlpack"),
    *("arange", "empty", "eye", "full", "linspace", "ones", "zeros"),
}
PROPERTIES: dict[str, Callable[[Any], Any]] = {
    "x[0]": lambda x: x[0],
    "x[-1]": lambda x: x[np.int64(-1)],
    "x[1:, ::-2]": lambda x: x[1:, ::-2],
    "x[...]": lambda x: x[...],
    "x[None]": lambda x: x[None],
    "x[:]": lambda x: x[:],
    "x[[0]]": lambda x: x[[0]],
    "x[0, [1, 2]]": lambda x: x[0, np.asarray([1, 2])],
    "x[()]": lambda x: x[()],
    "row": lambda x: next(iter(x)),
    "x.T": lambda x: x.T,
    "x.mT": lambda x: x.mT,
    "x.real": lambda x: x.real,
    "x.reshape": lambda x: x.reshape(3, 2),
    "+x": lambda x: +x,
    "reshape": lambda x: x.__array_namespace__().reshape(x, (6,), copy=True),
    "astype": lambda x: x.astype(np.float32, copy=False),
    "asarray": lambda x: x.__array_namespace__().asarray(x, copy=True),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


def functions() -> dict[str, tuple[Any, Any]]:
    """Each function of the namespace that takes arrays, and NumPy's."""
    found = {}
    for prefix, ours, theirs in (("", xp, np), ("linalg.", xp.linalg, np.linalg), ("fft.", xp.fft, np.fft)):
        for name in {name for name in dir(ours) if not name.startswith("_")} - NO_ARRAYS:
            function = getattr(ours, name)
            if isinstance(function, types.FunctionType):
                found[prefix + name] = function, getattr(theirs, name)
    return found


def leaves(found: Any) -> list[Any]:
    return [leaf for one in found for leaf in leaves(one)] if isinstance(found, tuple | list) else [found]


@pytest.mark.parametrize("name", sorted(functions()))
def test_what_numpy_gives_as_a_view_is_one(name: str) -> None:
    """Of the whole namespace: results that share memory with an argument, and no others."""
    ours, theirs = functions()[name]
    arguments, named = ARGUMENTS.get(name, ((), {}))
    for args in [arguments] if arguments else [(SQUARE,), (SQUARE, SQUARE)]:
        try:
            with np.errstate(all="ignore"):
                wanted = leaves(theirs(*args, **named))
        except TypeError:
            continue
        break
    given = [one for one in leaves(args) if isinstance(one, np.ndarray)]
    views = [any(np.shares_memory(one, array) for array in given) for one in wanted]

    def ask(function: Any, args: Any) -> list[bool]:
        arrays = iter([xp.asarray(one) for one in given])
        args = [next(arrays) if isinstance(one, np.ndarray) else one for one in args]
        args = [[next(arrays) for _ in one] if isinstance(one, list) else one for one in args]
        found = leaves(function(*args, **named))
        return [one.view is not None or any(one is array for array in args) for one in found]

    assert ask(ours, args) == views
    if name not in ("nonzero", "unique_all", "unique_counts", "unique_inverse", "unique_values"):
        traced: list[bool] = []
        stagec.jit(lambda: traced.extend(ask(ours, args)), frontend="arrays").trace()
        assert traced == views


@pytest.mark.parametrize("name", PROPERTIES)
def test_a_write_changes_what_it_changes_in_numpy_or_raises(name: str) -> None:
    def change(x: Any) -> Any:
        part = PROPERTIES[name](x)
        part[...] = 7
        return x

    wanted = change(X.copy())
    for call in (change, stagec.jit(change, frontend="arrays")):
        if name != "astype" and not np.array_equal(wanted, X):
            with pytest.raises(TypeError, match="NumPy has this array as a view") as caught:
                call(xp.asarray(X))
            assert f"{__file__}:{change.__code__.co_firstlineno + 2}: " in str(caught.value)
        else:
            np.testing.assert_array_equal(np.asarray(call(xp.asarray(X))), wanted)


@pytest.mark.parametrize(
    ("write", "instead"),
    [
        (lambda x: x[0].__setitem__(1, 5), "write a[0, 1] = 5, not a[0][1] = 5"),
        (
            lambda x: [row.__setitem__(0, 1) for row in x],
            "write a[i, 0] = 1 for i in range(len(a)), not row[0] = 1 for row in a",
        ),
        (lambda x: x.T.__setitem__(0, 1), "write a[:, 0] = 1, not a.T[0] = 1"),
        (lambda x: xp.reshape(x, (-1,), copy=False).__setitem__(0, 1), "write reshape(x, shape, copy=True) for a copy"),
        (lambda x: xp.squeeze(x[None], axis=0).__setitem__(0, 1), "write to that array before you call squeeze"),
    ],
)
def test_the_message_says_what_to_write(write: Callable[[Any], Any], instead: str) -> None:
    with pytest.raises(TypeError) as caught:
        write(xp.asarray(X))
    assert f": {MESSAGE.format(instead)}" in str(caught.value)
    assert str(caught.value).endswith(": x = asarray(x, copy=True)")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_indices_are_views_where_they_are_numpys(data: st.DataObject) -> None:
    """Any index: a write to what it gives raises if NumPy's array changes."""
    index = data.draw(nps.basic_indices((2, 3), allow_newaxis=True) | nps.integer_array_indices((2, 3)))
    part, x = X[index], xp.asarray(X)
    found = x[index]
    if isinstance(part, np.ndarray) and not np.shares_memory(part, X) and part.size:
        found[...] = 7
    elif part.size:
        with pytest.raises(TypeError, match=r"write a\[0, 1\] = 5"):
            found[...] = 7


def test_a_view_of_what_nobody_has_any_more_is_changed() -> None:
    """As libraries do it: the name of an array becomes that of its view."""

    def change(x: Any) -> Any:
        x = x + 1
        x = x.T[1:]
        x[0] = 7
        return x

    wanted = change(X.copy())
    for call in (change, stagec.jit(change, frontend="arrays")):
        np.testing.assert_array_equal(np.asarray(call(xp.asarray(X))), wanted)
    x = xp.reshape(xp.asarray(X), (3, 2))
    x[0, 0] = 7
    between = x.T
    part = between[0]
    del x
    with pytest.raises(TypeError, match="NumPy has this array as a view"):
        part[0] = 1  # the transposed one is still there
    del between
    part[0] = 1
    assert part.tolist() == [1, 3, 5]
