"""Which arguments of a function a manifest binds to weights, by their places in the exported artifact."""

from __future__ import annotations

from collections.abc import Sequence

from stagec.core.builds.specs import FunctionSpec
from stagec.core.telling.errors import StagecError, nearest
from stagec.stages.exported import Exported


def resolve(spec: FunctionSpec, serialized: bytes, parameters: Sequence[str]) -> dict[str, str]:
    """Return for each argument that `spec` binds where it is: `args[0]`, or `kwargs['scale']`.

    serialized: the exported artifact. parameters: names of the function's parameters, in order, as far as they are
    positional. Raises StagecError for names that are not arguments, that are one argument, or that are donated.
    """
    positional, keyword = Exported.deserialize(serialized).in_tree.children
    count = len(positional.children)
    parameters = [name for name in parameters if not name.startswith("*")]
    places = {f"kwargs[{name!r}]": name for name in keyword.keys}
    names = [*parameters[:count], *[""] * (count - len(parameters))]
    places |= {f"args[{i}]": name for i, name in enumerate(names)}
    known = {**{place: place for place in places if place.startswith("args")}, **{n: p for p, n in places.items() if n}}
    donated = {*spec.donate_argnames, *(f"args[{i}]" for i in spec.donate_argnums)}
    kept = {state.get("argument") for state in spec.serve.get("state", {}).values()}
    bound: dict[str, str] = {}
    problems = []
    for argument in spec.bind:
        place, key = known.get(argument), f"bind.{argument}"
        if place is None:
            write = nearest(argument, known) or f"its arguments: {', '.join(filter(None, places.values())) or 'none'}"
            problems.append(spec.problem(key, f"{spec.entry} has no argument {argument!r}", write))
        elif place in bound.values():
            problems.append(spec.problem(key, f"{place} is bound twice", "keep one of the two"))
        elif donated & {place, places[place]} and not kept & {place, places[place]}:
            what = "a bound argument is used by every call, and cannot be donated"
            write = "take it out of donate_argnums and donate_argnames, or do not bind it"
            problems.append(spec.problem(key, what, write))
        else:
            bound[argument] = place
    if problems:
        raise StagecError(*(problem for error in problems for problem in error.problems))
    return bound
