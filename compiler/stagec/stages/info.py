"""The facts about each argument and result of a stage, for `args_info` and `out_info` as in JAX's classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stagec.core.sizes.avals import Aval
from stagec.core.trees.tree import Tree
from stagec.pjrt.arrays import dtype_of
from stagec.stages.shardings import Format


@dataclass(frozen=True)
class ArgInfo:
    """The facts about one argument.

    shape: its sizes. dtype: numpy's. donated: whether the caller gives its buffer away.
    """

    shape: tuple[int, ...]
    dtype: Any
    donated: bool


@dataclass(frozen=True)
class OutInfo:
    """The facts about one result.

    shape: its sizes. dtype: numpy's. format: its layout and sharding; None for each if XLA may choose.
    """

    shape: tuple[int, ...]
    dtype: Any
    format: Format

    @property
    def sharding(self) -> Any:
        """How it is split over devices; None if XLA may choose."""
        return self.format.sharding


def args_info(in_tree: Tree, in_avals: Sequence[Aval], donated: Sequence[bool]) -> Any:
    """Return an `ArgInfo` for each argument, in the structure `(args, kwargs)`."""
    return in_tree.unflatten(
        [
            ArgInfo(tuple(map(int, aval.shape)), dtype_of(aval), given_away)
            for aval, given_away in zip(in_avals, donated, strict=True)
        ]
    )


def out_info(out_tree: Tree, out_avals: Sequence[Aval], formats: Sequence[Format]) -> Any:
    """Return an `OutInfo` for each result, in the structure of the result."""
    return out_tree.unflatten(
        [
            OutInfo(tuple(map(int, aval.shape)), dtype_of(aval), form)
            for aval, form in zip(out_avals, formats, strict=True)
        ]
    )


def donate_argnums(donated: Sequence[bool]) -> tuple[int, ...]:
    """Return the indices of the donated arguments, among the leaves of the arguments."""
    return tuple(i for i, given_away in enumerate(donated) if given_away)
