"""Derivatives of functions of arrays, under JAX's names: `grad`, `value_and_grad`, `vjp`, and what steers them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from stagec_arrays import binding, pytrees
from stagec_arrays.dtypes import COMPLEX, KINDS
from stagec_arrays.namespace.flat import Flat
from stagec_arrays.namespace.policies import Policy
from stagec_arrays.namespace.promotion import array_of
from stagec_arrays.primitives import derivatives as d
from stagec_arrays.primitives.calls import call_checkpointed, call_custom_vjp, stopped
from stagec_arrays.primitives.structural import convert
from stagec_arrays.values import Literal, shown


def vjp(fun: Callable[..., Any], *primals: Any, has_aux: bool = False) -> Any:
    """Return the result of a function, and the function that maps cotangents of the result to those of the arguments.

    As `jax.vjp` (https://docs.jax.dev/en/latest/_autosummary/jax.vjp.html).

    primals: the arguments.
    has_aux: `fun` returns a pair, and only its first part has a derivative. Then the second part is returned third.

    Cotangents of integers have dtype float0.

    >>> import stagec_arrays.numpy as np
    >>> y, pullback = stagec_arrays.vjp(np.sin, 0.0)
    >>> [float(cotangent) for cotangent in pullback(1.0)]
    [1.0]
    """
    leaves, structure = pytrees.flatten(primals)
    values = [array_of(leaf) for leaf in leaves]

    def pair(*args: Any) -> tuple[Any, Any]:
        result = fun(*args)
        if not has_aux:
            return result, None
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError("has_aux: the function gives a pair, the result and what is beside it")
        return result

    flat = Flat(pair, structure)
    results, pull = d.pullback(flat, values, getattr(fun, "__name__", ""))
    out_structure, _ = flat.out.children()
    count = out_structure.num_leaves

    def pullback(cotangent: Any) -> Any:
        given, given_structure = pytrees.flatten(cotangent)
        if given_structure != out_structure:
            raise TypeError(f"the cotangent has structure {given_structure}, the result has {out_structure}")
        cotangents = [_cotangent(leaf, result) for leaf, result in zip(given, results[:count], strict=True)]
        gradients = pull([*cotangents, *[None] * (len(results) - count)])
        return structure.unflatten(
            [_of_argument(gradient, value) for gradient, value in zip(gradients, values, strict=True)]
        )

    out, extra = flat.unflatten(list(map(_array, results)))
    return (out, pullback, extra) if has_aux else (out, pullback)


def _array(value: Any) -> Any:
    """Return a result that is a scalar of a program as an array."""
    return binding.constant(value.value) if isinstance(value, Literal) else value


def _cotangent(given: Any, result: Any) -> Any:
    if not d.is_differentiable(result):
        return None
    value = array_of(given)
    if tuple(value.shape) != tuple(result.shape):
        raise ValueError(f"a cotangent has shape {shown(value.shape)}, its result {shown(result.shape)}")
    if value.dtype != result.dtype and not getattr(value, "weak_type", False):
        raise TypeError(f"a cotangent is of {value.dtype}, its result of {result.dtype}; convert it with astype")
    return convert(value, result.dtype)


def _of_argument(cotangent: Any, value: Any) -> Any:
    if not d.is_differentiable(value):
        return np.zeros(value.shape, d.FLOAT0)
    return _array(d.zeros_like(value) if cotangent is None else cotangent)


def value_and_grad(
    fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False, allow_int: bool = False
) -> Callable[..., Any]:
    """Return a function that returns the result of `fun`, a real number, and its gradient.

    As `jax.value_and_grad`.

    argnums: the positional arguments to derive by: one number, or several for a tuple of gradients.
    has_aux: `fun` returns a pair of the number and something else, and so does the new function, before the gradient.
    allow_int: whether these arguments may be integers.

    The function raises TypeError if the result is not a real floating-point number, or if an argument is an integer.

    >>> import stagec_arrays.numpy as np
    >>> value, gradient = stagec_arrays.value_and_grad(lambda x: np.sum(x**2))(np.asarray([1.0, 2.0]))
    >>> float(value), gradient
    (5.0, Array([2., 4.], dtype=float32))
    """

    @functools.wraps(fun)
    def evaluate(*args: Any, **kwargs: Any) -> Any:
        numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
        for number in numbers:
            if not -len(args) <= number < len(args):
                raise ValueError(f"grad: argnums is {argnums}, and {len(args)} arguments are given by position")
        numbers = tuple(number % len(args) for number in numbers)
        for number in numbers:
            for leaf in pytrees.flatten(args[number])[0]:
                value = array_of(leaf)
                if not allow_int and not d.is_differentiable(value):
                    raise TypeError(f"grad: argument {number} has integers ({value.dtype}), which have no derivative")

        def of_some(*some: Any) -> Any:
            given = list(args)
            for number, argument in zip(numbers, some, strict=True):
                given[number] = argument
            return fun(*given, **kwargs)

        result = vjp(of_some, *(args[number] for number in numbers), has_aux=has_aux)
        value, pull = result[:2]
        leaves, _ = pytrees.flatten(value)
        if len(leaves) != 1 or leaves[0].shape != () or not d.is_differentiable(leaves[0]):
            what = ", ".join(f"{leaf.dtype} of shape {shown(leaf.shape)}" for leaf in leaves)
            raise TypeError(f"grad: the function must give one real number, not {what or 'nothing'}")
        if KINDS[leaves[0].dtype] == COMPLEX:
            raise TypeError("grad: the function gives a complex number; take its real part, or use vjp")
        cotangent = pytrees.tree_map(lambda leaf: np.ones((), leaf.dtype), value)
        gradients = pull(cotangent)
        gradient = gradients[0] if isinstance(argnums, int) else gradients
        return ((value, result[2]) if has_aux else value), gradient

    return evaluate


def grad(
    fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False, allow_int: bool = False
) -> Callable[..., Any]:
    """Return a function that returns the gradient of `fun`, whose result is a real number. As `jax.grad`.

    Parameters and errors are those of `value_and_grad`. With `has_aux`, the function returns the gradient and the rest.

    >>> float(stagec_arrays.grad(lambda x: x**2)(3.0))
    6.0
    """
    both = value_and_grad(fun, argnums, has_aux, allow_int)

    @functools.wraps(fun)
    def gradient(*args: Any, **kwargs: Any) -> Any:
        value, result = both(*args, **kwargs)
        return (result, value[1]) if has_aux else result

    return gradient


def stop_gradient(x: Any) -> Any:
    """Return the same arrays, in a tree, with a derivative of zero. As `jax.lax.stop_gradient`.

    >>> float(stagec_arrays.grad(lambda x: x * stagec_arrays.stop_gradient(x))(3.0))
    3.0
    """
    return pytrees.tree_map(lambda leaf: stopped(array_of(leaf)), x)


def checkpoint(
    fun: Callable[..., Any],
    *,
    prevent_cse: bool = True,
    policy: Policy | None = None,
    static_argnums: int | Sequence[int] = (),
) -> Callable[..., Any]:
    """Return a function whose derivative computes values again instead of keeping them.

    As `jax.checkpoint`.

    prevent_cse: whether to stop the compiler from using the first values after all.
    policy: the values to keep nevertheless, one of `checkpoint_policies`. None keeps only the arguments.
    static_argnums: the arguments that are not arrays.

    A policy decides about the function's own operations. Those in a loop or a branch inside the function are computed
    again. In the body of a `scan`, the derivative keeps what the policy keeps for each step.

    Raises TypeError for a policy of JAX, which does not know the operations of stagec.

    >>> import stagec_arrays.numpy as np
    >>> layer = stagec_arrays.checkpoint(lambda x: np.sin(np.sin(x)))
    >>> float(stagec_arrays.grad(layer)(0.0))
    1.0
    """
    if getattr(policy, "__module__", "").split(".")[0] == "jax":
        write = "write the one of its name in stagec_arrays.checkpoint_policies"
        raise TypeError(f"checkpoint: the policy is JAX's; {write}")

    @functools.wraps(fun)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        given = static_argnums if isinstance(static_argnums, Sequence) else (static_argnums,)
        static = {number % len(args): args[number] for number in given}
        dynamic = [arg for i, arg in enumerate(args) if i not in static]
        leaves, structure = pytrees.flatten((dynamic, kwargs))
        flat = Flat(lambda given, named: fun(*_inserted(given, static), **named), structure)
        return flat.unflatten(call_checkpointed(flat, [array_of(leaf) for leaf in leaves], prevent_cse, policy))

    return checkpointed


def _inserted(values: Sequence[Any], fixed: Mapping[int, Any]) -> list[Any]:
    """Return values with fixed ones in their places."""
    left = iter(values)
    return [fixed[i] if i in fixed else next(left) for i in range(len(values) + len(fixed))]


class custom_vjp:  # noqa: N801 - JAX's name
    """A function with a derivative that you write, as `jax.custom_vjp`.

    nondiff_argnums: the arguments that are not arrays. `bwd` takes them first, and returns no cotangents for them.

    >>> import stagec_arrays.numpy as np
    >>> @stagec_arrays.custom_vjp
    ... def clipped(x):
    ...     return np.clip(x, -1.0, 1.0)
    >>> def fwd(x):
    ...     return clipped(x), None
    >>> def bwd(_, cotangent):
    ...     return (cotangent,)
    >>> clipped.defvjp(fwd, bwd)
    >>> float(stagec_arrays.grad(clipped)(5.0))
    1.0
    """

    def __init__(self, fun: Callable[..., Any], nondiff_argnums: Sequence[int] = ()) -> None:
        functools.update_wrapper(self, fun)
        self._fun = fun
        self._fixed = tuple(nondiff_argnums)
        self._rules: tuple[Callable[..., Any], Callable[..., Any]] | None = None

    def defvjp(self, fwd: Callable[..., Any], bwd: Callable[..., Any]) -> None:
        """Set the derivative.

        fwd: takes the arguments, and returns the result and the data for `bwd`.
        bwd: takes the data of `fwd` and the cotangent of the result, and returns a tuple with the cotangent of each
            argument. None stands for zero.
        """
        self._rules = fwd, bwd

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Return the method of an instance; of the class, this function."""
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function. Raises AttributeError if `defvjp` was not called."""
        if self._rules is None:
            raise AttributeError(f"{self._fun.__name__} has no derivative yet: call defvjp(fwd, bwd)")
        fwd, bwd = self._rules
        args = _positional(self._fun, args, kwargs)
        fixed = {number: args[number] for number in self._fixed}
        leaves, structure = pytrees.flatten(tuple(arg for i, arg in enumerate(args) if i not in fixed))
        flat = Flat(lambda *given: self._fun(*_inserted(given, fixed)), structure)

        def derive(operands: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
            pair = fwd(*_inserted(structure.unflatten(map(_array, operands)), fixed))
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise TypeError(f"{getattr(fwd, '__name__', 'fwd')} gives a pair: the result, and what bwd needs")
            _, needed = pair
            result = bwd(*fixed.values(), needed, flat.unflatten(list(map(_array, cotangents))))
            return _of_user(result, structure, operands, getattr(bwd, "__name__", "bwd"))

        name = getattr(self._fun, "__name__", type(self._fun).__name__)
        return flat.unflatten(call_custom_vjp(name, flat, derive, [array_of(leaf) for leaf in leaves]))


def _positional(fun: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    if not kwargs:
        return args
    bound = inspect.signature(fun).bind(*args, **kwargs)
    bound.apply_defaults()
    if bound.kwargs:
        names = ", ".join(bound.kwargs)
        raise TypeError(f"{getattr(fun, '__name__', fun)}: a custom_vjp does not take keyword-only arguments: {names}")
    return bound.args


def _of_user(cotangents: Any, structure: Any, operands: Sequence[Any], name: str) -> list[Any]:
    """Return the cotangents of leaves of what a user's `bwd` gives. Raises TypeError, ValueError."""
    trees = structure.children()
    if not isinstance(cotangents, tuple | list) or len(cotangents) != len(trees):
        count = len(cotangents) if isinstance(cotangents, tuple | list) else f"a {type(cotangents).__name__}"
        raise TypeError(f"{name} gives a tuple with the cotangent of each of {len(trees)} arguments, not {count}")
    result: list[Any] = []
    for number, (tree, part) in enumerate(zip(trees, cotangents, strict=True)):
        if part is None:
            result += [None] * tree.num_leaves
            continue
        leaves, given = pytrees.flatten(part)
        if given != tree:
            raise TypeError(f"{name}: the cotangent of argument {number} has structure {given}, the argument {tree}")
        for leaf in leaves:
            operand = operands[len(result)]
            if getattr(leaf, "dtype", None) == d.FLOAT0 or not d.is_differentiable(operand):
                result.append(None)
                continue
            value = array_of(leaf)
            if tuple(value.shape) != tuple(operand.shape):
                what = f"has shape {shown(value.shape)}, the argument {shown(operand.shape)}"
                raise ValueError(f"{name}: a cotangent of argument {number} {what}")
            result.append(convert(value, operand.dtype))
    return result
