"""What frontends that trace a Python function do before: its arguments, their names, and static ones."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxlib import _jax

from stagec.core.avals import FILES, Aval, parse_aval
from stagec.core.errors import Problem, StagecError
from stagec.core.specs import FunctionSpec
from stagec.frontends import user_code


def arguments(
    spec: FunctionSpec, struct: Callable[[Aval, str], Any], read: Callable[[str, str], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the abstract arguments that a manifest writes as avals.

    struct: what stands for an array, of its aval and key. read: the tree of avals of a file, of its text and key.
    Raises StagecError with all that is wrong.
    """
    problems: list[Problem] = []

    def abstract(tree: Any, key: str) -> Any:
        if isinstance(tree, Mapping):
            return {name: abstract(child, f"{key}.{name}") for name, child in tree.items()}
        if isinstance(tree, Sequence) and not isinstance(tree, str):
            return [abstract(child, f"{key}[{i}]") for i, child in enumerate(tree)]
        if tree is None:
            return None
        try:
            return abstract(read(tree, key), key) if tree.startswith(FILES) else struct(parse_aval(tree), key)
        except StagecError as error:
            problems.extend(error.problems)

    args = tuple(abstract(tree, f"args[{i}]") for i, tree in enumerate(spec.args))
    kwargs = {name: abstract(tree, f"kwargs.{name}") for name, tree in spec.kwargs.items()}
    if problems:
        raise StagecError(*problems)
    return args, kwargs


def arguments_of_callable(spec: FunctionSpec, struct: str) -> tuple[tuple[Any, ...] | dict[str, Any], str]:
    """Return what `avals = "module:name"` names, or returns when it is called, and the advice where that is wrong.

    struct: the class of an abstract array, for messages. Raises StagecError for what is no tuple and no dict.
    """
    assert spec.avals is not None
    key = f"{spec.key}.avals"
    function = user_code.load_entry(spec.avals, spec.manifest, key)
    # Example inputs may be there as they are.
    result = user_code.run(function, f"{spec.avals} raised", spec.manifest, key) if callable(function) else function
    advice = f"return the positional arguments as a tuple, or keyword arguments as a dict, of {struct}"
    if not isinstance(result, tuple | dict):
        raise spec.problem("avals", f"{spec.avals} returned a {type(result).__name__}", advice)
    # Keys of a dict that cannot be sorted, or what a class of the user's raises.
    registry = _jax.pytree.default_registry()
    user_code.run(lambda: registry.flatten(result), f"a tree that {spec.avals} returned raised", spec.manifest, key)
    return result, advice


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
