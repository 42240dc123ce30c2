"""Whether what a manifest says for servers is about arrays that the traced function has: names, and state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stagec.core.builds.specs import FunctionSpec
from stagec.core.telling.calls import Call, State
from stagec.core.telling.errors import Problem, StagecError, nearest
from stagec.stages.exported import Exported


def check(spec: FunctionSpec, serialized: bytes, parameters: Sequence[str]) -> None:
    """Raise StagecError for a path that no array has which a caller passes or gets, or a name that another has.

    Also for a state whose arrays are not those that a call gives back. parameters: names of the function's parameters,
    as a `Call` has them.
    """
    exported = Exported.deserialize(serialized)
    call = Call(
        "", exported.in_tree, exported.in_avals, exported.out_tree, exported.out_avals, parameters, serve=spec.serve
    )
    in_bundle = {*spec.bind, *(table["mask"] for table in spec.padding.values())}
    hidden = {
        leaf for argument in call.arguments if in_bundle & {argument.name, argument.place} for leaf in argument.leaves
    }
    taken = {leaf for state in call.states.values() for leaf in state.taken}
    given = {leaf for state in call.states.values() for leaf in state.given}
    all_of = {"argument": call.input_paths, "result": dict(enumerate(call.output_paths))}
    paths = {
        "inputs": [path for leaf, path in all_of["argument"].items() if leaf not in hidden | taken],
        "outputs": [path for leaf, path in all_of["result"].items() if leaf not in given],
    }
    problems: list[Problem] = []
    for key, known in paths.items():
        for path, name in spec.serve.get(key, {}).items():
            what = ""
            if path not in known:
                what, write = f"no array of the {key} has this path", nearest(path, known)
            elif name in known and name not in spec.serve[key]:
                what, write = f'"{name}" is the path of another array', "write another name"
            if what:
                problems += spec.problem(f"serve.{key}[{path!r}]", what, write).problems
    donated = {*spec.donate_argnames, *(f"args[{number}]" for number in spec.donate_argnums)}
    given_away = {
        leaf for argument in call.arguments if donated & {argument.name, argument.place} for leaf in argument.leaves
    }
    seen: dict[tuple[str, int], str] = {}
    for name, table in spec.serve.get("state", {}).items():
        state = call.states[name]
        for key, what, write in _wrong(call, state, table, all_of):
            problems += spec.problem(f"serve.state.{name}{key}", what, write).problems
        if not state.given and given_away.intersection(state.taken):
            what = "a call consumes it, for it is donated, and no result takes its place"
            problems += spec.problem(f"serve.state.{name}", what, "name a result, or do not donate it").problems
        for key, leaves in (("argument", state.taken), ("result", state.given)):
            first = next((seen[key, leaf] for leaf in leaves if (key, leaf) in seen), name)
            if first != name:
                what = f"{table[key]} is in {first} too"
                problems += spec.problem(f"serve.state.{name}.{key}", what, "keep each array once").problems
            seen |= {(key, leaf): name for leaf in leaves}
    if problems:
        raise StagecError(*problems)


def _wrong(
    call: Call, state: State, table: Mapping[str, Any], paths: Mapping[str, Mapping[int, str]]
) -> Iterator[tuple[str, str, str]]:
    """Yield where, what and what to write instead of what is wrong with a state. paths: of arguments and results."""
    numbers = {"argument": state.taken, "result": state.given}
    places = {key: table[key] for key in numbers if table.get(key)}
    whole = {"argument": [argument.name for argument in call.arguments], "result": ["result"]}
    for key, place in places.items():
        if not numbers[key]:
            write = nearest(place, [*whole[key], *paths[key].values()])
            yield f".{key}", f"no array of the {key}s is at {place}", write
    avals = {"argument": call.in_avals, "result": call.out_avals}
    rows = {
        key: [(paths[key][leaf][len(place) :], str(avals[key][leaf])) for leaf in numbers[key]]
        for key, place in places.items()
    }
    for key, leaves in numbers.items():
        varying = [leaf for leaf in leaves if any(isinstance(size, str) for size in avals[key][leaf].shape)]
        if varying:
            what = f"{paths[key][varying[0]]} is {avals[key][varying[0]]}, and what is kept has one size"
            yield f".{key}", what, "give the state fixed sizes"
            return
    if all(numbers[key] for key in places) and len(places) == 2 and rows["argument"] != rows["result"]:
        for (taken, aval), (given, other) in zip(rows["argument"], rows["result"], strict=False):
            if (taken, aval) != (given, other):
                what = f"{places['argument']}{taken} is {aval}, and {places['result']}{given} is {other}"
                yield "", what, "return the arrays that the function takes, in the same structure"
                return
        counts = f"{len(rows['argument'])} arrays, and {places['result']} has {len(rows['result'])}"
        yield "", f"{places['argument']} has {counts}", "return the arrays that the function takes"
