"""Calls that were right once: leaves of the same kinds go to XLA again without being looked at one by one.

`jax.jit` does the same in C++, with a signature of its arguments as the key of its executables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from jaxlib import _jax

from stagec.runtime.arrays import AbstractArray, Array, Sharding, placing
from stagec.runtime.executable import Executable

Kind: TypeAlias = AbstractArray | tuple[tuple[int, ...], np.dtype[Any]] | None
"""What XLA must know of a leaf: a device array's shape, dtype and sharding, a numpy array's shape and dtype.

None for any other object, of which the type says neither; its calls are never remembered.
"""

Kinds: TypeAlias = tuple[Kind, ...]
MOST_KINDS = 64
"""Of calls that a function remembers; a caller who varies more of them is served as well, without this."""

_Host: TypeAlias = tuple[int, Sharding, Callable[[Sequence[np.ndarray[Any, Any]]], _jax.ArrayImpl]]
"""Number of a parameter, and how its array gets to the devices."""

_is_deleted = _jax.ArrayImpl.is_deleted


def kinds_of(leaves: Sequence[Any]) -> Kinds:
    """Return the kind of each leaf. Kinds that are equal mean leaves that an executable takes alike."""
    return tuple(
        [
            leaf.aval if type(leaf) is Array else (leaf.shape, leaf.dtype) if type(leaf) is np.ndarray else None
            for leaf in leaves
        ]
    )


class Prepared:
    """Calls of one executable with leaves of the same kinds.

    on_device: whether one of the leaves is a device array, so that results stay there.
    """

    __slots__ = ("_executable", "_host", "_kept", "on_device")

    def __init__(self, executable: Executable, kept: Sequence[int] | None, host: Sequence[_Host], on_device: bool):
        """See `of`. kept: None: all. host: the parameters that are given as numpy arrays."""
        self._executable = executable
        self._kept = kept
        self._host = host
        self.on_device = on_device

    @staticmethod
    def of(
        executable: Executable, kinds: Kinds, kept: Sequence[int], donated: Sequence[bool], donate: bool
    ) -> Prepared | None:
        """Return calls of `executable`; None where a leaf must be looked at, copied or moved each time.

        kept: which of the leaves are its parameters. donated: for each leaf. donate: whether the caller lets them go.
        """
        if None in kinds or (not donate and True in donated):
            return None
        host = []
        for number, (i, aval) in enumerate(zip(kept, executable.parameters, strict=True)):
            match kinds[i]:
                case AbstractArray() as kind:
                    fits = kind is aval or kind.sharding.same(aval.sharding, aval.shape)
                    shape, dtype = kind.shape, kind.dtype
                case (shape, dtype):
                    fits = True
                    host.append((number, aval.sharding, placing(aval, donated[i])))
            # They were checked against the function's avals; XLA, which checks nothing, gets these buffers unseen.
            if not fits or shape != aval.shape or dtype != aval.dtype:
                return None
        on_device = any(isinstance(kind, AbstractArray) for kind in kinds)
        return Prepared(executable, None if len(kept) == len(kinds) else kept, host, on_device)

    def run(self, leaves: Sequence[Any], donate: bool = True) -> list[Array] | None:
        """Return the results as device arrays; None where an array was donated to an earlier call: nothing ran.

        donate: as these calls were prepared for.
        """
        taken = leaves if self._kept is None else [leaves[i] for i in self._kept]
        if not self._host:
            buffers = [leaf._buffer for leaf in taken]
        else:
            buffers = [leaf._buffer if type(leaf) is Array else leaf for leaf in taken]
            for number, sharding, place in self._host:
                buffers[number] = place(sharding.pieces(buffers[number]))
        return None if any(map(_is_deleted, buffers)) else self._executable.run(buffers)
