"""Functions of pytrees as functions of arrays, which primitives take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from stagec_arrays import pytrees
from stagec_arrays.namespace.promotion import array_of


class Flat:
    """A function of pytrees as one of their leaves, which gives the leaves of its result as arrays.

    out: the structure of the last result.
    """

    def __init__(self, function: Callable[..., Any], structure: Any) -> None:
        """Flatten a function of positional arguments; `structure` is that of the tuple of them."""
        self._function = function
        self._structure = structure
        self.out: Any = None

    def __call__(self, *leaves: Any) -> list[Any]:
        """Call the function."""
        result, self.out = pytrees.flatten(self._function(*self._structure.unflatten(leaves)))
        return [array_of(leaf) for leaf in result]

    def unflatten(self, results: Sequence[Any]) -> Any:
        """Return leaves of a result in its structure."""
        return self.out.unflatten(results)
