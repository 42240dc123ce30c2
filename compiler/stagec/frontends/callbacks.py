"""Find the lines of a model that call back into the Python process that traced them: no artifact can hold those."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from stagec.errors import Problem
from stagec.frontends import user_code
from stagec.specs import FunctionSpec

_CALLBACKS = frozenset({"debug_callback", "debug_print", "pure_callback", "io_callback"})
"""Primitives that call back into Python."""


def problems(spec: FunctionSpec, jaxpr: Any) -> list[Problem]:
    """Return a problem for each line of the model that calls back into Python, in the order of the program."""
    found: dict[str, Problem] = {}
    pending = [jaxpr]
    while pending:
        equations = pending.pop().eqns
        for equation in equations:
            name = equation.primitive.name
            if name in _CALLBACKS:
                place = _place(equation) or spec.entry
                what = f"{place}: a host callback ({name}) cannot be built ahead of time"
                write = "take it out of the function; what it computes can be a result"
                found[what] = Problem(spec.manifest, spec.key, what, write)
            pending += [jaxpr for value in equation.params.values() for jaxpr in _jaxprs(value)]
    return list(found.values())


def _place(equation: Any) -> str:
    """Return FILE:LINE of a callback in the model; "" where nothing is known of it."""
    frames = equation.source_info.traceback.frames if equation.source_info.traceback else []
    found = user_code.place((frame.file_name, frame.line_num) for frame in frames)
    if found:
        return found
    # vmap of an io_callback leaves no call stack: the function that is called back is in the model as well.
    function = inspect.unwrap(getattr(equation.params.get("callback"), "callback_func", None) or len)
    code = getattr(function, "__code__", None)
    return user_code.place([(code.co_filename, code.co_firstlineno)]) if code else ""


def vjp_jaxpr(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], order: int) -> Any:
    """Return the jaxpr of a vector-Jacobian product of `function`, taken `order` times."""

    def flat(arguments: Any) -> list[Any]:
        return _inexact(function(*arguments[0], **arguments[1]))

    def derived(of: Callable[[Any], list[Any]]) -> Callable[[Any], list[Any]]:
        def product(arguments: Any) -> list[Any]:
            results, pull = jax.vjp(of, arguments)
            return _inexact(pull(jax.tree.map(jax.numpy.ones_like, results)))

        return product

    product: Callable[[Any], list[Any]] = flat
    for _ in range(order):
        product = derived(product)
    return jax.make_jaxpr(product)((args, kwargs)).jaxpr


def _inexact(tree: Any) -> list[Any]:
    """The leaves that have a derivative."""
    return [leaf for leaf in jax.tree.leaves(tree) if jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact)]


def _jaxprs(value: Any) -> list[Any]:
    """The jaxprs in a parameter of an equation: closed or open ones, alone or in a sequence."""
    if isinstance(value, list | tuple):
        return [jaxpr for item in value for jaxpr in _jaxprs(item)]
    inner = getattr(value, "jaxpr", value)
    return [inner] if hasattr(inner, "eqns") else []
