"""Whether what a manifest declares about padding can be done with the function that tracing found."""

from __future__ import annotations

from stagec.core.builds.specs import FunctionSpec
from stagec.core.sizes.size import names_in
from stagec.core.telling.errors import Problem, StagecError
from stagec.core.trees.tree import argument_path
from stagec.stages.exported import Exported


def check(spec: FunctionSpec, serialized: bytes) -> None:
    """Raise StagecError when an array has a padded dimension in an expression: its real elements are not the first."""
    exported = Exported.deserialize(serialized)
    named = [
        *zip(map(argument_path, exported.in_tree.paths()), exported.in_avals, strict=True),
        *zip((f"result{path}" for path in exported.out_tree.paths()), exported.out_avals, strict=True),
    ]
    problems = []
    for dim in spec.padding:
        for path, aval in named:
            for size in aval.shape:
                if isinstance(size, str) and size != dim and dim in names_in(size):
                    what = f"{path} is {aval}: where {dim} is padded, its real elements are not its first"
                    problems.append(
                        _problem(spec, dim, what, "leave it out, or return an array whose size is the name")
                    )
    arguments = {path for path, _ in named}
    for dim, table in spec.padding.items():
        if table["mask"] and f"kwargs[{table['mask']!r}]" not in arguments:
            what = f"no keyword argument {table['mask']!r}"
            problems.append(_problem(spec, dim, what, "name one that the function takes"))
    if problems:
        raise StagecError(*problems)


def _problem(spec: FunctionSpec, dim: str, what: str, write: str) -> Problem:
    return spec.problem(f"padding.{dim}", what, write).problems[0]
