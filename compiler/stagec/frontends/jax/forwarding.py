"""A JAX function that loses no update, and the results of a jaxpr that are its unchanged arguments.

A transformation such as `nnx.jit` or `nnx.remat` gives a model's arrays out of an inner program again, the unchanged
ones too: as other tracers of the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from stagec.frontends.common import closures, updates


def watched(function: Callable[..., Any], refusal: updates.Refusal) -> Callable[..., Any]:
    """Return a JAX function under `updates.watched`."""

    def value_of(leaf: Any) -> Any:
        return leaf if isinstance(leaf, jax.core.Tracer) else None

    return updates.watched(function, refusal, value_of, "NAME = jax.tree.map(lambda leaf: leaf, NAME)", _same)


def _same(function: Callable[..., Any], structure: Any, before: Mapping[str, Any], paths: Sequence[str]) -> set[str]:
    """Return those of `paths` that keep their value in a call. It traces the function once more."""
    if structure is None:
        return set()

    def call(values: list[Any]) -> list[Any]:
        args, kwargs = jax.tree.unflatten(structure, values)
        function(*args, **kwargs)
        after = dict(closures.leaves((args, kwargs)))
        return [after[path] for path in paths]

    jaxpr = jax.make_jaxpr(call)(list(before.values())).jaxpr
    numbers = {path: i for i, path in enumerate(before)}
    return {
        path
        for path, variable in zip(paths, jaxpr.outvars, strict=True)
        if path in numbers and _source(jaxpr, variable) == numbers[path]
    }


def _source(jaxpr: Any, variable: Any) -> int | None:
    """Return the number of the argument that a variable is; None if it is another value, or it is not known."""
    for i, argument in enumerate(jaxpr.invars):
        if argument is variable:
            return i
    for equation in jaxpr.eqns:
        for i, result in enumerate(equation.outvars):
            if result is variable:
                operand = _operand(equation, i)
                return None if operand is None else _source(jaxpr, equation.invars[operand])
    return None


def _operand(equation: Any, number: int) -> int | None:
    """Return the number of the operand that a result of an equation is."""
    params = equation.params
    if "branches" in params:
        sources = {_source(branch.jaxpr, branch.jaxpr.outvars[number]) for branch in params["branches"]}
        (source,) = sources if len(sources) == 1 else (None,)
        return None if source is None else 1 + source
    if "body_jaxpr" in params:
        body, constants, before = params["body_jaxpr"].jaxpr, params["body_nconsts"], params["cond_nconsts"]
        # A loop passes an argument on if each turn gives it back under its own number.
        source = _source(body, body.outvars[number])
        return before + source if source == constants + number else None
    for name in ("jaxpr", "call_jaxpr"):
        inner = getattr(params.get(name), "jaxpr", params.get(name))
        if hasattr(inner, "eqns") and len(inner.outvars) == len(equation.outvars):
            source = _source(inner, inner.outvars[number])
            carried = number + params["num_consts"] if "num_carry" in params else source
            return source if source == carried else None
    return None
