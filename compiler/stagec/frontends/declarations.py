"""Check that a manifest's declarations fit the traced function's arrays: padding, weights, names and state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from stagec.core.builds.specs import FunctionSpec
from stagec.core.messages.calls import Call, State
from stagec.core.messages.errors import StagecError, nearest
from stagec.core.sizes.size import names_in
from stagec.core.trees.tree import argument_path
from stagec.stages.exported import Exported

Fault: TypeAlias = tuple[str, str, str]
"""A key of a function in the manifest, the fault there, and the correction."""


def check(spec: FunctionSpec, serialized: bytes, parameters: Sequence[str]) -> dict[str, str]:
    """Return the path of each argument that `spec` binds to weights: `args[0]`, or `kwargs['scale']`.

    serialized: the exported artifact. parameters: names of the function's parameters, as a `Call` has them.
    Raises StagecError for padding, bound weights, names and states that do not fit.
    """
    bound: dict[str, str] = {}
    if not (spec.padding or spec.bind or spec.serve):
        return bound
    exported = Exported.deserialize(serialized)
    _refuse(spec, _faults_of_padding(spec, exported))
    _refuse(spec, _faults_of_weights(spec, exported, parameters, bound))
    call = Call(
        "", exported.in_tree, exported.in_avals, exported.out_tree, exported.out_avals, parameters, serve=spec.serve
    )
    _refuse(spec, _faults_of_names(spec, call))
    return bound


def _refuse(spec: FunctionSpec, faults: Iterable[Fault]) -> None:
    problems = [problem for fault in faults for problem in spec.problem(*fault).problems]
    if problems:
        raise StagecError(*problems)


def _faults_of_padding(spec: FunctionSpec, exported: Exported) -> Iterator[Fault]:
    """Yield arrays with a padded dimension in an expression: their real elements are not the first."""
    named = [
        *zip(map(argument_path, exported.in_tree.paths()), exported.in_avals, strict=True),
        *zip((f"result{path}" for path in exported.out_tree.paths()), exported.out_avals, strict=True),
    ]
    arguments = {path for path, _ in named}
    for dim in spec.padding:
        for path, aval in named:
            for size in aval.shape:
                if isinstance(size, str) and size != dim and dim in names_in(size):
                    what = f"{path} is {aval}: where {dim} is padded, its real elements are not its first"
                    yield f"padding.{dim}", what, "leave it out, or return an array whose size is the name"
    for dim, table in spec.padding.items():
        if table["mask"] and f"kwargs[{table['mask']!r}]" not in arguments:
            yield f"padding.{dim}", f"no keyword argument {table['mask']!r}", "name one that the function takes"


def _faults_of_weights(
    spec: FunctionSpec, exported: Exported, parameters: Sequence[str], bound: dict[str, str]
) -> Iterator[Fault]:
    """Yield names that are not arguments, that are one argument, or that are donated; enter the others in `bound`."""
    positional, keyword = exported.in_tree.children
    count = len(positional.children)
    parameters = [name for name in parameters if not name.startswith("*")]
    paths = {f"kwargs[{name!r}]": name for name in keyword.keys}
    names = [*parameters[:count], *[""] * (count - len(parameters))]
    paths |= {f"args[{i}]": name for i, name in enumerate(names)}
    known = {**{path: path for path in paths if path.startswith("args")}, **{n: p for p, n in paths.items() if n}}
    donated = _donated(spec)
    kept = {state.get("argument") for state in spec.serve.get("state", {}).values()}
    for argument in spec.bind:
        path, key = known.get(argument), f"bind.{argument}"
        if path is None:
            write = nearest(argument, known) or f"its arguments: {', '.join(filter(None, paths.values())) or 'none'}"
            yield key, f"{spec.entry} has no argument {argument!r}", write
        elif path in bound.values():
            yield key, f"{path} is bound twice", "keep one of the two"
        elif donated & {path, paths[path]} and not kept & {path, paths[path]}:
            write = "take it out of donate_argnums and donate_argnames, or do not bind it"
            yield key, "a bound argument is used by every call, and cannot be donated", write
        else:
            bound[argument] = path


def _donated(spec: FunctionSpec) -> set[str]:
    """Return the names and paths of the arguments that are donated."""
    return {*spec.donate_argnames, *(f"args[{number}]" for number in spec.donate_argnums)}


def _faults_of_names(spec: FunctionSpec, call: Call) -> Iterator[Fault]:
    """Yield paths without an array that a caller passes or gets, and names that another array has.

    Also states with other arrays than a call returns.
    """

    def leaves_of(named: set[str]) -> set[int]:
        arguments = (argument for argument in call.arguments if named & {argument.name, argument.path})
        return {leaf for argument in arguments for leaf in argument.leaves}

    hidden = leaves_of({*spec.bind, *(table["mask"] for table in spec.padding.values())})
    taken = {leaf for state in call.states.values() for leaf in state.taken}
    given = {leaf for state in call.states.values() for leaf in state.given}
    all_of = {"argument": call.input_paths, "result": dict(enumerate(call.output_paths))}
    paths = {
        "inputs": [path for leaf, path in all_of["argument"].items() if leaf not in hidden | taken],
        "outputs": [path for leaf, path in all_of["result"].items() if leaf not in given],
    }
    for key, known in paths.items():
        firsts: dict[str, str] = {}
        for path, name in spec.serve.get(key, {}).items():
            first = firsts.setdefault(name, path)
            if path not in known:
                yield f"serve.{key}[{path!r}]", f"no array of the {key} has this path", nearest(path, known)
            elif first != path:
                yield f"serve.{key}[{path!r}]", f'"{name}" is the name of {first}', "write another name"
            elif name in known and name not in spec.serve[key]:
                yield f"serve.{key}[{path!r}]", f'"{name}" is the path of another array', "write another name"
    given_away = leaves_of(_donated(spec))
    seen: dict[tuple[str, int], str] = {}
    for name, table in spec.serve.get("state", {}).items():
        state, at = call.states[name], f"serve.state.{name}"
        for key, what, write in _faults_of_state(call, state, table, all_of):
            yield f"{at}{key}", what, write
        if not state.given and given_away.intersection(state.taken):
            what = "a call consumes it, because it is donated, and no result takes its place"
            yield at, what, "name a result, or do not donate it"
        for key, leaves in (("argument", state.taken), ("result", state.given)):
            first = next((seen[key, leaf] for leaf in leaves if (key, leaf) in seen), name)
            if first != name:
                yield f"{at}.{key}", f"{table[key]} is in {first} too", "keep each array once"
            seen |= {(key, leaf): name for leaf in leaves}


def _faults_of_state(
    call: Call, state: State, table: Mapping[str, Any], paths: Mapping[str, Mapping[int, str]]
) -> Iterator[Fault]:
    """Yield the faults of a state, with the rest of the key. paths: of arguments and results."""
    numbers = {"argument": state.taken, "result": state.given}
    tops = {key: table[key] for key in numbers if table.get(key)}
    whole = {"argument": [argument.name for argument in call.arguments], "result": ["result"]}
    for key, top in tops.items():
        if not numbers[key]:
            write = nearest(top, [*whole[key], *paths[key].values()])
            yield f".{key}", f"no array of the {key}s is at {top}", write
    avals = {"argument": call.in_avals, "result": call.out_avals}
    rows = {
        key: [(paths[key][leaf][len(top) :], str(avals[key][leaf])) for leaf in numbers[key]]
        for key, top in tops.items()
    }
    for key, leaves in numbers.items():
        varying = [leaf for leaf in leaves if any(isinstance(size, str) for size in avals[key][leaf].shape)]
        if varying:
            what = f"{paths[key][varying[0]]} is {avals[key][varying[0]]}, and what is kept has one size"
            yield f".{key}", what, "give the state fixed sizes"
            return
    if all(numbers[key] for key in tops) and len(tops) == 2 and rows["argument"] != rows["result"]:
        for (taken, aval), (given, other) in zip(rows["argument"], rows["result"], strict=False):
            if (taken, aval) != (given, other):
                what = f"{tops['argument']}{taken} is {aval}, and {tops['result']}{given} is {other}"
                yield "", what, "return the arrays that the function takes, in the same structure"
                return
        counts = f"{len(rows['argument'])} arrays, and {tops['result']} has {len(rows['result'])}"
        yield "", f"{tops['argument']} has {counts}", "return the arrays that the function takes"
