"""Find the lines of a model that call back into the Python process that traced them: no artifact can hold those."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.export

from stagec.core.errors import Problem
from stagec.core.specs import FunctionSpec
from stagec.frontends import user_code

_CALLBACKS = frozenset({"buffer_callback", "debug_callback", "debug_print", "io_callback", "pure_callback"})
"""Primitives that call back into Python."""


def problems(spec: FunctionSpec, jaxpr: Any) -> list[Problem]:
    """Return a problem for each line of the model that calls back into Python, in the order of the program."""
    write = "take it out of the function; what it computes can be a result"
    found = sentences(jaxpr, spec.platforms, spec.entry)
    return [Problem(spec.manifest, spec.key, what, write) for what in found]


def sentences(jaxpr: Any, platforms: Sequence[str], entry: str) -> list[str]:
    """Return a sentence for each line of the model that calls back into Python, in the order of the program.

    platforms: that it is lowered for. entry: what is named where no line is known.
    """
    lowered: dict[str, bool] = {}

    def calls_back(equation: Any) -> bool:
        if equation.primitive.name in _CALLBACKS:
            return True
        key = f"{equation.primitive} {[str(variable.aval) for variable in equation.invars]} {equation.params}"
        if key not in lowered:
            lowered[key] = _lowers_to_a_callback(equation, platforms)
        return lowered[key]

    return list(
        dict.fromkeys(
            f"{place or entry}: a host callback ({equation.primitive.name}) cannot be built ahead of time"
            for equation, place in _leaves(jaxpr, "")
            if calls_back(equation)
        )
    )


def _leaves(jaxpr: Any, outside: str) -> Iterator[tuple[Any, str]]:
    """Yield each equation that has no jaxpr inside, and its place in the model.

    outside: the place of the equation around `jaxpr`. It stands for equations without one: in a function that a library
    has jitted, call stacks begin there.
    """
    for equation in jaxpr.eqns:
        place = _place(equation) or outside
        inside = [inner for value in equation.params.values() for inner in _jaxprs(value)]
        if not inside or equation.primitive.name in _CALLBACKS:
            yield equation, place
        for inner in inside:
            yield from _leaves(inner, place)


def _lowers_to_a_callback(equation: Any, platforms: Sequence[str]) -> bool:
    """Whether an operation calls back into Python in what it is lowered to, where no jaxpr shows it."""

    def alone(*operands: Any) -> Any:
        return equation.primitive.bind(*operands, **equation.params)

    try:
        operands = [jax.ShapeDtypeStruct(variable.aval.shape, variable.aval.dtype) for variable in equation.invars]
        jax.export.export(jax.jit(alone), platforms=list(platforms))(*operands)
    except Exception as error:  # noqa: BLE001 - an operation that wants more around it raises anything
        return isinstance(error, NotImplementedError) and "callback" in str(error)
    return False


def _place(equation: Any) -> str:
    """Return FILE:LINE of an equation in the model; "" where nothing is known of it."""
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
    """The jaxprs in a parameter of an equation: closed or open ones, alone or in containers."""
    if isinstance(value, list | tuple):
        return [jaxpr for item in value for jaxpr in _jaxprs(item)]
    if isinstance(value, Mapping):
        return _jaxprs(list(value.values()))
    inner = getattr(value, "jaxpr", value)
    return [inner] if hasattr(inner, "eqns") else []
