"""Static data of the nodes of a structure, which jaxlib compares with `==`: whether it is the same in type and value.

Every call asks, so objects are compared before values: a model that is flattened again has the same objects in new
tuples.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from jaxlib import _jax

from stagec.core.trees.same import key, same

_TUPLES = _jax.pytree.PyTreeRegistry(
    enable_none=False, enable_tuple=True, enable_namedtuple=False, enable_list=False, enable_dict=False
)
"""Takes tuples apart, in C++, and nothing else."""


class StaticData(NamedTuple):
    """What the nodes of a structure have beside their children.

    parts: what is in their tuples, in tuples of these, and so on. nesting: jaxlib's PyTreeDef of the tuples.
    """

    parts: Sequence[Any]
    nesting: Any

    @staticmethod
    def of(structure: Any) -> StaticData:
        """Take static data from jaxlib's PyTreeDef. Keys of dicts that are not strings count as well."""
        data = of_nodes(structure)
        return StaticData(*_TUPLES.flatten(data)) if data else _NONE

    def same(self, other: StaticData) -> bool:
        """Whether both are the same in type and value."""
        if self.nesting != other.nesting:
            return False
        return all(map(operator.is_, self.parts, other.parts)) or all(map(same, self.parts, other.parts))

    def key(self) -> Hashable:
        """Return what is equal for two where they are the same."""
        return tuple(map(key, self.parts)), self.nesting


_NONE = StaticData(*_TUPLES.flatten(()))


def of_nodes(structure: Any) -> tuple[Any, ...]:
    """Return the static data of each node that has some, children first, and keys of dicts that are not strings."""
    # All nodes at once: what a PyTreeDef is pickled as.
    known = [(own, kind) for _, _, own, kind, _, _ in structure.__getstate__()[1] if own is not None]
    if not known:
        return ()
    data: list[Any] = []
    for own, kind in known:
        if kind is not None:
            data.append(own)
        elif type(own) is list:  # of a dict; a namedtuple has its type
            data += [name for name in own if type(name) is not str]
    return tuple(data)
