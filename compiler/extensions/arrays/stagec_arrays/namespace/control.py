"""Control flow under JAX's names: `cond`, `switch`, `while_loop`, `fori_loop`, `scan`, `map`, on pytrees.

https://docs.jax.dev/en/latest/jax.lax.html#control-flow-operators
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from stagec_arrays import binding, dims, dtypes, pytrees, tracing
from stagec_arrays.namespace.flat import Flat
from stagec_arrays.namespace.promotion import array_of
from stagec_arrays.primitives import control
from stagec_arrays.primitives.structural import convert
from stagec_arrays.values import ShapedArray, shown


def switch(index: Any, branches: Sequence[Callable[..., Any]], *operands: Any) -> Any:
    """Return the result of one of several functions for operands; an index out of range is moved inside.

    Raises TypeError if the functions give arrays of other avals, or other trees.
    """
    if not branches:
        raise ValueError("switch: expected one branch or more")
    leaves, structure = pytrees.flatten(operands)
    number = array_of(index, "switch")
    if number.shape != () or dtypes.KINDS[number.dtype] not in dtypes.INTEGRAL:
        raise TypeError(f"switch: an index is one integer, not {number.dtype} of shape {shown(number.shape)}")
    flat = [Flat(branch, structure) for branch in branches]
    result = control.case(convert(number, dtypes.int32), flat, [array_of(leaf) for leaf in leaves])
    for i, other in enumerate(flat[1:], 1):
        if other.out != flat[0].out:
            raise control.BranchError(f"branches give other trees: branch 0 {flat[0].out}, branch {i} {other.out}")
    return flat[0].unflatten(result)


def cond(pred: Any, true_fun: Callable[..., Any], false_fun: Callable[..., Any], *operands: Any) -> Any:
    """Return what `true_fun` gives for operands if `pred` is true, else what `false_fun` gives; one of them is run."""
    number = array_of(pred, "cond")
    if number.shape != ():
        raise TypeError(f"cond: expected one bool, not an array of shape {shown(number.shape)}")
    index = convert(convert(number, dtypes.bool_), dtypes.int32)
    try:
        return switch(index, [false_fun, true_fun], *operands)
    except control.BranchError as error:
        # The user gave the other one first.
        raise TypeError(str(error).replace("branch 0", "false_fun").replace("branch 1", "true_fun")) from None


def while_loop(cond_fun: Callable[[Any], Any], body_fun: Callable[[Any], Any], init_val: Any) -> Any:
    """Return the last result of `body_fun`, which is called with its own result as long as `cond_fun` is true of that.

    It has no derivative; `scan` has. Raises TypeError if the body gives other avals than it takes.
    """
    leaves, structure = pytrees.flatten((init_val,))
    body, test = Flat(body_fun, structure), Flat(cond_fun, structure)
    (tree,) = structure.children()

    def step(*values: Any) -> list[Any]:
        result = body(*values)
        _same_tree("body_fun", tree, body.out)
        return result

    result = control.while_(test, step, _strong(leaves, step))
    return tree.unflatten(result)


def _same_tree(name: str, taken: Any, given: Any) -> None:
    if taken != given:
        raise TypeError(f"{name} takes a tree {taken} and gives {given}; they must be the same")


def _strong(leaves: Sequence[Any], step: Callable[..., Sequence[Any]], others: Sequence[ShapedArray] = ()) -> list[Any]:
    """Return what a loop starts with, Python's numbers among it as the body gives them, as JAX does.

    step: takes that, and arrays of the avals `others`.
    """
    values = [array_of(leaf) for leaf in leaves]
    if not any(getattr(value, "weak_type", False) for value in values):
        return values
    traced = tracing.trace(step, [*(binding.aval(value) for value in values), *others])
    return [
        convert(value, out.dtype, out.weak_type) if getattr(value, "weak_type", False) else value
        for value, out in zip(values, traced.program.out_avals, strict=False)
    ]


def fori_loop(
    lower: Any, upper: Any, body_fun: Callable[[Any, Any], Any], init_val: Any, *, unroll: int | bool | None = None
) -> Any:
    """Apply `body_fun(i, value)` to `init_val` repeatedly, for i from lower to before upper, and return the last value.

    With numbers as bounds it has a derivative, as a `scan`. unroll: has no meaning here, XLA decides.
    """
    if type(lower) is int and type(upper) is int:

        def turn(state: Any, _: Any) -> tuple[Any, None]:
            i, value = state
            return (i + 1, body_fun(i, value)), None

        start = array_of(lower)
        (_, result), _ = scan(turn, (convert(start, start.dtype), init_val), None, length=max(0, upper - lower))
        return result
    first, last = array_of(lower, "fori_loop"), array_of(upper, "fori_loop")
    for bound in (first, last):
        if bound.shape != () or dtypes.KINDS[bound.dtype] not in dtypes.INTEGRAL:
            raise TypeError(f"fori_loop: a bound is one integer, not {bound.dtype} of shape {shown(bound.shape)}")
    dtype = dtypes.promote(first.dtype, last.dtype)
    state = convert(first, dtype), convert(last, dtype), init_val
    result = while_loop(
        lambda state: state[0] < state[1], lambda state: (state[0] + 1, state[1], body_fun(state[0], state[2])), state
    )
    return result[2]


def scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
) -> tuple[Any, Any]:
    """Return the last carry, and the results stacked along a new first axis.

    f: takes the carry and one part of xs along its first axis, returns the next carry and a result.
    length: how many parts; only needed where xs has no arrays. unroll: has no meaning here, XLA decides.
    Raises TypeError if f gives other avals to carry than it takes, ValueError for lengths that differ.
    """
    carry, structure = pytrees.flatten(init)
    parts, xs_structure = pytrees.flatten(xs)
    arrays = [array_of(part, "scan") for part in parts]
    lengths = {part.shape[0] if part.shape else None for part in arrays} | ({length} if length is not None else set())
    if not lengths:
        raise ValueError("scan: xs has no arrays, so nothing says how many parts there are; give length")
    if len(lengths) != 1 or None in lengths:
        sizes = ", ".join(sorted("none" if size is None else str(size) for size in lengths))
        raise ValueError(f"scan: the first axes of xs, and length, are one size, not {sizes}")
    count: Any = lengths.pop()
    out: list[Any] = []

    def turn(carried: Sequence[Any], x: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        result = f(structure.unflatten(carried), xs_structure.unflatten(x))
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError("scan: f gives a pair: what is carried, and a result")
        following, tree = pytrees.flatten(result[0])
        _same_tree("f", structure, tree)
        ys, out_structure = pytrees.flatten(result[1])
        out[:] = [out_structure]
        return [array_of(leaf) for leaf in following], [array_of(y) for y in ys]

    def step(*values: Any) -> list[Any]:
        return turn(values[: len(carry)], values[len(carry) :])[0]

    elements = [ShapedArray(part.shape[1:], part.dtype) for part in arrays]
    carried, ys = control.scan(turn, _strong(carry, step, elements), arrays, dims.size_of(count), reverse)
    return structure.unflatten(carried), out[0].unflatten(ys)


def map(f: Callable[[Any], Any], xs: Any, *, batch_size: int | None = None) -> Any:  # noqa: A001 - JAX's name
    """Return f of each part of xs along its first axis, stacked. batch_size: has no meaning here."""
    return scan(lambda _, x: ((), f(x)), (), xs)[1]
