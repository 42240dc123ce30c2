"""Bound arguments: match each leaf to an array of a file of weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from stagec.core.builds.specs import FunctionSpec
from stagec.core.messages.errors import Problem, StagecError
from stagec.core.sizes.avals import Aval, parse_aval
from stagec.core.trees.tree import Tree

_LISTED = 20
"""How many arrays a message lists."""


class _Array(Protocol):
    @property
    def aval(self) -> Aval: ...


Array = TypeVar("Array", bound=_Array)
"""An array of a file: its aval, and where its bytes are."""


class Bindings(Generic[Array]):
    """The weights of a bundle, gathered function by function.

    tensors: the bound arrays, by their names in the index: `FILE:TENSOR`.
    """

    def __init__(self, files: Mapping[str, Mapping[str, Array]]) -> None:
        """files: the arrays of each file, by its path in the manifest."""
        self.tensors: dict[str, Array] = {}
        self._files = files
        self._problems: list[Problem] = []
        self._claimed: dict[tuple[str, str], tuple[FunctionSpec, str]] = {}

    def entries(self, spec: FunctionSpec, description: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the index's entry for the bound arguments of a function: the weight of each leaf.

        description: of the exported artifact; it says where the arguments are. Faults are kept for `check`.
        """
        paths = description["bound"]
        bound: list[dict[str, Any]] = []
        for argument, source in spec.bind.items():
            if argument not in paths:
                what = "the description of the exported artifact does not say which argument this is"
                self._report(spec, argument, what, "give the description that was written with the artifact")
            elif source["file"] not in self._files:
                self._report(spec, argument, f"no weights {source['file']} are given", "give them with --weights")
            else:
                bound += self._of_argument(spec, argument, description, paths[argument])
        return sorted(bound, key=lambda entry: entry["leaf"])

    def check(self, only_used: bool = True) -> None:
        """Raise StagecError with all faults.

        only_used: whether unbound arrays are faults; False to look at one function of several.
        """
        for (file, prefix), (spec, argument) in self._claimed.items() if only_used else ():
            names = [name for name in self._files[file] if name.startswith(prefix)]
            extra = [name for name in names if f"{file}:{name}" not in self.tensors]
            if extra:
                what = f"{file} has {listed(extra)}, and nothing is bound to that"
                self._report(spec, argument, what, "leave it out of the file, or write a prefix")
        if self._problems:
            raise StagecError(*self._problems)

    def _of_argument(
        self, spec: FunctionSpec, argument: str, description: Mapping[str, Any], path: str
    ) -> Iterator[dict[str, Any]]:
        file, prefix = spec.bind[argument]["file"], spec.bind[argument]["prefix"]
        leaves = _leaves(Tree.from_json(description["in_tree"]), path)
        if "" in leaves:  # the argument is one array, and has no path
            wanted = {prefix or argument: leaves[""]}
        else:
            wanted = {prefix + name: leaf for name, leaf in leaves.items()}
        if not prefix or "" not in leaves:
            self._claimed.setdefault((file, prefix), (spec, argument))
        missing = []
        for name, leaf in wanted.items():
            aval, tensor = parse_aval(description["in_avals"][leaf]), self._files[file].get(name)
            if tensor is None:
                missing.append(f"{name} ({aval})")
                continue
            if Aval(aval.dtype, aval.shape) != tensor.aval:
                what = f"{name} of {file} is {tensor.aval}; expected {aval}"
                self._report(spec, argument, what, "save it with this dtype and shape, or change the aval")
            self.tensors[f"{file}:{name}"] = tensor
            yield {"leaf": leaf, "weight": f"{file}:{name}"}
        if missing:
            self._report(spec, argument, f"{file} lacks {listed(missing)}", "save it under this name")

    def _report(self, spec: FunctionSpec, argument: str, what: str, write: str) -> None:
        self._problems += spec.problem(f"bind.{argument}", what, write).problems


def listed(names: Sequence[str]) -> str:
    """Return names for a message: the first ones, and how many more there are."""
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def _leaves(in_tree: Tree, path: str) -> dict[str, int]:
    """Return the name of each leaf of the argument at `path`, and its number among all; an array is named ""."""
    first = 0
    for top, which in zip(in_tree.children, ("args", "kwargs"), strict=True):
        for key, argument in zip(top.child_names(), top.children, strict=True):
            if path == (f"args[{key}]" if which == "args" else f"kwargs[{key!r}]"):
                return {".".join(names): first + i for i, names in enumerate(argument.names())}
            first += argument.num_leaves
    return {}
