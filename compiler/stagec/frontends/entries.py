"""What frontends that trace a Python function do with it before: names of its arguments, and static ones."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stagec.core.errors import Problem, StagecError
from stagec.core.specs import FunctionSpec


def bind(function: Callable[..., Any], static: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the function with its static arguments bound: no frontend sees them as arguments."""

    @functools.wraps(function)
    def bound(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs, **static)

    with contextlib.suppress(TypeError, ValueError):  # a builtin has no signature
        signature = inspect.signature(function)
        # Frontends name the arguments of the module after these parameters.
        parameters = [parameter for parameter in signature.parameters.values() if parameter.name not in static]
        bound.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return bound


def check_names(spec: FunctionSpec, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Check the arguments against the function's signature, so that a wrong name is told before tracing.

    Raises StagecError with all that is wrong.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # a builtin: tracing will tell
    problems = []
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())
    for key, names in (("static", spec.static), ("donate_argnames", spec.donate_argnames), ("kwargs", kwargs)):
        for name in names:
            if name not in signature.parameters and not takes_any:
                known = ", ".join(signature.parameters) or "none"
                problems.append(
                    Problem(
                        spec.manifest,
                        f"{spec.key}.{key}",
                        f"{spec.entry} has no parameter {name!r}",
                        f"its parameters: {known}",
                    )
                )
    for number in spec.donate_argnums:
        if number >= len(args):
            what = f"argument {number} does not exist: the function is given {len(args)} positional arguments"
            problems.append(Problem(spec.manifest, f"{spec.key}.donate_argnums", what))
    if not problems:
        try:
            signature.bind(*args, **kwargs, **spec.static)
        except TypeError as error:
            what = f"the arguments do not fit {spec.entry}{signature}: {error}"
            problems.append(Problem(spec.manifest, spec.key, what))
    if problems:
        raise StagecError(*problems)


def hashable(value: Any) -> Any:
    """Return a static value that has a hash: TOML's arrays become tuples."""
    return tuple(map(hashable, value)) if isinstance(value, list) else value
