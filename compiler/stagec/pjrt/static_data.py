"""Compare static data of a structure's nodes in type and value, because jaxlib compares it only with `==`.

Every call asks, so objects are compared before values: a model that is flattened again has the same objects in new
tuples.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxlib import _jax

from stagec.core.trees.same import same

_CONTAINERS = _jax.pytree.PyTreeRegistry(
    enable_none=False, enable_tuple=True, enable_namedtuple=False, enable_list=True, enable_dict=False
)
"""Takes tuples and lists apart, in C++, and nothing else."""


class StaticData(NamedTuple):
    """The data of a structure's nodes beside their children: auxiliary data, and keys of dicts.

    nodes: the numbers of the nodes that have data, children first. kinds: the type of each node's data.
    top: the items of their tuples and lists; None if a node's data is something else. parts: the items at all depths.
    nesting: jaxlib's PyTreeDef of all these tuples and lists.
    """

    nodes: Sequence[int]
    kinds: Sequence[type]
    top: Sequence[Any] | None
    parts: Sequence[Any]
    nesting: Any

    @staticmethod
    def of(structure: Any) -> StaticData:
        """Take static data from jaxlib's PyTreeDef."""
        # All nodes at once: the pickled form of a PyTreeDef. A dict has a list of its keys, a namedtuple its type.
        known = [
            (number, own)
            for number, (_, _, own, kind, _, _) in enumerate(structure.__getstate__()[1])
            if kind is not None or (own and type(own) is list)
        ]
        data = [own for _, own in known]
        kinds = [*map(type, data)]
        top = [*itertools.chain.from_iterable(data)] if {*kinds} <= {tuple, list} else None
        return StaticData([number for number, _ in known], kinds, top, *_CONTAINERS.flatten(data))

    def same(self, structure: Any) -> bool:
        """Whether a structure that jaxlib finds equal to this one's has the same static data, in type and value."""
        if not self.nodes:
            return True
        nodes = structure.__getstate__()[1]
        data = [nodes[number][2] for number in self.nodes]
        is_shallow = self.top is not None and self.kinds == [*map(type, data)]
        if is_shallow and all(map(operator.is_, self.top or (), itertools.chain.from_iterable(data))):
            return True
        parts, nesting = _CONTAINERS.flatten(data)
        if self.nesting != nesting:
            return False
        return all(map(operator.is_, self.parts, parts)) or all(map(same, self.parts, parts))
