"""Functions of `stagec_arrays.lax`: the values of `jax.lax`, and its derivatives.

Modules: `stagec_arrays/namespace/operators.py`, `stagec_arrays/namespace/gather_scatter.py`,
`stagec_arrays/namespace/windows.py`, `stagec_arrays/primitives/contractions.py`,
`stagec_arrays/primitives/cumulative.py`, `stagec_arrays/primitives/indexing.py`,
`stagec_arrays/primitives/sorting.py`, `stagec_arrays/primitives/windows.py`, `stagec_arrays/lax.py`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import stagec
import stagec_arrays
import stagec_arrays.numpy as xp
from compiler.extensions.arrays.tests import mistakes
from stagec_arrays import lax

RNG = np.random.default_rng(0)
X = RNG.normal(size=(4, 6)).astype(np.float32)
TIES = np.array([[1, 2, 2, 0.5, 2, 0], [3, 3, 3, 1, 0, 0], [0, 0, 1, 1, 2, 3], [1, 1, 1, 1, 1, 1]], np.float32)
IMAGE, KERNEL = RNG.normal(size=(2, 7, 6, 4)).astype(np.float32), RNG.normal(size=(3, 2, 2, 6)).astype(np.float32)
GROUPED = RNG.normal(size=(3, 3, 4, 6)).astype(np.float32)
PLACES = np.array([[0, 1], [3, 5], [0, 1], [-1, 2], [2, 9]], np.int32)
UPDATES = np.array([0.5, 2.0, 3.0, 7.0, 9.0], np.float32)


def gathered(lax: Any, x: Any, **options: Any) -> Any:
    numbers = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0, 1))
    return lax.gather(x, PLACES, numbers, (1, 2), **options)


def scattered(lax: Any, how: str, x: Any, updates: Any, places: Any = PLACES, **options: Any) -> Any:
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(), inserted_window_dims=(0, 1), scatter_dims_to_operand_dims=(0, 1)
    )
    return getattr(lax, how)(x, places, updates, numbers, **options)


def windowed(lax: Any, n: Any, x: Any, start: Any, how: Any, padding: Any = "SAME", **options: Any) -> Any:
    return lax.reduce_window(x, start, how, (2, 3), (1, 2), padding, **options)


Program = Callable[[Any, Any, Any], Any]
OF_X: dict[str, Program] = {
    "clamp": lambda lax, n, x: lax.clamp(-0.5, x, n.abs(x) * 0.5),
    "select": lambda lax, n, x: lax.select(x > 0, x, x * 2),
    "erf": lambda lax, n, x: [lax.erf(x), lax.erfc(x), lax.erf_inv(x * 0.3), lax.rsqrt(x * x + 1), lax.cbrt(x)],
    "gammas": lambda lax, n, x: [lax.lgamma(x * x + 0.1), lax.digamma(x * x + 0.1)],
    "sums": lambda lax, n, x: [lax.cumsum(x, 1), lax.cumsum(x, 0, reverse=True), lax.cumlogsumexp(x, 1)],
    "products": lambda lax, n, x: [lax.cumprod(x, 1), lax.cumprod(x, 1, reverse=True)],
    "extrema": lambda lax, n, x: [lax.cummax(x, 1), lax.cummin(x, 1, reverse=True), lax.cummax(x, 0)],
    "scan": lambda lax, n, x: lax.associative_scan(lambda a, b: a * b + b, x, axis=1),
    "scan_of_trees": lambda lax, n, x: lax.associative_scan(
        lambda a, b: {"p": a["p"] * b["p"], "s": a["s"] * b["p"] + b["s"]}, {"p": x, "s": x + 1}, reverse=True
    ),
    "sort": lambda lax, n, x: lax.sort((n.round(x), x * 2, x), dimension=1, num_keys=2),
    "sort_key_val": lambda lax, n, x: lax.sort_key_val(x, x * x, 0),
    "top_k": lambda lax, n, x: [lax.top_k(x, 3)[0], lax.top_k(x, 2, axis=0)[0]],
    "dynamic_slice": lambda lax, n, x: [
        lax.dynamic_slice(x, (n.asarray(2), -3), (2, 3)),
        lax.dynamic_slice(x, n.asarray([9, 0]), (2, 2)),
        lax.dynamic_index_in_dim(x, n.asarray(-1), 1, keepdims=False),
        lax.dynamic_slice_in_dim(x, 1, 2),
    ],
    "dynamic_update": lambda lax, n, x: [
        lax.dynamic_update_slice(x, x[:2, :2] * 3, (n.asarray(1), 5)),
        lax.dynamic_update_index_in_dim(x, x[0] * 5, n.asarray(2), 0),
        lax.dynamic_update_slice_in_dim(x, x[:, :1], n.asarray(1, dtype="uint8"), 1),
    ],
    "gather": lambda lax, n, x: [
        gathered(lax, x, mode="clip"),
        gathered(lax, x, mode="fill", fill_value=0),
        gathered(lax, x[:, :3], mode="fill", fill_value=0),
    ],
    "scatter": lambda lax, n, x: [
        scattered(lax, "scatter", x, UPDATES[[0, 1, 0, 3, 4]]),
        scattered(lax, "scatter_add", x, UPDATES * x[0, :5]),
        scattered(lax, "scatter_add", x, UPDATES * x[0, :5], mode="clip"),
        scattered(lax, "scatter_mul", x, UPDATES[1:] * x[1, 1:5], PLACES[1:], unique_indices=True),
        scattered(lax, "scatter_max", x, UPDATES * x[0, :5]),
        scattered(lax, "scatter_min", x, UPDATES * 0 + x[0, 1]),
    ],
    "windows": lambda lax, n, x: [
        windowed(lax, n, x, 0.0, lax.add),
        windowed(lax, n, x, 0.0, lax.add, [(1, 0), (2, 1)], base_dilation=(2, 1), window_dilation=(1, 2)),
        windowed(lax, n, x, -np.inf, lax.max),
        windowed(lax, n, x, np.inf, lax.min, "VALID"),
        windowed(lax, n, x, -np.inf, lax.max, [(1, 1), (0, 2)]),
        windowed(lax, n, x, -np.inf, lax.max, [(1, 1), (0, 2)], base_dilation=(2, 3)),
    ],
    "at": lambda lax, n, x: [
        x.at[n.asarray(PLACES[:, 0]) + n.argmax(x[0]) * 0].add(n.ones((5, 6))),
        x.at[:, n.asarray([1, 9]) + n.argmax(x[0]) * 0].set(x[:, :2] * 2),
        x.at[n.argmax(x[0]) * 0 + 7, 2].multiply(2.0),
    ],
    "barrier": lambda lax, n, x: lax.optimization_barrier({"x": x * 2, "y": (x,)}),
    "stop": lambda lax, n, x: lax.stop_gradient(x) * x,
}
WITHOUT_DERIVATIVE: dict[str, Program] = {
    "indices": lambda lax, n, x: [lax.top_k(x, 3)[1], lax.top_k(x, 4, axis=0)],
    "fill": lambda lax, n, x: [gathered(lax, n.asarray(x, dtype=t), mode="fill") for t in ("float32", "int8")],
    "window_of_function": lambda lax, n, x: windowed(lax, n, x, -np.inf, n.maximum),
    "window_of_products": lambda lax, n, x: windowed(lax, n, x, 1.0, lax.mul, "SAME_LOWER"),
    "window_of_program": lambda lax, n, x: windowed(lax, n, x, 2.0, lambda a, b: a + b * b),
    "window_of_dilated_extrema": lambda lax, n, x: windowed(lax, n, x, -np.inf, lax.max, window_dilation=(2, 1)),
    "window_of_trees": lambda lax, n, x: lax.reduce_window(
        {"x": x, "i": n.reshape(n.arange(24, dtype="int32"), (4, 6))},
        {"x": -np.inf, "i": np.int32(-1)},
        lambda a, b: {key: lax.select(a["x"] >= b["x"], a[key], b[key]) for key in a},
        (2, 3),
        (1, 1),
        "SAME",
    ),
    "window_of_integers": lambda lax, n, x: windowed(lax, n, n.asarray(x * 9, dtype="int32"), -(2**31), lax.max),
    "sort_one": lambda lax, n, x: [lax.sort(x), lax.sort(x, dimension=0)],
}


def convolutions(lax: Any, image: Any, kernel: Any, grouped: Any) -> Any:
    layout = ("NHWC", "HWIO", "NHWC")
    by_hand = lax.ConvDimensionNumbers((3, 2, 0, 1), (3, 2, 0, 1), (2, 3, 0, 1))
    return {
        "same": lax.conv_general_dilated(image, grouped, (2, 1), "SAME", dimension_numbers=layout),
        "dilated": lax.conv_general_dilated(
            image, grouped, (1, 2), [(2, 1), (0, 3)], (2, 1), (1, 2), dimension_numbers=layout
        ),
        "groups": lax.conv_general_dilated(
            image, kernel, (2, 1), "SAME_LOWER", dimension_numbers=layout, feature_group_count=2
        ),
        "batches": lax.conv_general_dilated(
            image, grouped, (1, 1), "VALID", dimension_numbers=layout, batch_group_count=2
        ),
        "by_hand": lax.conv_general_dilated(image, image[:3, :2], (1, 1), "VALID", dimension_numbers=by_hand),
        "plain": lax.conv(image, image[:, :, :2, :3], (1, 1), "VALID"),
    }


def compared(found: Any, wanted: Any, name: str, exact: bool = False) -> None:
    ours, theirs = (list(map(np.asarray, jax.tree.leaves(tree))) for tree in (found, wanted))
    for a, b in zip(ours, theirs, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        np.testing.assert_allclose(a, b, 0 if exact else 3e-5, 0 if exact else 3e-5, err_msg=name)


def total(n: Any, tree: Any) -> Any:
    """Return a number that each element has another part in."""
    weights = [n.reshape(n.arange(leaf.size, dtype="float32"), leaf.shape) + 1 for leaf in jax.tree.leaves(tree)]
    return sum(n.sum(leaf * by) for leaf, by in zip(jax.tree.leaves(tree), weights, strict=True))


WITH_TIES = ("clamp", "select", "products", "extrema", "sort", "top_k", "scatter", "windows")


@pytest.mark.pinned(but=2)
@pytest.mark.parametrize(("x", "names"), [(X, tuple(OF_X)), (TIES, WITH_TIES)], ids=["drawn", "ties"])
def test_values_and_derivatives_are_jaxs(x: Any, names: tuple[str, ...]) -> None:
    derived = {name: OF_X[name] for name in names}

    def values(lax: Any, n: Any, x: Any) -> Any:
        return {name: f(lax, n, x) for name, f in {**derived, **WITHOUT_DERIVATIVE}.items()}

    def gradients(grad: Any, lax: Any, n: Any, x: Any) -> Any:
        return {name: grad(lambda x, f=f: total(n, f(lax, n, x)))(x) for name, f in derived.items()}

    wanted = jax.jit(lambda x: values(jax.lax, jnp, x))(x)
    found = stagec.jit(lambda x: values(stagec_arrays.lax, xp, x), frontend="arrays")(x)
    for name in wanted:
        compared(found[name], wanted[name], name)
    wanted = jax.jit(lambda x: gradients(jax.grad, jax.lax, jnp, x))(x)
    found = stagec.jit(lambda x: gradients(stagec_arrays.grad, stagec_arrays.lax, xp, x), frontend="arrays")(x)
    for name in wanted:
        compared(found[name], wanted[name], name)


def test_convolutions_are_jaxs() -> None:
    """Values, and derivatives in array and kernel: strides, dilations, groups, layouts."""
    arguments = IMAGE, KERNEL, GROUPED
    compared(
        stagec.jit(lambda *args: convolutions(stagec_arrays.lax, *args), frontend="arrays")(*arguments),
        jax.jit(lambda *args: convolutions(jax.lax, *args))(*arguments),
        "convolution",
    )

    def gradients(grad: Any, lax: Any, n: Any, *args: Any) -> Any:
        return {
            name: grad(lambda *args, name=name: total(n, n.sin(convolutions(lax, *args)[name])), (0, 1, 2))(*args)
            for name in ("same", "dilated", "groups", "batches", "by_hand", "plain")
        }

    wanted = jax.jit(lambda *args: gradients(jax.grad, jax.lax, jnp, *args))(*arguments)
    found = stagec.jit(lambda *args: gradients(stagec_arrays.grad, stagec_arrays.lax, xp, *args), frontend="arrays")(
        *arguments
    )
    for name in wanted:
        for a, b in zip(found[name], wanted[name], strict=True):
            np.testing.assert_allclose(np.asarray(a), b, 2e-4, 2e-4 * float(np.abs(b).max() + 1), err_msg=name)


def of_any_size(lax: Any, n: Any, x: Any) -> Any:
    """What takes symbolic sizes: updates, orders, loops, windows, places."""
    rows = x.shape[0]
    _, sums = lax.scan(lambda carry, row: (carry + row, carry * n.sum(n.ones((rows,)))), x[0], x)
    lines = n.reshape(x, (1, 4, rows))
    return [
        *(x.at[0].set(1.0), x.at[1:].multiply(3.0), x.at[n.asarray([0, 1]), 1:].add(x[:2, 1:]), sums),
        *(n.argmax(x, axis=0) * 1.0, lax.cumsum(x, 0), lax.cummax(x, 1), lax.top_k(x, 2, axis=0)[0]),
        *(lax.map(lambda row: row * 2, x), lax.dynamic_slice_in_dim(x, 1, rows - 1), lax.sort(x, dimension=0)),
        *(lax.reduce_window(x, 0.0, lax.add, (2, 1), (1, 1), "SAME"), lax.dynamic_index_in_dim(x, n.asarray(-1))),
        lax.reduce_window(x, -np.inf, lax.max, (2, 2), (1, 1), "VALID"),
        *lax.reduce_window(
            (lax.stop_gradient(x), lax.stop_gradient(x) * 2),
            (0.0, 1.0),
            lambda a, b: (a[0] + b[0], a[1] * b[1]),
            (rows, 2),
        ),
        lax.conv_general_dilated(lines, n.ones((2, 4, 3)), (2,), "SAME"),
    ]


def test_symbolic_sizes() -> None:
    """One artifact for all sizes, which `jax.export` reads: values, and the gradient in it."""

    def both(grad: Any, lax: Any, n: Any, x: Any) -> Any:
        def number(x: Any) -> Any:
            return sum(n.sum(n.sin(leaf)) for leaf in of_any_size(lax, n, x))

        return of_any_size(lax, n, x), grad(number)(x)

    struct = stagec_arrays.ShapeDtypeStruct(
        stagec_arrays.symbolic_shape("rows, 4", constraints=["rows >= 2"]), "float32"
    )
    wrapped = stagec.jit(lambda x: both(stagec_arrays.grad, stagec_arrays.lax, xp, x), frontend="arrays")
    exported = wrapped.trace(struct).export()
    x = RNG.normal(size=(5, 4)).astype(np.float32)
    wanted = jax.jit(lambda x: both(jax.grad, jax.lax, jnp, x))(x)
    compared(exported.call(x), wanted, "here")
    compared(jax.export.deserialize(bytearray(exported.serialize())).call(x), wanted, "JAX")


def test_mistakes() -> None:
    for use, message in (
        (lambda lax: lax.conv(X[None], X, (1, 1), "SAME"), r"not of shapes \(1, 4, 6\) and \(4, 6\)"),
        (lambda lax: lax.conv(IMAGE, IMAGE, (1,), "SAME"), "strides and dilations are 2 integers"),
        (lambda lax: lax.conv(IMAGE, IMAGE, (1, 1), "ALL"), 'padding is "SAME", "SAME_LOWER", "VALID" or pairs'),
        (
            lambda lax: lax.conv_general_dilated(
                IMAGE, KERNEL, (1, 1), "SAME", dimension_numbers=("NHW", "HWIO", "NC")
            ),
            r'write layouts such as \("NHWC", "HWIO", "NHWC"\)',
        ),
        (lambda lax: lax.reduce_window(X, 0.0, lax.add, (2,), (1,), "SAME"), "are 2 integers, one for each axis"),
        (
            lambda lax: lax.reduce_window(X, 0.0, lambda a, b: a > b, (2, 2), (1, 1), "SAME"),
            r"and gives one, not \(bool",
        ),
        (lambda lax: lax.dynamic_slice(X, (0,), (2, 2)), "expected 2 indices, one for each axis, not 1"),
        (lambda lax: lax.dynamic_slice(X, (0, 0), (5, 2)), r"a slice of \(5, 2\) is not in an array of shape \(4, 6\)"),
        (lambda lax: lax.dynamic_update_slice(X, X.astype("f2"), (0, 0)), "expected an update of float32"),
        (lambda lax: gathered(lax, X, mode="wrap"), 'mode is "clip", "fill", "drop" or "promise_in_bounds"'),
        (
            lambda lax: scattered(lax, "scatter", X, np.ones((5, 1), "f")),
            "updates have 0 axes of slices and 1 of indices",
        ),
        (lambda lax: lax.sort((X, X), num_keys=3), "num_keys is from 1 to 2"),
        (lambda lax: lax.top_k(X, 7), r"top_k: axis 1 of shape \(4, 6\) does not have 7 elements"),
        (lambda lax: lax.select(X > 0, X, X[0]), "expected arrays of one shape"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            use(stagec_arrays.lax)


WITHOUT: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "trees": (
        lambda x: lax.reduce_window((x, x), (0.0,), lambda a, b: a, (2, 2)),
        ValueError,
        r"reduce_window: init_value is a tree as operand is, .*\(\*, \*\).*, not .*\(\*,\)",
    ),
    "shapes": (
        lambda x: lax.reduce_window((x, x[:2]), (0.0, 0.0), lambda a, b: a, (2, 2)),
        ValueError,
        r"reduce_window: expected arrays of one shape, not of \(4, 6\) and \(2, 6\)",
    ),
    "result": (
        lambda x: lax.reduce_window((x, x), (0.0, 0.0), lambda a, b: [*a], (2, 2)),
        TypeError,
        r"reduce_window: the computation takes trees .*\(\*, \*\).* and gives .*\[\*, \*\]",
    ),
    "closure": (
        lambda x: lax.map(lambda x: lax.reduce_window(x, 0.0, lambda a, b: a + b * x[0], (2,)), x),
        ValueError,
        "reduce_window: the computation uses an array that is traced outside it; it may use only its two arguments",
    ),
    "product": (
        stagec_arrays.grad(lambda x: xp.sum(lax.reduce_window(x, 1.0, lax.mul, (2, 1)))),
        TypeError,
        r"reduce_window has a derivative only for sums, maxima and minima .*; combine slices .* x\[:-1\] \* x\[1:\]",
    ),
    "dilated": (
        stagec_arrays.grad(lambda x: lax.reduce_window(x, -np.inf, xp.maximum, (2, 6), window_dilation=(3, 1))[0, 0]),
        TypeError,
        "reduce_window of a dilated window has a derivative only for sums; combine slices",
    ),
    "loop": (
        stagec_arrays.grad(lambda x: xp.sum(lax.while_loop(lambda x: x[0, 0] < 1, xp.exp, x))),
        TypeError,
        "while has no derivative: .* write scan, or fori_loop",
    ),
}
"""Mistakes of which the message names the user's line."""


@pytest.mark.parametrize("name", WITHOUT)
def test_mistakes_name_the_users_line(name: str) -> None:
    mistakes.check(WITHOUT[name], X)
