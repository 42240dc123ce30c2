"""Whether the names that a manifest gives for servers are those of arrays that the traced function has."""

from __future__ import annotations

from collections.abc import Sequence

from stagec.core.builds.specs import FunctionSpec
from stagec.core.telling.calls import Call
from stagec.core.telling.errors import Problem, StagecError, nearest
from stagec.stages.exported import Exported


def check(spec: FunctionSpec, serialized: bytes, parameters: Sequence[str]) -> None:
    """Raise StagecError for a path that no array has which a caller passes or gets, or a name that another has.

    parameters: names of the function's parameters, as a `Call` has them.
    """
    exported = Exported.deserialize(serialized)
    call = Call("", exported.in_tree, exported.in_avals, exported.out_tree, exported.out_avals, parameters)
    in_bundle = {*spec.bind, *(table["mask"] for table in spec.padding.values())}
    bound = {
        leaf: ""
        for argument in call.arguments
        if in_bundle & {argument.name, argument.place}
        for leaf in argument.leaves
    }
    paths = {
        "inputs": [path for leaf, path in call.input_paths.items() if leaf not in bound],
        "outputs": call.output_paths,
    }
    problems: list[Problem] = []
    for key, names in spec.serve.items():
        for path, name in names.items():
            what = ""
            if path not in paths[key]:
                what, write = f"no array of the {key} has this path", nearest(path, paths[key])
            elif name in paths[key] and name not in names:
                what, write = f'"{name}" is the path of another array', "write another name"
            if what:
                problems += spec.problem(f"serve.{key}[{path!r}]", what, write).problems
    if problems:
        raise StagecError(*problems)
