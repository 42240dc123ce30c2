"""Find changes that a function makes to its arguments, or to objects in its closure, during tracing.

A program gives results and changes nothing else: as under `jax.jit`, what a function assigns to a field of an argument
is gone after the trace. Where no result has it, the update would be lost, and that is refused.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

from jaxlib import _jax

from stagec.core.messages.errors import mistake
from stagec.core.trees.tree import argument_path
from stagec.frontends.common import closures, user_code
from stagec.frontends.common.closures import leaves

Refusal: TypeAlias = "Callable[[str, str], Exception]"
"""Makes an error from a function's behavior (a sentence without its name) and the correction."""
_SHOWN = 3
"""Paths that an error names."""


def watched(
    function: Callable[..., Any],
    refusal: Refusal,
    value_of: Callable[[Any], Any],
    copied: str,
    same: Callable[[Callable[..., Any], Any, Mapping[str, Any], Sequence[str]], Collection[str]] = lambda *_: (),
) -> Callable[..., Any]:
    """Return `function` with a check after each call; its signature stays.

    refusal: makes the error of a call if the function replaced arrays of its arguments, or of objects that it reaches
    by names, and does not return the new ones.
    value_of: returns the placeholder of an array's elements in a trace; None for anything but an array of a trace.
    copied: how to copy an argument NAME.
    same: returns the paths with an unchanged value in another tracer. It is given the function, the PyTreeDef of
        `(args, kwargs)` and its leaves by path, both before the call, and the paths of new values.
    """

    def lost(paths: Sequence[str], write: str) -> Exception:
        shown = ", ".join(paths[:_SHOWN]) + (f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else "")
        return refusal(f"changes {shown} in place, and a call would lose the change", write)

    def reached(before: Mapping[str, Any]) -> list[tuple[str, Any]]:
        names = user_code.positional(function)
        objects = {named(names, path): leaf for path, leaf in before.items() if value_of(leaf) is None}
        values = ((f"{name} ({where})", value_of(leaf)) for name, leaf, where in closures.reached(function, objects))
        return [(name, value) for name, value in values if value is not None]

    def watching(*args: Any, **kwargs: Any) -> Any:
        before, again = dict(leaves((args, kwargs))), dict(leaves((args, kwargs)))
        values = {path: value_of(leaf) for path, leaf in before.items()}
        structure = _structure((args, kwargs))
        around = reached(before)  # of the traces around this one
        result = function(*args, **kwargs)
        returned = {id(value_of(leaf)) for _, leaf in leaves(result)}
        # An object that differs each time is made by taking the tree apart.
        made = {path for path, leaf in before.items() if again.get(path) is not leaf}
        after = {path: value_of(leaf) for path, leaf in leaves((args, kwargs))}
        passed_over = returned | ({id(value) for value in values.values()} if len(after) < len(before) else set())
        changed = [
            path
            for path, value in after.items()
            if value is not None and value is not values.get(path) and path not in made and id(value) not in passed_over
        ]
        if changed:
            unchanged = same(function, structure, before, changed)
            changed = [path for path in changed if path not in unchanged]
        if changed:
            raise lost(*_arguments(user_code.positional(function), changed, copied))
        returned |= {id(value) for _, value in around}
        if paths := [name for name, value in reached(before) if id(value) not in returned]:
            raise lost(paths, "make it an argument, and return the new value beside the result")
        return result

    functools.update_wrapper(watching, function)
    return watching


def refusal_of(name: str) -> Refusal:
    """Return a function that makes a ValueError about the function of this name."""
    return lambda what, write: ValueError(str(mistake(f"{name} {what}", write)))


def _structure(tree: Any) -> Any:
    try:
        return _jax.pytree.default_registry().flatten(tree)[1]
    except Exception:  # noqa: BLE001 - a class of the user's raises anything
        return None


def _arguments(parameters: Sequence[str], changed: Sequence[str], copied: str) -> tuple[list[str], str]:
    """Return the paths of changed arguments, and the correction."""
    paths = [named(parameters, path) for path in changed]
    names = list(dict.fromkeys(re.split(r"(?<=.)[.\[]", path)[0] for path in paths))
    write = f"return {', '.join(names)} too, and give the next call what the result has;\n"
    return paths, write + f"if no caller needs the change, make it to a copy: {copied.replace('NAME', names[0])}"


def named(names: Sequence[str], path: str) -> str:
    """Return a path in `(args, kwargs)` as a caller writes it, with the parameter's name: `[0][1].w` -> `model.w`."""
    number, _, rest = path[4:].partition("]")
    if path.startswith("[1]["):
        return number.strip("'") + rest
    if number.isdigit() and int(number) < len(names) and not names[int(number)].startswith("*"):
        return names[int(number)] + rest
    return argument_path(path)
